"""What policy and learner see: normalised observations and rewards, while rows and returns stay as they were."""

import json
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlplug
from rlplug import tree
from rlplug.api import Job, Segment
from rlplug.config import Preprocess as Config
from rlplug.config import compose
from rlplug.results.evaluate import evaluate
from rlplug.run import launch
from rlplug.run.build import build
from rlplug.testing.context import spec
from rlplug.trainer.normalize import Normalizer
from rlplug.types import ConfigError

OFF = {"normalize_obs": False, "clip_obs": 10.0, "scale_reward": 1.0, "normalize_reward": False}
OFF |= {"reward_gamma": 0.9, "clip_reward": None}


class Alone:
    """The learner of one rank."""

    def gather(self, x):
        return x


def made(obs=3, columns=2, **changes):
    return Normalizer(Config(**OFF | changes), spec(obs), columns)


def segment(rows=6, columns=2, obs=3, seed=0, reward_scale=5.0):
    rng = np.random.default_rng(seed)
    valid = torch.ones(rows + 1, columns, dtype=torch.bool)
    valid[3, 0] = valid[-1] = False  # a final observation in the middle of column 0, and row T
    first = torch.zeros_like(valid)
    first[4, 0] = True
    return {
        "obs": torch.from_numpy(rng.normal(2.0, 3.0, (rows + 1, columns, obs)).astype(np.float32)),
        "reward": torch.from_numpy((reward_scale * rng.normal(size=(rows + 1, columns))).astype(np.float32)),
        "valid": valid,
        "is_first": first,
    }


def test_nothing_is_touched_when_all_is_off():
    batch = segment()
    assert all(leaf is batch[key] for key, leaf in made().normalized(batch).items())
    assert not made().state_dict()


def test_observations_are_normalised_by_what_was_seen_before_the_round():
    see, batches = made(normalize_obs=True), [segment(seed=i) for i in range(3)]
    for batch in batches[:2]:
        see.observe(Segment(batch), Alone())
    assert torch.equal(see(batches[0]["obs"]), batches[0]["obs"])  # nothing has settled yet
    see.commit()
    see.observe(Segment(batches[2]), Alone())  # counts for the next round only
    rows = torch.cat([batch["obs"][batch["valid"]] for batch in batches[:2]]).double()
    expected = (batches[2]["obs"] - rows.mean(0)) / rows.std(0, correction=0)
    torch.testing.assert_close(see.normalized(batches[2])["obs"], expected.float(), rtol=1e-4, atol=1e-4)


def test_normalised_observations_are_clipped():
    see = made(normalize_obs=True, clip_obs=0.5)
    see.observe(Segment(segment()), Alone())
    see.commit()
    assert see(segment()["obs"]).abs().max() == 0.5


def test_only_vectors_of_numbers_are_normalised():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8), kind=spaces.Discrete(3), v=spaces.Box(-9, 9, (2,), np.float32)
    )
    see = made(space, normalize_obs=True)
    obs = {
        "image": torch.full((7, 2, 4, 4, 3), 7, dtype=torch.uint8),
        "kind": torch.ones(7, 2, dtype=torch.long),
        "v": segment(obs=2)["obs"],
    }
    see.observe(Segment(segment() | {"obs": obs}), Alone())
    see.commit()
    seen = see(obs)
    assert seen["image"] is obs["image"]
    assert seen["kind"] is obs["kind"]
    assert abs(float(seen["v"].mean())) < 0.2


