"""Exploration modules of single agents in environments with groups of agents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary

from rlplug import testing
from rlplug.agents import exploration_of
from rlplug.api import Losses, Segment
from rlplug.config import choose
from rlplug.config.composition import default_node
from rlplug.context import EnvShard
from rlplug.types import ConfigError, EnvSpec, Group

BOX = Box(-1.0, 1.0, (3,), np.float32)
MASK = {"action_mask": MultiBinary(4)}
TWO = EnvSpec({"scouts": Group(BOX, Discrete(4), ("a", "b"), MASK), "base": Group(BOX, Discrete(2))})
ONE = EnvSpec({"team": Group(BOX, testing.box(2), ("a", "b", "c"))})
ONE_DISCRETE = EnvSpec({"team": Group(BOX, Discrete(2), ("a", "b", "c"))})
B = 400


def made(name, spec, **changes):
    ctx = testing.context(spec, num_envs=B)
    chosen = choose("exploration", f"exploration.{name}", default_node("exploration", name, changes))
    return exploration_of(chosen, ctx), ctx


def step(spec):
    found = {}
    for name, group in spec.groups.items():
        lead = (B, len(group.agents)) if group.agents else (B,)
        found[name] = {"obs": torch.zeros(*lead, 3), "alive": torch.ones(lead, dtype=torch.bool)}
        if group.extras:
            found[name]["action_mask"] = torch.ones(*lead, 4, dtype=torch.bool)
            found[name]["action_mask"][..., 3] = False
    return {"is_first": torch.ones(B, dtype=torch.bool), **(found if spec.nested else next(iter(found.values())))}


def test_epsilon_greedy_per_group_and_masked():
    """Every agent explores on its own, among the actions that its mask allows."""
    extra, ctx = made("epsilon_greedy", TWO, epsilon=0.6)
    out = {
        "scouts": {"action": torch.zeros(B, 2, dtype=torch.long)},
        "base": {"action": torch.zeros(B, dtype=torch.long)},
    }
    with ctx.acting(EnvShard("actor", B, range(B))):
        changed, carry = extra.perturb(out, step(TWO), extra.initial_carry(B))
    scouts, base = changed["scouts"]["action"], changed["base"]["action"]
    assert carry == {}
    assert scouts.shape == (B, 2)
    assert not (scouts == 3).any()
    assert (scouts > 0).float().mean().item() == pytest.approx(0.6 * 2 / 3, abs=0.06)
    assert (base > 0).float().mean().item() == pytest.approx(0.6 / 2, abs=0.06)
    assert (scouts[:, 0] != scouts[:, 1]).any()


def test_ape_x_spreads_over_agents_too():
    extra, _ = made("epsilon_greedy", ONE_DISCRETE, epsilon=0.4, ape_x_alpha=7.0)
    levels = extra.noise_by_env()
    assert levels.shape == (B,)
    assert (levels[:-1] > levels[1:]).all()


def test_noise_has_a_state_of_every_agent():
    extra, ctx = made("ornstein_uhlenbeck", ONE)
    carry, seen = extra.initial_carry(B), step(ONE)
    out = {"action": torch.zeros(B, 3, 2)}
    with ctx.acting(EnvShard("actor", B, range(B))):
        changed, carry = extra.perturb(out, seen, carry)
    assert [*carry] == ["team"]
    assert all(x.shape[:2] == (B, 3) for x in carry["team"].values())
    assert changed["action"].shape == (B, 3, 2)
    assert changed["action"].flatten(0, 1).std(0).min() > 0


class Recording:
    """A learner that records the batches that it is given."""

    def __init__(self):
        self.seen = []

    def minimize(self, batch, who, parts=None):
        self.seen.append(batch)
        return Losses({"error": who.error(batch["obs"]).mean()})

    def gather(self, x):
        return x

    def reduce(self, x, op, where=None):
        return x.mean()


@pytest.mark.parametrize("spec", [TWO, ONE], ids=["groups", "one group"])
def test_rnd_rewards_every_agent_that_is_alive(spec):
    extra, _ = made("rnd", spec, sgd_minibatch_size=None, update_proportion=1.0, num_sgd_iter=1)
    one = step(spec)
    batch = {key: torch.stack([x] * 3) for key, x in one.items() if not isinstance(x, dict)}
    batch |= {name: {key: torch.stack([x] * 3) for key, x in one[name].items()} for name in spec.nested}
    batch["valid"] = torch.tensor([True, True, False]).view(3, 1).expand(3, B)
    for name, group in spec.groups.items():
        part = batch[name] if spec.nested else batch
        part["obs"] = torch.randn(part["obs"].shape)
        part["action"] = torch.zeros(part["alive"].shape, dtype=torch.long)
        part["reward"] = torch.zeros(part["alive"].shape)
        if group.agents:
            part["alive"][1, :, 1] = False
    extra.observe(Segment(batch), Recording())
    bonus, learner = extra.intrinsic_reward(batch), Recording()
    for name in spec.groups:
        own, part = (bonus[name], batch[name]) if spec.nested else (bonus, batch)
        assert own.shape == part["reward"].shape
        alive = part["alive"][:-1]
        assert (own[:-1][alive] > 0).all()
        assert not own[:-1][~alive].any()
        assert not own[-1].any()
    losses = extra.update(batch, learner)
    assert [*losses.terms] == [f"{name}/error" for name in spec.nested] or [*losses.terms] == ["error"]
    assert [len(x["valid"][0]) for x in learner.seen] == ([2 * B, B] if spec.nested else [3 * B])


def test_noise_that_does_not_fit_a_group_is_refused():
    with pytest.raises(ConfigError, match=r"exploration\.epsilon_greedy: chooses among discrete actions, but"):
        made("epsilon_greedy", ONE)
