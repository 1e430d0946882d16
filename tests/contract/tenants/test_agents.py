"""Agents: value mixing on the two-step game, independent learners on two carts, and two groups in a replay."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rlplug import tree
from rlplug.cli import main
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.testing import conformance
from tests.contract.tenants.agents import FILES
from tests.installing import install, site  # noqa: F401  fixtures

QUIET = ("hardware=cpu", "logger=[]", "eval.every=0")
SIGNALS = (
    *("algo=independent_dqn", "env=signals", *QUIET, "eval.episodes=4", "model.hidden=[16]", "replay_ratio=0.25"),
    *("buffer.capacity=512", "num_steps_sampled_before_learning_starts=64", "checkpoint.every=100", "total_steps=320"),
)


@pytest.fixture(autouse=True)
def teams(install):  # noqa: F811
    install("rlplug-teams", "rlplug_teams", FILES)


def test_environments_and_algorithms_with_agents_pass_the_kit():
    checks = conformance.checks("rlplug-teams")
    assert {"env-signals-episodes-signals", "algo-qmix-act-two_step", "algo-independent-ranks-carts"} <= {
        *map(str, checks)
    }
    for check in checks:
        check()


def summary(run) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize(("mixer", "value"), [("vdn", 7.0), ("qmix", 8.0)])
def test_two_step_game(tmp_path, mixer, value):
    """VDN cannot represent the payoffs of state 2B, Rashid et al. 2018, section 5; so it takes the sure 7."""
    words = ("algo=qmix", "env=two_step", *QUIET, f"algo.mixer={mixer}", "total_steps=12000", "eval.episodes=10")
    assert main([*words, "buffer.capacity=12000", "model.hidden=[32]", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    result = summary(tmp_path / "run")
    print(f"{mixer}: {result['eval/return_mean']} after {result['updates']} updates")
    assert (result["eval/return_mean"], result["eval/return_std"]) == (value, 0.0)


def greedy_returns(trainer, episodes: int = 16) -> np.ndarray:
    """Return what every agent of one group earns, ``[episodes, N]``."""
    from rlplug.collection.in_process import make_shard
    from rlplug.context import EnvShard

    shard = EnvShard("eval", episodes, range(episodes))
    player = make_shard(trainer.policy.env(shard), trainer.algorithm, trainer.ctx, shard, range(episodes), keys=())
    limit = trainer.ctx.spec.max_episode_steps
    batch = player.collect(limit, "greedy")
    first = batch["valid"].long().cumprod(0).bool()  # the first episode
    return (batch["reward"] * first.unsqueeze(-1)).sum(0).numpy()


def test_two_independent_ppo(tmp_path):
    words = ("algo=independent", "env=carts", *QUIET, "total_steps=40960", "algo.algo.gamma=0.98", "seed=1")
    trainer = build(compose([*words]), tmp_path)
    before = greedy_returns(trainer).mean(0)
    trainer.loop.run(trainer)
    after = greedy_returns(trainer).mean(0)
    trainer.close()
    print(f"greedy returns of the two carts: {before.round(1)} before, {after.round(1)} after 40960 steps")
    assert trainer.progress.env_steps > 40950
    assert (before < 100).all()
    assert (after > 200).all()
    (one, other) = trainer.algorithm.children()
    weights = one.state_dict(), other.state_dict()
    assert not any(torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if key.endswith("weight"))


def test_two_groups_in_a_replay(tmp_path):
    trainer = build(compose([*SIGNALS]), tmp_path)
    trainer.loop.run(trainer)
    batch = trainer.buffer.sample()
    scouts, base = batch["scouts"], batch["base"]
    assert {key: (*leaf.shape,) for key, leaf in scouts.items()} == {
        **dict.fromkeys(("action", "reward", "terminated", "truncated", "alive"), (2, 32, 2)),
        "obs": (2, 32, 2, 5),
    }
    assert base["obs"].shape == (2, 32, 3)
    assert base["action"].shape == base["alive"].shape == batch["valid"].shape == (2, 32)
    assert not {"reward", "obs", "action"} & batch.keys()
    steps, episodes = trainer.progress.env_steps, trainer.episodes.drain()
    assert 318 < steps <= 320
    assert len(episodes) > 10
    for total, length, _, scouted, paid in episodes:
        assert scouted == paid / 2  # the base is paid for both scouts
        assert total == pytest.approx((2 * scouted + paid) / 3)
        assert 1 <= length <= 6
    trainer.close()


def test_two_groups_resume_bit_for_bit(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main([*SIGNALS, f"hydra.run.dir={whole}"]) == 0
    assert main([*SIGNALS, "total_steps=160", f"hydra.run.dir={parted}"]) == 0
    assert main(["resume", str(parted), "total_steps=320"]) == 0
    one, two = (run_state(run) for run in (whole, parted))
    assert one.keys() == two.keys()
    assert len(one) > 60
    assert [key for key in one if not same(one[key], two[key])] == []


def run_state(run) -> dict:
    from rlplug.checkpointing.format import find

    checkpoint = find(run)
    return {
        (name, *path): leaf
        for name in ("weights", "learner", "rank0")
        for path, leaf in tree.items(checkpoint.tree(name))
        if "metrics" not in path and "log" not in path
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    return repr(a) == repr(b)
