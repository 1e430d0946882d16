"""Tasks of training episodes, and the curricula that choose them."""

import csv
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlplug import testing
from rlplug.api import Segment
from rlplug.checkpointing.format import find as checkpoint
from rlplug.cli import main
from rlplug.collection.segment import CORE
from rlplug.config import compose, parse
from rlplug.envs import EnvList, Maker, Subprocess, find, sample_tasks
from rlplug.plugins.curriculum.plr import PLR
from rlplug.plugins.curriculum.stages import Linear, Threshold, task_of
from rlplug.plugins.env.frozen_lakes import FrozenLakes, has_way, lake
from rlplug.run.build import build, start
from rlplug.run.launch import train
from rlplug.testing.comparing import compare_runs
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, RunError

MAKE = Maker(
    find("rlplug.plugins.env.frozen_lakes:rlplug/FrozenLakes-v0"),
    {"size": 4, "holes": 0.0},
    module="rlplug.plugins.env.frozen_lakes",
)
RIGHT, DOWN = 2, 1
LAKES = ["algo=ppo", "env=frozenlake_tasks", "hardware=cpu", "logger.only=[]", "eval.episodes=2"]
STAGED = ["curriculum=threshold", "curriculum.stages=[2]", "curriculum.level=1"]
SHORT = ["num_envs=2", "rollout_fragment_length=16", "algo.sgd_minibatch_size=32", "total_steps=64", "log.every=32"]


def context(space, num_envs=3):
    return testing.context(replace(testing.spec(), extras={"task": space}), num_envs=num_envs)


# ---- environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda ids: EnvList([MAKE() for _ in ids]), partial(Subprocess, MAKE, workers=2)])
def test_a_columns_next_episode_has_the_assigned_task(make):
    env, other = make(range(2)), make(range(2))
    assert env.spec.tasks == Discrete(3, start=2)
    assert env.reset([1, 2])["task"].tolist() == [4, 4]  # the environment's own
    first = env.reset([1, 2], np.array([2, 3]))
    assert (first["task"].tolist(), first["obs"].tolist()) == ([2, 3], [10, 5])
    env.assign(np.array([4, 2]))
    env.step(np.array([RIGHT, RIGHT]))
    row = env.step(np.array([DOWN, RIGHT]))  # the 2x2 lake is crossed
    assert (row["terminated"].tolist(), row["task"].tolist()) == ([True, False], [2, 3])
    other.reset([3, 3])
    other.load(env.state())
    for one in (env, other):
        row = one.step(np.array([RIGHT, DOWN]))
        assert (row["task"].tolist(), row["obs"].tolist()) == ([4, 3], [0, 11])
        row = one.step(np.array([RIGHT, DOWN]))  # at the goal
        assert (row["terminated"].tolist(), row["task"].tolist()) == ([False, True], [4, 3])
        assert one.step(np.array([RIGHT, DOWN]))["task"].tolist() == [4, 2]
        one.close()


def test_a_task_that_is_not_named_is_an_error():
    class Silent(FrozenLakes):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options=options)[0], {}

    with pytest.raises(RunError, match=r"reset\(\) without options must return the task"):
        EnvList([Silent(4)]).reset([0])


def test_lakes_have_a_way_in_every_size():
    hole = lake(12, 0.3, 5)
    assert 20 < hole.sum() < 70
    assert all(has_way(hole[n:, n:]) for n in range(11))
    assert not has_way(np.array([[0, 1, 0], [0, 1, 0], [0, 1, 0]], bool))
    with pytest.raises(ValueError, match="use fewer"):
        lake(9, 0.9999, 0)
    with pytest.raises(ValueError, match="none of the tasks"):
        FrozenLakes(4).reset(options={"task": 5})
    env = gymnasium.make("rlplug/FrozenLakes-v0", size=5)
    assert env.reset(seed=0, options={"task": 2})[0] == 18


def test_tasks_are_sampled_from_their_space():
    drawn = sample_tasks(Discrete(3, start=2), 50, np.random.default_rng(0))
    assert set(drawn.tolist()) == {2, 3, 4}
    assert np.array_equal(drawn, sample_tasks(Discrete(3, start=2), 50, np.random.default_rng(0)))


