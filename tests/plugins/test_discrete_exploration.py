"""Epsilon-greedy and Boltzmann: how often, among which actions, and where they are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing
from rlplug.plugins.exploration.discrete import Boltzmann, EpsilonGreedy
from rlplug.testing.checks.runs import Case
from rlplug.types import ConfigError

N = 20_000
MULTI = spaces.MultiDiscrete([[2, 3], [4, 1]])


def epsilon_greedy(action=4, num_envs=N, **changes) -> EpsilonGreedy:
    ctx = testing.context(testing.spec(3, action), num_envs=num_envs)
    return EpsilonGreedy(testing.config("exploration/epsilon_greedy", **changes), ctx)


def boltzmann(action=3, **changes) -> Boltzmann:
    ctx = testing.context(testing.spec(3, action), num_envs=N)
    return Boltzmann(testing.config("exploration/boltzmann", **changes), ctx)


def shares(actions: torch.Tensor, n: int) -> torch.Tensor:
    return torch.bincount(actions, minlength=n) / len(actions)


def test_ape_x_gives_every_environment_its_own_epsilon():
    found = epsilon_greedy(num_envs=4, epsilon=0.4, ape_x_alpha=7.0).epsilons()
    assert_close(found, torch.tensor([0.4, 0.04716, 0.00556, 0.000655]), rtol=1e-3, atol=0.0)
    with pytest.raises(ConfigError, match=r"num_envs: 1 environment .* and always explore; use 2"):
        epsilon_greedy(num_envs=1, epsilon=0.4, ape_x_alpha=7.0)


def test_epsilon_is_the_share_of_random_actions():
    actions = torch.full((N,), 2)
    out, carry = epsilon_greedy(epsilon=0.2).perturb({"action": actions, "q": actions}, {}, {"kept": 1})
    assert_close(shares(out["action"], 4), torch.tensor([0.05, 0.05, 0.85, 0.05]), atol=0.01, rtol=0.0)
    assert (actions == 2).all()
    assert out["q"] is actions
    assert carry == {"kept": 1}


def test_epsilon_0_is_greedy_and_a_schedule_moves_it():
    actions = torch.full((N,), 2)
    noise = epsilon_greedy(epsilon=[[0, 1.0], [100, 0.0]])
    assert (noise.perturb({"action": actions}, {}, {})[0]["action"] != 2).any()
    noise.ctx.schedules.refresh(100)
    assert (noise.perturb({"action": actions}, {}, {})[0]["action"] == 2).all()


def test_random_actions_are_uniform_among_the_allowed_ones():
    mask = torch.tensor([True, False, True, True]).expand(N, 4)
    out, _ = epsilon_greedy(epsilon=1.0).perturb(
        {"action": torch.zeros(N, dtype=torch.long)}, {"action_mask": mask}, {}
    )
    assert_close(shares(out["action"], 4), torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]), atol=0.02, rtol=0.0)


def test_every_part_of_a_multi_discrete_action_is_drawn_by_itself():
    mask = torch.ones(N, 10, dtype=torch.bool)
    mask[:, [0, 3, 6]] = False
    out, _ = epsilon_greedy(MULTI, epsilon=1.0).perturb({"action": torch.zeros(N, 2, 2, dtype=torch.long)}, {}, {})
    expected = [[0.5, 0.5], [1 / 3] * 3, [0.25] * 4, [1.0]]
    for part, share in zip(out["action"].flatten(1).T, expected, strict=True):
        assert_close(shares(part, len(share)), torch.tensor(share), atol=0.02, rtol=0.0)
    out, _ = epsilon_greedy(MULTI, epsilon=1.0).perturb(
        {"action": torch.zeros(N, 2, 2, dtype=torch.long)}, {"action_mask": mask}, {}
    )
    expected = [[0.0, 1.0], [0.5, 0.0, 0.5], [1 / 3, 0.0, 1 / 3, 1 / 3], [1.0]]
    for i, part in enumerate(out["action"].flatten(1).T):
        assert_close(shares(part, len(expected[i])), torch.tensor(expected[i]), atol=0.02, rtol=0.0)


def test_bits_are_drawn_one_by_one():
    actions = torch.zeros(N, 3, dtype=torch.int8)
    out, _ = epsilon_greedy(spaces.MultiBinary(3), epsilon=1.0).perturb({"action": actions}, {}, {})
    assert out["action"].dtype == torch.int8
    assert_close(out["action"].float().mean(0), torch.full((3,), 0.5), atol=0.02, rtol=0.0)


def test_an_action_is_explored_whole_or_not_at_all():
    out, _ = epsilon_greedy(spaces.MultiBinary(30), epsilon=0.5).perturb(
        {"action": torch.zeros(N, 30, dtype=torch.int8)}, {}, {}
    )
    assert_close((out["action"].sum(1) == 0).float().mean(), torch.tensor(0.5), atol=0.02, rtol=0.0)


def test_boltzmann_follows_softmax_of_q():
    q = torch.tensor([0.0, 1.0, -1.0])
    for temperature in (0.5, 2.0):
        out, _ = boltzmann(temperature=temperature).perturb(
            {"action": torch.zeros(N, dtype=torch.long), "q": q.expand(N, 3)}, {}, {}
        )
        assert_close(shares(out["action"], 3), (q / temperature).softmax(0), atol=0.02, rtol=0.0)


def test_boltzmann_returns_the_log_probabilities_of_its_actions():
    action, q = spaces.MultiDiscrete([2, 3]), torch.randn(N, 5)
    mask = torch.tensor([True, True, False, True, True]).expand(N, 5)
    given = {"action": torch.zeros(N, 2, dtype=torch.long), "q": q}
    out, _ = boltzmann(action, temperature=0.5).perturb(given, {"action_mask": mask}, {})
    parts = (q / 0.5).masked_fill(~mask, -torch.inf).split([2, 3], -1)
    chosen = (part.log_softmax(-1)[torch.arange(N), out["action"][:, i]] for i, part in enumerate(parts))
    assert_close(out["logp"], sum(chosen))


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_boltzmann_never_takes_what_is_forbidden(temperature):
    lowest = torch.finfo(torch.float32).min
    q = torch.tensor([-50.0, lowest, -100.0]).expand(N, 3)
    mask = torch.tensor([True, False, True]).expand(N, 3)
    out, _ = boltzmann(temperature=temperature).perturb(
        {"action": torch.zeros(N, dtype=torch.long), "q": q}, {"action_mask": mask}, {}
    )
    assert (out["action"] != 1).all()
    assert ((out["action"] == 0).all() == (temperature < 1e6)).all()


@pytest.mark.parametrize("cls", [EpsilonGreedy, Boltzmann])
def test_continuous_actions_are_refused(cls):
    name = {EpsilonGreedy: "epsilon_greedy", Boltzmann: "boltzmann"}[cls]
    with pytest.raises(ConfigError, match=rf"exploration\.{name}: chooses among discrete actions.*Box"):
        cls(testing.config(f"exploration/{name}"), testing.context(testing.spec(3, testing.box(2))))


def test_boltzmann_says_that_it_needs_values():
    action = torch.zeros(N, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"exploration\.boltzmann: .* of 3 actions, but this algorithm gives none"):
        boltzmann().perturb({"action": action}, {}, {})
    with pytest.raises(ConfigError, match=r"gives \[2\] of them"):
        boltzmann().perturb({"action": action, "q": torch.zeros(N, 2)}, {}, {})


def test_rows_of_other_processes_do_not_change_ones_own():
    """Two actors of two environments each do what one with four does."""
    cfg = testing.config("exploration/epsilon_greedy", epsilon=0.7, ape_x_alpha=1.0)
    found = []
    for ids in (range(4), range(2), range(2, 4)):
        ctx = testing.context(testing.spec(3, 9), num_envs=4, env_ids=ids)
        ctx.shard.role = "actor"
        noise = EpsilonGreedy(cfg, ctx)
        rounds = [noise.perturb({"action": torch.zeros(len(ids), dtype=torch.long)}, {}, {}) for _ in range(50)]
        found.append(np.stack([out["action"].numpy() for out, _ in rounds]))
    assert (found[0] > 0).any()
    assert (np.concatenate(found[1:], 1) == found[0]).all()


def test_boltzmann_behind_what_it_would_undo_is_refused():
    dqn = Case("dqn", "cartpole")
    with pytest.raises(ConfigError, match=r"^exploration: boltzmann replaces the action of epsilon_greedy"):
        dqn.build("exploration=[epsilon_greedy,boltzmann]")
    for served in ("[boltzmann,epsilon_greedy]", "[parameter_noise,icm,boltzmann]"):
        dqn.build(f"exploration={served}").close()
