"""Runs of teams: the two-step game, actors, and recorded episodes."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest

from rlplug.agent import load
from rlplug.cli import main
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.testing.comparing import compare_runs

QUIET = ("hardware=cpu", "logger.only=[]", "eval.every=0")
GAME = (
    *("algo=qmix", "env=two_step", "tuned=none", *QUIET, "num_envs=8", "algo.batch_mode=windows", "buffer=replay"),
    *("model=mlp", "model.hidden=[32]", "algo.last_action=false", "train_batch_size=64", "replay_ratio=0.125"),
    *("exploration.epsilon_greedy.epsilon=1.0", "algo.opt_type=adam", "algo.lr=0.01"),
    *("algo.target_network_update_freq=200", "num_steps_sampled_before_learning_starts=200"),
)
SMALL = "algo.algo.sgd_minibatch_size=16"
REPLAYED = (
    "train_batch_size=8",
    "num_steps_sampled_before_learning_starts=64",
    "replay_ratio=0.1",
    "buffer.capacity=400",
)


@pytest.mark.parametrize(
    ("mixer", "value", "steps"),
    [("qmix", 8.0, 4000), *(pytest.param(name, 7.0, 2000, marks=pytest.mark.slow) for name in ("vdn", "none"))],
)
def test_two_step_game(tmp_path, mixer, value, steps):
    """1803.11485, section 5: only QMIX finds the better joint action."""
    words = (*GAME, f"algo.mixer={mixer}", f"total_steps={steps}", "eval.episodes=4")
    assert main([*words, f"hydra.run.dir={tmp_path}"]) == 0
    result = json.loads((tmp_path / "summary.json").read_text())
    assert (result["eval/return_mean"], result["eval/return_std"]) == (value, 0.0)


def test_learns_from_its_recorded_episodes(tmp_path):
    """What was played is what is recorded and learned from, with states, lives and the agents' actions."""
    record, run, again = (tmp_path / name for name in ("record", "run", "again"))
    words = ("algo=qmix", "env=two_step", *QUIET, "model.hidden=8", "model.torso.hidden=[8]", "buffer.capacity=500")
    played = ("total_steps=200", "num_steps_sampled_before_learning_starts=100", f"record.path={record}")
    assert main([*words, *played, f"hydra.run.dir={run}"]) == 0
    recording = Recording([str(record)], Reading())
    episode = recording.episode(0, None, 1)
    assert episode["action"].shape == episode["alive"].shape == (3, 2)
    assert episode["state"].shape == (3, 3)
    assert np.asarray(episode["alive"]).tolist() == [[True, True], [True, True], [False, False]]
    offline = (f"data.path={record}", "loop=offline", "exploration=[]", "total_steps=20", "train_batch_size=8")
    assert main([*words, *offline, "replay_ratio=null", "log.every=5", f"hydra.run.dir={again}"]) == 0
    with (again / "metrics.csv").open() as file:
        found = [float(row["train/critic"]) for row in csv.DictReader(file) if row["train/critic"]]
    assert found
    assert all(map(math.isfinite, found))


def test_a_loaded_team_remembers_its_last_actions(tmp_path):
    words = ("algo=qmix", "env=two_step", *QUIET, "tuned=none", "model.hidden=8", "model.torso.hidden=[8]")
    short = ("total_steps=40", "num_steps_sampled_before_learning_starts=20", "buffer.capacity=500", "eval.episodes=1")
    assert main([*words, *short, f"hydra.run.dir={tmp_path}"]) == 0
    team, seen = load(tmp_path), []
    act = team.algorithm.act
    team.algorithm.act = lambda step, carry, mode: seen.append(step) or act(step, carry, mode)
    obs = np.eye(3, dtype=np.float32)[[0, 0]]
    first = team.act({"team": obs})["team"]
    team.act({"team": obs})
    team.reset()
    team.act({"team": obs})
    assert [step["prev_action"][0].tolist() for step in seen] == [[0, 0], first.tolist(), [0, 0]]
    assert [step["agent_is_first"].all().item() for step in seen] == [True, False, True]


def test_a_run_ends_after_a_number_of_actions_of_agents(tmp_path):
    """Agents that have died do not count, and a resumed run goes on counting."""
    words = ("algo=mappo", "env=two_carts", *QUIET, "tuned=none", "num_envs=4", "rollout_fragment_length=32")
    words = (*words, "algo.num_sgd_iter=1", "eval.episodes=1", "log.every=100", "total_steps=2000")
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert main([*words, "stop={agent_steps: 900}", f"hydra.run.dir={whole}"]) == 0
    assert main([*words, "stop={agent_steps: 300}", f"hydra.run.dir={again}"]) == 0
    assert main(["resume", str(again), "stop={agent_steps: 900}"]) == 0

    def counted(run):
        with (run / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["agent_steps"]]
        return [(int(row["step"]), int(float(row["agent_steps"]))) for row in rows]

    assert all(steps < actions < 2 * steps for steps, actions in counted(whole))
    assert counted(again)[-1] == counted(whole)[-1]
    assert counted(whole)[-2][1] < 900 <= counted(whole)[-1][1]
    assert "agent_steps reached" in json.loads((again / "summary.json").read_text())["stopped"]


def test_actions_of_agents_in_whole_episodes_count(tmp_path):
    words = ("algo=mappo", "env=two_carts", *QUIET, "tuned=none", "num_envs=4", "rollout_fragment_length=32")
    words = (*words, "loop=episodes", "algo.num_sgd_iter=1", "eval.episodes=1", "total_steps=2000")
    assert main([*words, "stop={agent_steps: 900}", f"hydra.run.dir={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "agent_steps reached" in summary["stopped"]
    assert 900 / 2 < summary["env_steps"] < 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *((f"algo={algo}", "env=two_step", "rollout_fragment_length=4", *REPLAYED) for algo in ("qmix", "maddpg")),
        ("algo=league", "env=tictactoe", "rollout_fragment_length=16", "algo.every=1", "algo.size=3", SMALL),
        ("algo=mappo", "env=two_carts", "rollout_fragment_length=16"),
    ],
    ids=lambda words: words[0],
)
def test_actors_change_nothing_where_the_loop_waits_for_all(tmp_path, words):
    words = (*words, *QUIET, "tuned=none", "num_envs=4", "total_steps=400", "hardware.actors.num_cpus=0.25")
    runs = tmp_path / "one", tmp_path / "two"
    for run, count in zip(runs, (0, 2), strict=True):
        assert main([*words, f"hardware.actors.count={count}", f"hydra.run.dir={run}"]) == 0
    parts = compare_runs(*runs)
    assert parts["weights"][0] > 10
    assert [name for part in ("weights", "buffer") if part in parts for name in parts[part][1]] == []