@pytest.mark.skipif(not find_spec("minigrid"), reason="needs minigrid")
def test_a_room_of_each_size_is_that_of_minigrid():
    from rlplug.plugins.env.door_keys import DoorKeys

    rooms = DoorKeys(8)
    for size in (5, 8, 6):
        one, other = (
            rooms.reset(seed=size, options={"task": size}),
            gymnasium.make(f"MiniGrid-DoorKey-{size}x{size}-v0"),
        )
        assert one[1] == {"task": size}
        assert np.array_equal(one[0]["image"], other.reset(seed=size)[0]["image"])
        for action in [2, 0, 3, 2, 5, 1] * 200:
            (a, *mine), (b, *theirs) = rooms.step(action), other.unwrapped.step(action)
            assert np.array_equal(a["image"], b["image"])
            assert mine == theirs
            if mine[1] or mine[2]:
                break
        assert mine[2]
    assert rooms.reset(seed=0)[1] == {"task": 8}
    with pytest.raises(ValueError, match="none of the tasks"):
        rooms.reset(options={"task": 9})
    with pytest.raises(ValueError, match="the smallest room"):
        DoorKeys(4)


# ---- curricula -------------------------------------------------------------------------------------------------------


def test_linear_interpolates():
    ctx = context(Discrete(11, start=2))
    curriculum = Linear(testing.config("curriculum/linear", start=2, end=12, steps=100), ctx)
    found = []
    for step in (0, 24, 25, 50, 100, 1000):
        ctx.schedules.refresh(step)
        found.append(curriculum.tasks().tolist())
    assert found == [[n] * 3 for n in (2, 4, 4, 7, 12, 12)]
    assert curriculum.metrics() == {"fraction": 1.0, "task": 12.0}
    ctx = context(Box(-1.0, 1.0, (2,)), 1)
    curriculum = Linear(testing.config("curriculum/linear", start=[0, 1], end=[1, -1], steps=4), ctx)
    ctx.schedules.refresh(1)
    assert np.array_equal(curriculum.tasks(), np.array([[0.25, 0.5]], np.float32))
    assert curriculum.metrics() == {"fraction": 0.25, "task_0": 0.25, "task_1": 0.5}
    assert curriculum.tasks().dtype == np.float32


def test_threshold_begins_the_next_stage_at_its_level():
    options = {"stages": [2, 5, 3], "metric": "eval/return_mean", "level": 0.5}
    curriculum = Threshold(testing.config("curriculum/threshold", **options), context(Discrete(11, start=2)))
    found = []
    for value in (0.4, 0.5, 0.2, 0.9, 0.9):
        curriculum.read(value)
        found.append(curriculum.tasks().tolist())
    assert found == [[n] * 3 for n in (2, 5, 5, 3, 3)]
    assert curriculum.metrics() == {"stage": 2.0, "task": 3.0}
    other = Threshold(testing.config("curriculum/threshold", **options), context(Discrete(11, start=2)))
    other.load_state_dict(curriculum.state_dict())
    assert other.tasks().tolist() == [3, 3, 3]


class Values(torch.nn.Module):
    def values(self, batch):
        return batch["obs"]


class OneRank:
    algorithm = Values()

    def gather(self, x):
        return x


