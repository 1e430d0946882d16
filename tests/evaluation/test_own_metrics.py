"""Metrics of an environment's own (``info["metrics"]``) in evaluations, in jobs, and of native vectors."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from rlplug.api import Job
from rlplug.cli import main
from rlplug.cli.evaluate import table
from rlplug.config import compose, parse
from rlplug.context import EnvShard, RunContext
from rlplug.envs import EpisodeMetrics
from rlplug.envs.device_metrics import KEPT, DeviceMetrics
from rlplug.envs.spaces import single_agent
from rlplug.functional.meta import stacked
from rlplug.functional.returns import by_episode, metrics_of_jobs
from rlplug.plugins.env.classic_torch import CartPole
from rlplug.plugins.env.classic_torch import Config as CartPoleConfig
from rlplug.run.build import build, start
from rlplug.run.launch import train
from rlplug.testing.checks.envs import check_metrics
from rlplug.testing.rank_pool import ranks
from rlplug.testing.simulators import Points
from rlplug.types import EnvTraits, RunError

LONGEST = 9


class Walks(gymnasium.Env):
    """Its episodes have 1 to 9 steps by their seeds, and pay 1 a step. It reports metrics every step and at the end."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
    task_space = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.total = 0, int(self.np_random.integers(1, LONGEST + 1))
        task = (options or {}).get("task", 0)
        return np.zeros(1, np.float32), {"task": task}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.total
        own: dict[str, Any] = {"half": self.steps % 2}
        if over:
            own |= {"steps": self.steps} | ({"odd": np.float32(self.steps)} if self.steps % 2 else {})
        return np.zeros(1, np.float32), 1.0, over, False, {"metrics": own}


class Tasks(Walks):
    """Has tasks, for meta-learning."""

    task_space = Box(-1, 1, (1,), np.float32)


class Fails(Walks):
    """Fails in the third step of some episodes."""

    def step(self, action):
        if self.total == 5 and self.steps == 2:
            raise OSError("fails")
        return super().step(action)


class Taken(Walks):
    """Names its metric as evaluations name one of theirs."""

    def step(self, action):
        return *super().step(action)[:4], {"metrics": {"return_mean": 1.0}}


HERE = "env=gymnasium", "env.entry_point=tests.evaluation.test_own_metrics:Walks"
SMALL = ("tuned=none", "hardware=cpu", "model.hidden=[4]", "logger.only=[]", "compile=off", "checkpoint.every=0")
PPO = ("algo=ppo", *HERE, *SMALL, "num_envs=2", "rollout_fragment_length=16", "total_steps=64", "algo.num_sgd_iter=1")
PPO = (*PPO, "algo.sgd_minibatch_size=16", "eval.every=0", "eval.episodes=7")
ES = ("algo=es", *HERE, *SMALL, "algo.episodes_per_batch=12", "total_steps=200", "eval.every=0", "eval.episodes=3")
ES = (*ES, "log.every=50")


