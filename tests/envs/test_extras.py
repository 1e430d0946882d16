"""Numbers out of an environment's info, beside every observation."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rlplug.config import compose
from rlplug.envs import EnvList, Subprocess
from rlplug.functional.returns import episode_metrics
from rlplug.plugins.algo.ppo import PPO
from rlplug.run.build import build
from rlplug.types import ConfigError, RunError
from tests.envs.making import gym
from tests.envs.walking import Windy, rows

KEYS = ["wind", "steps", "odd"]
SEEDS = [3, 1, 4]
WINDY = "tests.envs.walking:Windy-v0"


def lists(make=Windy, keys=KEYS, **options):
    return EnvList([make() for _ in SEEDS], info_keys=keys, **options)


def processes(make=Windy, keys=KEYS, **options):
    return Subprocess(make, range(len(SEEDS)), workers=2, info_keys=keys, **options)


HOW = pytest.mark.parametrize("how", [lists, processes])


def check(row):
    start, steps = row["obs"][..., 0], row["obs"][..., 1]
    wind = np.stack([2 * start, 2.5 * steps, 0 * start], -1)[..., None, :]
    assert np.array_equal(row["wind"], wind)
    assert np.array_equal(row["steps"], steps)
    assert np.array_equal(row["odd"], steps % 2 == 1)


@HOW
def test_every_row_has_them_first_and_final_ones_too(how):
    with closing(how()) as env:
        shapes = {key: (space.shape, space.dtype) for key, space in env.spec.extras.items()}
        assert shapes == {"wind": ((1, 3), np.float32), "steps": ((), np.int64), "odd": ((), np.bool_)}
        seen = rows(env, 12, SEEDS)
        state = env.state()
        after = rows_after(env, 6)
    for row in seen:
        check(row)
        assert {key: row[key].dtype for key in KEYS} == {key: dtype for key, (_, dtype) in shapes.items()}
    assert [int(row["steps"][0]) for row in seen[:7]] == [0, 1, 2, 3, 4, 0, 1]
    with closing(how()) as env:  # and after a restart
        env.reset(SEEDS)
        env.load(state)
        for row, again in zip(after, rows_after(env, 6), strict=True):
            check(again)
            assert np.array_equal(row["wind"], again["wind"])


def rows_after(env, steps):
    action = np.zeros(len(SEEDS), np.int64)
    return [{key: x.copy() for key, x in env.step(action).items()} for _ in range(steps)]


@pytest.mark.parametrize(
    ("make", "keys", "said"),
    [
        (Windy, ["gusts"], r"the environment's info lacks 'gusts' at the first reset: it has wind, steps, odd"),
        (partial(Windy, lacks=0), ["wind"], r"the environment's info lacks 'wind' at the first reset: it is empty"),
        (partial(Windy, says={0: {"a": "calm"}}), ["a"], r"info\['a'\] is of type str; expected a number or array"),
        (partial(Windy, says={0: {"a": [[1], [1, 2]]}}), ["a"], r".*is of type list; expected a number or array"),
        (partial(Windy, says={0: {"a": None}}), ["a"], r"info\['a'\] is of type NoneType; expected a number or array"),
        (partial(Windy, says={0: {"reward": 1}}), ["reward"], r"a batch already has the key 'reward'"),
        (partial(Windy, says={0: {"final_obs": 1}}), ["final_obs"], r"a batch already has the key 'final_obs'"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_starts(make, keys, said):
    with pytest.raises(ConfigError, match=rf"^env\.info_keys: {said}"):
        lists(make, keys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lacks": 2}, r"info lacks 'wind', which env\.info_keys names and the first reset had"),
        ({"lacks": 4}, r"info lacks 'wind', which env\.info_keys names and the first reset had"),  # the final row
        ({"says": {2: {"wind": [1.0]}}}, r"info\['wind'\] has shape \[1\]; its space declares \[1, 3\]"),
        ({"says": {2: {"steps": 0.5}}}, r"info\['steps'\] is of type float64; its space declares int64"),
    ],
)
def test_what_changes_later_stops_the_run(options, said):
    with (
        closing(lists(partial(Windy, **options))) as env,
        pytest.raises(RunError, match=rf"^environment \d .*: {said}"),
    ):
        rows(env, 12, SEEDS)


def test_the_plugin_has_the_option_beside_others():
    with closing(gym(WINDY, info_keys=["wind"], frame_skip=2, select=[1])) as env:
        assert env.spec.extras == {"wind": Box(-np.inf, np.inf, (1, 3), np.float32)}
        env.reset([0, 1])
        row = env.step(np.zeros(2, np.int64))
        assert row["wind"][0, 0, 1] == 2.5 * row["obs"][0, 0] == 5.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vectorization": "native"}, "env.vectorization: env.info_keys reads info of single environments; use auto"),
        ({"backend": "envpool"}, "env.info_keys: applies to single environments, but env.backend=envpool has none"),
        ({}, "env.info_keys: the environment's info lacks 'wind' at the first reset: it is empty"),
    ],
)
def test_cartpole_has_no_wind(options, said):
    with pytest.raises(ConfigError) as error:
        gym("CartPole-v1", info_keys=["wind"], **options)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
def test_they_reach_an_algorithm_that_names_them(vectorization, tmp_path, monkeypatch):
    needs, prepare, seen = PPO.needs.__func__, PPO.prepare, []

    def more(cls, cfg, spec):
        before = needs(cls, cfg, spec)
        return replace(before, keys=(*before.keys, "wind"))

    def look(self, batch):
        seen.append({key: batch[key].clone() for key in ("obs", "wind", "valid")})
        return prepare(self, batch)

    monkeypatch.setattr(PPO, "needs", classmethod(more))
    monkeypatch.setattr(PPO, "prepare", look)
    words = ["algo=ppo", "env=gymnasium", f"env.id='{WINDY}'", "env.info_keys=[wind,steps]", "logger.only=[]"]
    words += ["num_envs=3", "rollout_fragment_length=11", "algo.sgd_minibatch_size=11", "total_steps=66"]
    with closing(build(compose([*words, f"env.vectorization={vectorization}"]), tmp_path)) as trainer:
        for _ in range(2):
            trainer.collect()
            trainer.update()
    assert len(seen) == 2
    for batch in seen:
        assert batch["wind"].shape == (12, 3, 1, 3)
        assert not batch["valid"][:-1].all()  # final rows too
        start, steps = batch["obs"].unbind(-1)
        assert torch.equal(batch["wind"][..., 0, :], torch.stack([2 * start, 2.5 * steps, 0 * start], -1))


class Reaching(Windy):
    """Info has ``is_success`` with steps alone, from the third one on."""

    def step(self, action):
        row, reward, end, cut, info = super().step(action)
        return row, reward, end, cut, info | ({"is_success": np.float32(info["steps"] > 2)} if info else {})


def test_success_is_of_steps_alone():
    with closing(lists(Reaching, ["is_success"])) as env:
        assert env.spec.extras["is_success"].shape == ()
        seen = rows(env, 12, SEEDS)
    for row in seen:
        assert (row["is_success"] == (row["obs"][..., 1] > 2)).all()


@pytest.mark.parametrize("actors", [0, 1])
def test_evaluations_tell_how_many_episodes_succeeded(actors):
    batch = {"return": torch.zeros(4), "length": torch.ones(4), "success": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    if actors:  # which send arrays
        batch = {key: x.numpy() for key, x in batch.items()}
    assert episode_metrics(batch)["eval/success_mean"] == 0.75
    assert "eval/success_mean" not in episode_metrics({key: batch[key] for key in ("return", "length")})