def test_plr_replays_levels_by_score_and_staleness():
    config = testing.config("curriculum/plr", gamma=0.5, lambda_=0.0, temperature=0.5, staleness=0.25)
    plr = PLR(config, context(Discrete(4, start=1)))
    assert torch.equal(plr.probs, torch.full((4,), 0.25, dtype=torch.float64))  # nothing was seen

    def play(levels, values, rewards):
        rows = {key: torch.from_numpy(np.zeros((2, len(levels)), dtype)) for key, dtype in CORE.items()}
        rows |= {"task": torch.tensor([levels] * 2), "obs": torch.tensor([values, [0.0] * len(levels)])}
        rows["reward"][0], rows["valid"][0], rows["is_first"][0] = torch.tensor(rewards), True, True
        plr.observe(Segment(rows), OneRank())

    play([2, 2], [1.0, 2.0], [0.0, 0.0])  # |delta| = 1 and 2
    play([4], [1.0], [5.0])
    assert plr.score.tolist() == [0.0, 1.5, 0.0, 4.0]
    assert plr.last.tolist() == [-1, 2, -1, 3]
    # ranks 2 and 1 at temperature 1/2: 1/4 and 1; ages 1 and 0; half of the levels are new
    by_score, by_age = torch.tensor([0, 0.2, 0, 0.8]), torch.tensor([0.0, 1.0, 0, 0])
    expected = 0.5 * (0.75 * by_score + 0.25 * by_age) + 0.5 * torch.tensor([0.5, 0, 0.5, 0])
    assert torch.allclose(plr.probs, expected.double())
    assert plr.metrics()["seen"] == 0.5
    many = PLR(config, context(Discrete(4, start=1), 10_000))
    many.load_state_dict(plr.state_dict())
    drawn = np.bincount(many.tasks(), minlength=5)[1:] / 10_000
    assert np.abs(drawn - expected.numpy()).max() < 0.02


def test_plr_refuses_tasks_without_numbers():
    with pytest.raises(ConfigError, match="curriculum: plr replays numbered tasks"):
        PLR(testing.config("curriculum/plr"), context(Box(0.0, 1.0)))


def test_tasks_are_not_rounded_into_their_space():
    pixels = Box(0, 255, (1,), np.uint8)
    assert task_of(pixels, [44], "key").tolist() == [44]
    for value in ([300], [2.5], [-1]):
        with pytest.raises(ConfigError, match="is no task"):
            task_of(pixels, value, "key")


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_collects_the_tasks_from_its_first_episode_on(tmp_path):
    words = ["curriculum=linear", "curriculum.start=2", "curriculum.end=4", "curriculum.steps=32"]
    trainer = build(compose([*LAKES, *SHORT, *words, "env.max_episode_steps=4"]), tmp_path)
    trainer.collect()
    env = trainer.collector.player.env
    assert env._tasks == [2, 2]
    trainer.collect()  # episodes that began before keep their task
    assert env._tasks == [4, 4]
    trainer.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=cartpole", "curriculum=plr"], "curriculum: plr chooses tasks, but the environment has none"),
        (
            ["curriculum=threshold", "curriculum.stages=[2,13]", "curriculum.level=1"],
            r"curriculum.stages: 13 is no task; the tasks are Discrete\(11, start=2\)",
        ),
        (["curriculum=linear", "curriculum.start=1.5", "curriculum.end=3"], "curriculum.start: 1.5 is no task"),
        (["curriculum=linear", "curriculum.start=1e30", "curriculum.end=3"], "curriculum.start: 1e.30 is no task"),
        (["curriculum=linear", "curriculum.start=[2,3]", "curriculum.end=3"], "curriculum.start: .* is no task"),
        (["curriculum=threshold", "curriculum.stages=[2]"], "curriculum.level"),
        (
            [*STAGED, "curriculum.metric=reward"],
            "curriculum.metric: is no metric: should be",
        ),
        (
            [*STAGED, "curriculum.metric=env_steps"],
            "curriculum.metric: env_steps is in no row of metrics; use curricul",
        ),
        (
            [*STAGED, "curriculum.metric=time/wall_s"],
            "curriculum.metric: time/wall_s depends on the machine",
        ),
        (
            [*STAGED, "curriculum.metric=system/ram_mb", "log.system=true"],
            "curriculum.metric: system/ram_mb depends on the machine",
        ),
        (
            [*STAGED, "curriculum.metric=eval/return_mean", "eval.every=0"],
            r"curriculum.metric: eval/return_mean arrives late from an actor, or only at the end \(eval.every=0\)",
        ),
        (["algo=es", "curriculum=plr"], "plr chooses the tasks of rollouts, but loop=population plays jobs"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(words, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        build(compose([*LAKES, *words]), tmp_path).close()


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("eval/return_men", "eval/return_mean"),
        ("episode/returned", "episode/return"),
        ("train/polic", "train/policy"),
        ("curriculum/stages", "curriculum/stage"),
    ],
)
def test_a_metric_that_is_not_logged_ends_the_run(metric, near, tmp_path):
    words = ["curriculum=threshold", "curriculum.stages=[2,3]", "curriculum.level=1", f"curriculum.metric={metric}"]
    config = compose([*LAKES, *SHORT, *words, "eval.every=32", "env.max_episode_steps=4"])
    with pytest.raises(RunError, match=rf"curriculum.metric: there is no such metric; did you mean {near}"):
        train(config, tmp_path / "run", tell=lambda line: None)