def columns(run: Path, *names: str) -> list[list[float]]:
    """Return the values of each column of the metrics of a run."""
    with (run / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    return [[float(row[name]) for row in rows if row.get(name)] for name in names]


def expected(played: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of evaluated episodes, computed from their lengths."""
    lengths = played["length"].tolist()
    odd = [n for n in lengths if n % 2]
    halves = [(n + 1) // 2 / n for n in lengths]
    found = {"half": np.mean(halves), "steps": np.mean(lengths)} | ({"odd": np.mean(odd)} if odd else {})
    return {f"eval/{name}": pytest.approx(x, abs=1e-12) for name, x in found.items()}


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_an_evaluation_averages_the_metrics_of_its_episodes():
    with closing(build(compose([*PPO, "eval.episodes=40"]), Path())) as trainer:  # several per column
        evaluator = trainer.reports.evaluation.evaluator
        for number in range(2):
            played = evaluator.play(evaluator.job, number)
            of_each = by_episode(played)
            assert [own["steps"] for own in of_each] == played["length"].tolist()
            assert [own.get("odd") for own in of_each] == [n if n % 2 else None for n in played["length"].tolist()]
            found = evaluator.metrics(played)
            assert {key: found[key] for key in expected(played)} == expected(played)
            assert "eval/odd" in found


def test_an_episode_that_the_evaluation_cuts_reports_no_metrics():
    with closing(build(compose([*PPO, "eval.episodes=40", "eval.max_episode_steps=4"]), Path())) as trainer:
        played = (evaluator := trainer.reports.evaluation.evaluator).play(evaluator.job, 0)
        ended = [own.get("steps") for own in by_episode(played)]
        cut = played["truncated"].any(0).tolist()
        assert ended == [None if of else n for of, n in zip(cut, played["length"].tolist(), strict=True)]
        assert 0 < sum(cut) < 40


def test_episodes_of_environments_that_fail_are_not_counted(capfd: pytest.CaptureFixture[str]):
    words = [*PPO, "env.entry_point=tests.evaluation.test_own_metrics:Fails", "env.restart_failed=true"]
    with closing(build(compose([*words, "eval.episodes=40"]), Path())) as trainer:
        played = (evaluator := trainer.reports.evaluation.evaluator).play(evaluator.job, 0)
        assert [own["steps"] for own in by_episode(played)] == played["length"].tolist()
    assert "failed, and is replaced" in capfd.readouterr().err


def test_runs_log_them_and_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(compose([*PPO]), tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    logged = {name: columns(tmp_path / "run", name)[-1][-1] for name in ("eval/half", "eval/steps", "eval/odd")}
    assert logged == {name: result[name] for name in logged}
    assert logged["eval/steps"] == pytest.approx(result["eval/length_mean"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/steps"] == logged["eval/steps"]
    rows = dict(line.split(maxsplit=1) for line in table(result | {"eval/return_home": 0.5}).splitlines()[4:])
    assert rows["steps"] == f"{result['eval/steps']:,.4g}"
    assert rows["return_home"] == "0.5"


def evaluated(fabric: Any, raw: Any) -> dict[str, float]:
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        evaluation = trainer.reports.evaluation
        return evaluation.evaluator.evaluate(partial(evaluation._play, trainer))[0]


@pytest.mark.parametrize("episodes", [2, 5])  # one of two ranks may have no episode of a metric
def test_two_ranks_find_the_metrics_of_one(episodes):
    words = [*PPO, f"eval.episodes={episodes}", "num_envs=2"]
    alone = evaluated(None, compose(words).raw)
    assert {"eval/half", "eval/steps"} <= alone.keys()
    both = ranks(2)(evaluated, compose([*words, "hardware=2cpu"]).raw)
    assert [{**own, "eval/return_std": alone["eval/return_std"]} for own in both] == [alone, alone]  # to rounding


def test_metrics_of_agents_are_those_of_every_step_and_agent():
    words = ["algo=independent", "env=pettingzoo", "env.id=tests.envs.troupe:Scored", "+env.kwargs.script=ab abc a"]
    words += [*SMALL, "num_envs=2", "rollout_fragment_length=16", "algo.algo.sgd_minibatch_size=32", "eval.episodes=3"]
    found = evaluated(None, compose(words).raw)
    assert (found["eval/age"], found["eval/left"]) == (pytest.approx((1 + 1 + 2 + 2 + 1 + 3) / 6), 1.0)


def test_names_of_evaluations_are_refused(tmp_path: Path):
    words = (*PPO, "env.entry_point=tests.evaluation.test_own_metrics:Taken")
    with pytest.raises(RunError, match=r"info\['metrics'\] has 'return_mean', which rlplug logs itself; use another"):
        train(compose([*words]), tmp_path / "run")


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_episodes_of_candidates_log_their_metrics(tmp_path: Path):
    train(compose([*ES]), tmp_path / "run")
    steps, lengths, halves, of_evaluation = columns(
        tmp_path / "run", "episode/steps", "episode/length", "episode/half", "eval/steps"
    )
    assert steps == pytest.approx(lengths)
    assert len(steps) == len(halves) > 1
    assert len(of_evaluation) == 1


def of_jobs(fabric: Any, raw: Any) -> dict[str, float]:
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        start(trainer)
        assert len([*trainer.play([Job(n, episodes=1 + n % 3, keys=()) for n in range(7)], mine=True)]) > 2
        return trainer.reports.log._episodes(trainer)


@pytest.mark.parametrize("num_envs", [2, 1])  # ranks divide the jobs, or the first one plays all
def test_two_ranks_log_the_metrics_of_the_jobs_of_one(num_envs):
    words = [*PPO, f"num_envs={num_envs}"]
    alone = of_jobs(None, compose(words).raw)
    assert {"episode/half", "episode/steps", "episode/odd", "episode/return"} <= alone.keys()
    assert ranks(2)(of_jobs, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]


def test_adapting_and_planning_algorithms_log_them(tmp_path: Path):
    words = ("algo=maml", *HERE, "env.entry_point=tests.evaluation.test_own_metrics:Tasks", *SMALL, "eval.every=0")
    words = (*words, "algo.meta_batch_size=3", "algo.eval_tasks=2", "loop.episodes=2", "total_steps=120", "log.every=1")
    train(compose([*words]), tmp_path / "run")
    trained, of_evaluation = columns(tmp_path / "run", "episode/steps", "eval/steps")
    assert len(trained) > 1
    assert len(of_evaluation) == 1


def test_jobs_may_have_different_metrics():
    rows = {"valid": torch.tensor([[True], [False]]), "return": torch.ones(1).double(), "length": torch.ones(1).long()}
    jobs = [
        rows | {"metrics": {name: torch.full((1,), x).double()}} for name, x in (("a", 1.0), ("b", 3.0), ("b", 5.0))
    ]
    found = metrics_of_jobs([rows, *jobs])
    assert (found["eval/a"], found["eval/b"]) == (1.0, 4.0)
    assert stacked([*jobs, rows]).keys() == rows.keys()


def test_a_resumed_run_logs_the_metrics_of_jobs_before_the_stop(tmp_path: Path):
    words = [*ES, "log.every=10_000"]  # one row, at the end
    train(compose(words), tmp_path / "whole")
    train(compose([*words, "stop={updates: 1}"]), tmp_path / "parts")
    assert main(["resume", str(tmp_path / "parts"), "stop=null"]) == 0
    whole, parts = (columns(tmp_path / name, "step", "episode/steps") for name in ("whole", "parts"))
    assert whole == parts


# ---- native vectors --------------------------------------------------------------------------------------------------


class Vector:
    """Episodes of 1 to 3 steps in a vector of its own, which reports their length, but not of those of one step."""

    autoreset = AutoresetMode.NEXT_STEP

    class Config:
        pass

    def __init__(self, cfg: Any, ctx: Any) -> None:
        self.num_envs = n = len(ctx.env_ids)
        self.metrics, self.complete = EpisodeMetrics(n), True
        self.spec = single_agent(Box(-1, 1, (1,), np.float32), Discrete(2), None)
        self.traits = EnvTraits(metrics=self.metrics.drain)
        self.steps, self.over = np.zeros(n, np.int64), np.zeros(n, np.bool_)

    def reset(self, seeds: Sequence[int], tasks: Any = None) -> Any:
        self.metrics.clear()
        self.steps[:], self.over[:], self.total = 0, False, np.array(seeds) % 3 + 1
        return {"obs": np.zeros((self.num_envs, 1), np.float32)}

    def step(self, action: Any) -> Any:
        going = ~self.over
        self.steps = np.where(going, self.steps + 1, 0)
        self.total = np.where(going, self.total, self.total % 3 + 1)
        self.over = going & (self.steps >= self.total)
        for i in map(int, np.flatnonzero(going)):
            if self.total[i] > 1:
                self.metrics.add(i, {"steps": self.total[i]})
            if self.over[i] and (self.complete or self.total[i] > 1):
                self.metrics.end(i)
        said = {
            "reward": going.astype(np.float32),
            "terminated": self.over.copy(),
            "truncated": np.zeros_like(self.over),
        }
        return {"obs": np.zeros((self.num_envs, 1), np.float32)} | said

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None: ...
    def close(self) -> None: ...


class Steady(CartPole):
    """CartPole on a device that reports how far the cart is, and whether the pole fell."""

    traceable = True

    def measured(self, state: torch.Tensor, over: torch.Tensor) -> dict[str, torch.Tensor]:
        fell = (state[2].abs() > 0.2).double()
        return {"away": state[0].abs(), "fell": torch.where(over, fell, torch.nan), "one": torch.ones_like(over)}


def shard(n: int) -> Any:
    return RunContext(spec=single_agent(Box(-1, 1, (1,)), Discrete(2), None)).derive(
        shard=EnvShard("learner", n, range(n))
    )


def steady(n: int) -> Any:
    made: Any = Steady
    return made(CartPoleConfig(max_episode_steps=12), shard(n))


def test_a_vector_of_a_plugin_reports_each_episode_that_ended():
    vector: Any = Vector(None, shard(3))
    check_metrics(vector, 20)
    vector.complete = False
    with pytest.raises(AssertionError, match="one entry for each episode that ended"):
        check_metrics(vector, 20)


@pytest.mark.parametrize("words", [PPO, ES], ids=["ppo", "es"])
def test_metrics_of_a_native_vector_are_logged(tmp_path: Path, words, monkeypatch):
    import rlplug.plugins.env.gymnasium as plugin

    monkeypatch.setattr(plugin.Gymnasium, "__new__", staticmethod(lambda cls, cfg, ctx: Vector(cfg, ctx)))
    train(compose([*words]), tmp_path / "run")
    steps, of_evaluation = columns(tmp_path / "run", "episode/steps", "eval/steps")
    assert 2 <= min(steps) <= max(steps) <= 3
    assert 2 <= min(of_evaluation) <= max(of_evaluation) <= 3


def test_a_vector_on_a_device_reports_its_episodes():
    env = steady(4)
    env.reset([1, 2, 3, 4])
    lengths, away, found = np.zeros(4), np.zeros(4), list[tuple[int, dict[str, float]]]()
    for step in range(60):
        row = env.step(torch.tensor([0, 1, 1, step % 2]))
        going = lengths >= 0
        lengths, away = np.where(going, lengths + 1, 0), away + np.where(going, row["obs"][:, 0].abs().numpy(), 0.0)
        over = (row["terminated"] | row["truncated"]).numpy()
        reported = env.traits.metrics()
        assert [b for b, _ in reported] == np.flatnonzero(over).tolist()
        for b, own in reported:
            assert own == {"away": pytest.approx(away[b] / lengths[b]), "fell": float(row["terminated"][b]), "one": 1.0}
        found += reported
        lengths, away = np.where(over, -1.0, lengths), np.where(over, 0.0, away)
    assert {own["fell"] for _, own in found} == {0.0, 1.0}


def test_a_device_continues_its_metrics_from_a_state():
    one, other = (steady(2) for _ in range(2))
    for env in (one, other):
        env.reset([1, 2])
    for _ in range(17):
        one.step(torch.tensor([0, 1]))
    other.load(one.state())
    for env in (one, other):
        for _ in range(9):
            env.step(torch.tensor([0, 1]))
    assert len(found := one.traits.metrics()) > 2
    assert other.traits.metrics() == found


class Meters(Points):
    """Points that report their place in every step, and their steps at the end of an episode."""

    def reset(self, **options: Any) -> Any:
        none = torch.zeros(self.num_envs, device=self.device)
        return super().reset(**options)[0], {"metrics": {"place": none, "steps": none}}

    def step(self, action: torch.Tensor) -> Any:
        *row, _ = super().step(action)
        own = {"place": self._place, "steps": torch.where(self._over, self._steps.double(), torch.nan)}
        return *row, {"metrics": own}


@pytest.mark.parametrize("autoreset", ["NextStep", "Disabled"])
def test_a_simulator_of_tensors_reports_its_episodes(autoreset):
    words = ["algo=ppo", "env=tensors", "env.entry_point=tests.evaluation.test_own_metrics:Meters", *SMALL]
    words += [f"+env.kwargs.autoreset={autoreset}", "num_envs=2", "rollout_fragment_length=32", "eval.episodes=5"]
    with closing(build(compose([*words, "algo.sgd_minibatch_size=64"]), Path())) as trainer:
        start(trainer)
        ((_, played),) = trainer.play([Job(0, episodes=5)])
        place = torch.where(played["valid"][:-1], played["obs"][1:, ..., 0], 0.0).sum(0) / played["length"]
        assert played["metrics"]["steps"].tolist() == played["length"].tolist()
        assert played["metrics"]["place"].tolist() == pytest.approx(place.tolist(), abs=1e-6)


def test_a_device_keeps_the_last_episodes_until_they_are_read():
    metrics, every = DeviceMetrics(), torch.tensor([True, False])
    metrics.begin({"n": torch.zeros(2)})
    for n in range(KEPT + 3):
        metrics.add({"n": torch.tensor([n, n])}, torch.ones(2, dtype=torch.bool), every)
    assert metrics.drain() == [(0, {"n": float(n)}) for n in range(3, KEPT + 3)]
    assert metrics.drain() == []


def test_names_of_a_native_vector_are_checked():
    from rlplug.envs.episode_metrics import drained

    for name in ("return", "length_mean"):
        with pytest.raises(RunError, match=f"the environment's metrics have '{name}', which rlplug logs itself"):
            drained(EnvTraits(metrics=lambda name=name: [(0, {"fine": 1.0}), (1, {name: 1.0})]))
