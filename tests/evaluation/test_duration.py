"""How long an evaluation is: ``eval.steps`` adds episodes, and ``eval.timeout_s`` leaves out late ones."""

from __future__ import annotations

import csv
import json
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlplug.api import Job
from rlplug.checkpointing.format import Checkpoint, find
from rlplug.cli import main
from rlplug.collection.play import EpisodeSplitter, Player
from rlplug.config import compose, parse
from rlplug.run.build import build
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, RunError

SMALL = ["model.hidden=[4]", "logger.only=[]", "hardware=cpu", "num_envs=1", "algo.num_sgd_iter=1", "tuned=none"]
CARTPOLE = ["env=cartpole", "total_steps=64", "rollout_fragment_length=32", *SMALL]
CARTPOLE += ["algo.sgd_minibatch_size=32", "eval.episodes=3"]


class Uneven(gymnasium.Env):
    """Pays 1 at every step, which takes a while. By their seeds, episodes have two steps or very many."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
    SHORT = 2

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.SHORT if self.np_random.integers(2) else 100_000
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


gymnasium.register("Uneven-v0", lambda **kwargs: Uneven())
UNEVEN = ["env=gymnasium", "env.id=tests.evaluation.test_duration:Uneven-v0", "total_steps=20", *SMALL]
UNEVEN += ["rollout_fragment_length=20", "algo.sgd_minibatch_size=20", "eval.every=0", "eval.episodes=6"]


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("eval/episodes")]


# ---- steps -----------------------------------------------------------------------------------------------------------


def evaluated(fabric, raw):
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        evaluation = trainer.reports.evaluation
        metrics, played = evaluation.evaluator.evaluate(partial(evaluation._play, trainer))
        return metrics, sorted(zip(played["return"].tolist(), played["length"].tolist(), strict=True))


def test_every_column_plays_on_until_it_has_its_share():
    few, many = (evaluated(None, compose([*CARTPOLE, *more]).raw) for more in ([], ["eval.steps=400"]))
    assert "eval/episodes" not in few[0]
    assert len(few[1]) == 3
    assert many[0]["eval/episodes"] == len(many[1]) > 3
    lengths = [length for _, length in many[1]]
    assert 400 <= sum(lengths) < 400 + 3 + 3 * max(lengths)
    assert {*few[1]} <= {*many[1]}  # the first of every column
    assert many[0]["eval/return_mean"] == np.mean([total for total, _ in many[1]])


def test_fewer_steps_than_the_episodes_have_change_nothing():
    few, same = (evaluated(None, compose([*CARTPOLE, *more]).raw) for more in ([], ["eval.steps=3"]))
    assert few[1] == same[1]
    assert same[0] == few[0] | {"eval/episodes": 3}


def test_two_ranks_play_the_episodes_of_one():
    words = ["algo=ppo", "env=cartpole", "model.hidden=[8]", "eval.episodes=4", "eval.steps=900"]
    alone = evaluated(None, compose([*words, "hardware=cpu"]).raw)
    assert alone[0]["eval/episodes"] > 4
    assert ranks(2)(evaluated, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]


@pytest.mark.parametrize(("steps", "kept"), [(0, [2, 2, 2]), (6, [2, 2, 2]), (7, [2, 2, 2, 2]), (9, [2, 2, 2, 2, 2])])
def test_episodes_of_one_segment_are_counted_one_by_one(steps: int, kept: list[int]):
    splitter = EpisodeSplitter(np.array([3]), 99, steps=steps)
    rows = 3 * 8 + 1  # 8 episodes of two steps and a final observation
    place = torch.arange(rows).unsqueeze(1) % 3
    batch = {"obs": torch.zeros(rows, 1), "reward": torch.ones(rows, 1), "valid": place < 2, "is_first": place == 0}
    batch |= {"terminated": place == 1, "truncated": torch.zeros(rows, 1, dtype=torch.bool)}
    splitter.add(batch)
    assert [length for _, length, *_ in splitter.played] == kept
    assert not splitter.left.any()


# ---- timeout ---------------------------------------------------------------------------------------------------------


def test_the_complete_episodes_are_the_result(tmp_path: Path, capfd):
    assert train(compose([*UNEVEN, "eval.timeout_s=1.5"]), tmp_path / "run") == 2.0
    late = capfd.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--json", "eval.timeout_s=null", "eval.max_episode_steps=20"]) == 0
    n = round((6 * 20 - 6 * json.loads(capfd.readouterr().out)["eval/length_mean"]) / 18)  # of 2 steps
    assert 0 < n < 6
    assert late.count(f"rlplug: eval.timeout_s=1.5 ended an evaluation after {n} complete episodes\n") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"status": "finished", "eval/return_mean": 2.0, "eval/episodes": n}.items() <= summary.items()
    (row,) = rows(tmp_path / "run")
    assert (row["eval/episodes"], row["eval/return_mean"]) == (str(n), "2.0")
    assert find(tmp_path / "run").manifest["score"] == 2.0


def test_without_a_complete_episode_there_is_no_score(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Uneven, "SHORT", 100_000)
    words = [*UNEVEN, "eval.episodes=2", "eval.timeout_s=0.3", "stop={eval/return_mean: 4}"]
    assert np.isnan(train(compose(words), tmp_path / "run"))
    assert capfd.readouterr().err.count("ended an evaluation after 0 complete episodes") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/episodes"] == 0
    assert "eval/return_mean" not in summary
    assert find(tmp_path / "run").manifest["score"] is None
    assert [row["eval/episodes"] for row in rows(tmp_path / "run")] == ["0"]
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "eval.timeout_s: no episode ended within 0.3 seconds; raise it" in capfd.readouterr().err
    words = ["evaluate", str(tmp_path / "run"), "eval.steps=60", "eval.timeout_s=100", "eval.max_episode_steps=20"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["eval/episodes"] == 4  # two columns with 30 steps each


def test_a_run_that_is_not_late_is_the_run_without_it(tmp_path: Path):
    """Also where it ended within an evaluation, which then begins again."""
    words = [*CARTPOLE, "eval.every=32", "eval.episodes=2", "eval.timeout_s=100"]
    train(compose(words), tmp_path / "one")
    stopped, play = False, Player.play

    def interrupted(player, jobs, weights=None, stop=lambda: False, *more):
        nonlocal stopped
        again = stopped
        stopped = True
        return play(player, jobs, weights, stop if again else lambda: _ask(player), *more)

    def _ask(player):
        raise RunError("the machine failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Player, "play", interrupted)
        with pytest.raises(RunError, match="the machine failed"):
            train(compose([*words, "checkpoint.every=16"]), tmp_path / "two")
    resume(tmp_path / "two", tell=lambda _: None)
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []
    assert Checkpoint(find(tmp_path / "two").path).steps == 64


@pytest.mark.slow
def test_actors_that_evaluate_are_late_too(tmp_path: Path, capfd):
    words = [*UNEVEN, "eval.every=20", "eval.timeout_s=1.5", "hardware=ray"]
    words += ["hardware.actors.count=1", "hardware.actors.evaluation=1", "hardware.actors.num_cpus=0.5"]
    train(compose([word for word in words if word != "hardware=cpu"]), tmp_path / "run")
    assert "complete episodes" in capfd.readouterr().err
    assert {row["eval/episodes"] for row in rows(tmp_path / "run")} <= {*"012345"}


STAGES = ["curriculum=threshold", "curriculum.stages=[2]", "curriculum.level=1", "curriculum.metric=eval/return_mean"]
REFUSED = {
    "eval.steps": (["algo=maml", "env=point_goals", "eval.steps=10"], "runs greedy episodes, but maml evaluates"),
    "eval.timeout_s": (
        ["algo=maml", "env=point_goals", "eval.timeout_s=1"],
        "runs greedy episodes, but maml evaluates",
    ),
    "curriculum.metric": (
        ["algo=ppo", "env=frozenlake_tasks", *STAGES, "eval.timeout_s=1"],
        "eval/return_mean depends on the machine",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refused(key: str, tmp_path: Path):
    words, why = REFUSED[key]
    with pytest.raises(ConfigError, match=why) as refused:
        build(compose([*words, "hardware=cpu", "logger.only=[]"]), tmp_path)
    assert refused.value.key == key


@pytest.mark.parametrize("word", ["eval.steps=0", "eval.steps=1.5", "eval.timeout_s=0", "eval.timeout_s=-1"])
def test_out_of_range(word: str):
    with pytest.raises(ConfigError) as refused:
        compose([*CARTPOLE, word])
    assert refused.value.key == word.split("=")[0]


def test_a_job_has_neither(tmp_path: Path):
    with closing(build(compose([*CARTPOLE, "eval.steps=400", "eval.timeout_s=100"]), tmp_path)) as trainer:
        (batch,) = trainer.policy.player().play([Job(0, episodes=2)])
        assert len(batch["return"]) == 2