KINDS = {
    "linear": ["curriculum=linear", "curriculum.start=2", "curriculum.end=6", "curriculum.steps=300"],
    "threshold": [
        *("curriculum=threshold", "curriculum.stages=[2,3,4,5,6,7,8]", "curriculum.level=-1"),
        "curriculum.metric=episode/return",
    ],
    "plr": ["curriculum=plr"],
}
QUIET = ["env=frozenlake_tasks", "algo=ppo", "tuned=none", "logger.only=[csv]", "eval.every=0", "eval.episodes=1"]
QUIET += ["num_envs=2", "rollout_fragment_length=16", "algo.sgd_minibatch_size=32", "log.every=32", "model.hidden=[8]"]


def state_of(run):
    weights = checkpoint(run).tree("weights")
    return {key: x.tolist() for key, x in weights["curriculum"].items()} if "curriculum" in weights else {}


@pytest.mark.parametrize(
    "name", [name if name == "plr" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_a_resumed_run_and_a_run_on_actors_choose_the_same_tasks(name, tmp_path):
    words = [*QUIET, *KINDS[name], "env.max_episode_steps=6"]
    whole, parts, actors = (tmp_path / part for part in ("whole", "parts", "actors"))
    assert main([*words, "hardware=cpu", "total_steps=320", f"hydra.run.dir={whole}"]) == 0
    assert main([*words, "hardware=cpu", "total_steps=320", "stop={updates: 4}", f"hydra.run.dir={parts}"]) == 0
    assert state_of(parts) != state_of(whole) or name == "linear"  # which depends on the steps only
    assert main(["resume", str(parts), "stop=null"]) == 0
    on_actors = ("hardware.actors.count=2", "hardware.actors.num_cpus=0.25")
    assert main([*words, "hardware=cpu", *on_actors, "total_steps=320", f"hydra.run.dir={actors}"]) == 0
    compared = compare_runs(whole, parts)
    assert compared["weights"][0] > 6
    assert compared["weights"][1] == []
    assert tasks_of(actors) == tasks_of(whole)
    assert state_of(actors) == state_of(whole)


def tasks_of(run):
    with (run / "metrics.csv").open() as file:
        rows = [row["curriculum/task"] for row in csv.DictReader(file)]
    assert len({*rows}) > 2
    return rows


def played(fabric, raw):
    """Return this rank's tasks of three rounds, and the state of the curriculum afterwards."""
    trainer = build(parse(raw), Path(), fabric)
    start(trainer)
    tasks = []
    for _ in range(3):
        trainer.collect()
        env = trainer.collector.player.env
        tasks.append([int(x) for x in env._tasks])
        trainer.policy.curriculum.read(1.0) if trainer.policy.curriculum.metric else None
    state = {key: x.tolist() for key, x in trainer.policy.curriculum.state_dict().items()}
    trainer.close()
    return tasks, state


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_choose_the_tasks_of_one(name):
    words = [*QUIET, *KINDS[name], "env.max_episode_steps=6"]
    tasks, state = played(None, compose([*words, "hardware=cpu"]).raw)
    one, two = ranks(2)(played, compose([*words, "hardware=2cpu"]).raw)
    assert [a + b for a, b in zip(one[0], two[0], strict=True)] == tasks
    assert one[1] == two[1] == state