def test_nothing_to_normalise_is_refused():
    with pytest.raises(
        ConfigError, match=r"preprocess.normalize_obs: the observations contain no vector of numbers: .*Discrete\(5\)"
    ):
        made(spaces.Discrete(5), normalize_obs=True)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    see, batches = made(normalize_reward=True), [segment(seed=i) for i in range(2)]
    for batch in batches:
        see.observe(Segment(batch), Alone())
    returns, running = [], np.zeros(2)
    for batch in batches:
        for t in range(6):
            for column in range(2):
                if batch["valid"][t, column]:
                    if batch["is_first"][t, column]:
                        running[column] = 0.0
                    running[column] = 0.9 * running[column] + float(batch["reward"][t, column])
                    returns.append(running[column])
    expected = batches[1]["reward"] / np.std(returns)
    torch.testing.assert_close(see.normalized(batches[1])["reward"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scale_reward": 0.5}, [-2.0, 0.0, 0.25]),
        ({"clip_reward": "sign"}, [-1.0, 0.0, 1.0]),
        ({"clip_reward": 1.5}, [-1.5, 0.0, 0.5]),
        ({"clip_reward": (-1.0, 0.25)}, [-1.0, 0.0, 0.25]),
        ({"scale_reward": 10.0, "clip_reward": 1.5}, [-1.5, 0.0, 1.5]),
    ],
    ids=str,
)
def test_rewards_are_scaled_and_clipped(changes, expected):
    reward = torch.tensor([[-4.0, 0.0, 0.5]])
    batch = {"obs": torch.zeros(1, 3, 3), "reward": reward}
    assert made(**changes).normalized(batch)["reward"].tolist() == [expected]
    assert batch["reward"] is reward


def test_bounds_of_rewards_without_a_range_are_refused():
    with pytest.raises(
        ConfigError, match=r"^preprocess\.clip_reward: \[1\.0, -1\.0\] has no range; the first should be"
    ):
        made(clip_reward=(1.0, -1.0))


def test_presets_of_atari_clip_rewards_to_their_sign():
    for env, expected in {"pong": "sign", "breakout": "sign", "atari": "sign", "cartpole": None}.items():
        assert compose(["algo=dqn", f"env={env}"]).preprocess.clip_reward == expected
    assert compose(["algo=dqn", "env=pong", "preprocess.clip_reward=null"]).preprocess.clip_reward is None


def rows(n=2, **more):
    obs = torch.full((n, 1, 3), 4.0)
    return {"obs": obs, "reward": torch.tensor([[-16.0]] * n), "valid": torch.ones(n, 1, dtype=torch.bool)} | more


def of_group():
    return {"reward": torch.full((2, 1, 2), -16.0), "alive": torch.ones(2, 1, 2, dtype=torch.bool)}


NESTED = {
    "flat": rows(),
    "two by name": {"pre": rows(), "post": rows()},
    "and rows of their own": {"pre": rows(), "valid": torch.ones(2, dtype=torch.bool)},
    "without valid": {"pre": {"obs": torch.full((2, 1, 3), 4.0), "reward": torch.tensor([[-16.0]])}},
    "twice": {"tasks": {"a": rows(), "b": {"inner": rows()}}},
    "groups": {"valid": torch.ones(2, 1, dtype=torch.bool), "scouts": of_group(), "base": of_group()},
    "groups by name": {"pre": {"valid": torch.ones(2, 1, dtype=torch.bool), "scouts": of_group()}},
}
KEPT = {"carry": {"reward": torch.tensor([-16.0])}, "signal": {"obs": torch.tensor([4.0])}, "tree": {"reward": "r"}}


@pytest.mark.parametrize("batch", NESTED.values(), ids=NESTED)
def test_every_batch_in_a_batch_is_seen_alike_and_once(batch):
    see = made(scale_reward=0.5, clip_reward=4.0)
    raw, seen = (dict(tree.items(x)) for x in (batch, see.normalized(batch)))
    assert raw.keys() == seen.keys()
    for path, leaf in raw.items():
        expected = torch.full_like(leaf, -4.0) if path[-1] == "reward" else leaf
        assert torch.equal(seen[path], expected), path


def test_what_is_no_batch_stays_as_it_is():
    """Recurrent states, extras of the environment, and what an algorithm stores with its rows."""
    see = Normalizer(Config(**OFF | {"clip_reward": 1.0}), replace(spec(3), extras={"signal": spaces.Dict()}), 2)
    for batch in (rows(**KEPT), {"pre": rows(**KEPT)}):
        seen = see.normalized(batch)
        for key, leaf in KEPT.items():
            assert seen.get("pre", seen)[key] is leaf
        assert seen.get("pre", seen)["reward"].tolist() == [[-1.0]] * 2


WORDS = ("hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=2", "preprocess.normalize_obs=true")


def trainer(*words: str):
    return build(compose([*WORDS, *words]), Path())


def test_a_rollout_is_learnt_from_with_the_moments_it_was_acted_with():
    run = trainer("algo=ppo", "env=pendulum", "num_envs=4", "rollout_fragment_length=64", "algo.num_sgd_iter=1",
                  "algo.sgd_minibatch_size=256")  # fmt: skip
    for _ in range(3):
        run.report()
        run.collect()
        assert float(run.update().metrics["kl"]) == pytest.approx(0.0, abs=1e-6)
    assert run.policy.normalizer.obs["obs"].mean.abs().max() > 0.01
    run.close()


def test_the_buffer_keeps_what_the_environment_said():
    words = ("algo=sac", "env=pendulum", "preprocess.scale_reward=0.01", "preprocess.normalize_reward=true")
    run, kept = trainer(*words), []
    for _ in range(40):
        run.collect("random")
    raw, (seen, _) = run.buffer.sample(), run.learner.sample()
    for x in (raw["reward"], seen["reward"]):
        kept.append(float(x[0].mean()))
    assert kept[0] < -0.5 < kept[1] < 0  # Pendulum's are between -16 and 0
    assert raw["obs"].abs().max() > 1.0
    run.close()


class SeenError(Exception):
    """Ends an update behind ``prepare``."""


@pytest.mark.parametrize("form", ["flat", "by name", "twice by name"])
def test_a_batch_that_a_loop_gives_is_seen_as_a_sample_is(form):
    """By what ``prepare`` gets: clipped rewards, and observations by the moments that acted."""
    run, given = trainer("algo=ppo", "env=pendulum", "num_envs=2", "preprocess.clip_reward=sign"), []

    def prepare(batch):
        given.append(batch)
        raise SeenError

    run.collect()
    run.report()
    (_, played), *_ = run.play([Job(0, episodes=2, max_steps=20)])
    assert played["reward"].min() < -2
    batch = {"flat": played, "by name": {"pre": played}, "twice by name": {"a": {"b": played}}}[form]
    run.algorithm.prepare = prepare
    with pytest.raises(SeenError):
        run.update(batch)
    seen = {path[-1]: leaf for path, leaf in tree.items(given[0])}
    assert seen["reward"].unique().tolist() in ([-1.0], [-1.0, 0.0])
    torch.testing.assert_close(seen["obs"], run.policy.normalizer(played["obs"]))
    assert not torch.allclose(seen["obs"], played["obs"])
    run.close()


def test_evaluation_leaves_the_moments_alone_and_a_loaded_agent_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["algo=ppo", "env=pendulum", "num_envs=4", "rollout_fragment_length=64", "total_steps=1024"]
    launch.train(compose([*WORDS, *words, "logger.only=[]"]), tmp_path / "run")
    agent = rlplug.load(tmp_path / "run")
    assert agent.normalize.obs["obs"].seen[0] == 1024  # and none of the evaluation's
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert evaluate(tmp_path / "run")["eval/return_mean"] == summary["eval/return_mean"]
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=3)
    said = agent.act(obs)
    agent.normalize.obs["obs"].mean += 1.0
    assert not np.array_equal(agent.act(obs), said)


def test_parts_of_any_name_are_normalised_each_by_itself():
    space = spaces.Dict({key: spaces.Box(-9, 9, (1,), np.float32) for key in ("a/b", "a.b", "a_b", "a")})
    see = made(space, normalize_obs=True)
    obs = {key: segment(obs=1, seed=i)["obs"] + 10 * i for i, key in enumerate(space.spaces)}
    see.observe(Segment(segment() | {"obs": obs}), Alone())
    see.commit()
    assert all(abs(float(part.mean())) < 0.5 for part in see(obs).values())
