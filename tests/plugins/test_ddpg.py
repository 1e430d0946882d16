"""DDPG and TD3 beside their papers: the target, the delay, the gradients of the one graph."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rlplug import testing, tree
from rlplug.config import default_node
from rlplug.plugins.algo.ddpg import DDPG
from tests.plugins import acting
from tests.plugins.acting import learner_of
from tests.plugins.acting import windows as sample

SPEC = testing.spec(3, testing.box(2))
PARTS = ("critic", "actor")


def make(name: str = "td3", spec=SPEC, overrides=(), **changes) -> DDPG:
    return acting.make(DDPG, name, spec, overrides, **{"sequence_length": 4, "burn_in": 2, **changes})


def differences(before: dict[str, torch.Tensor], algorithm: DDPG) -> set[str]:
    """Modules whose weights have changed."""
    now = algorithm.state_dict()
    return {name.partition(".")[0] for name, x in before.items() if not torch.equal(x, now[name])} - {"steps"}


def state(algorithm: DDPG) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in algorithm.state_dict().items()}


# ---- the target -----------------------------------------------------------------------------------------------------


def by_hand(**changes) -> DDPG:
    """Its target policy always plays 0.9; ``Q1' = 2 a + s`` and ``Q2' = 3 a``."""
    spec = testing.spec(1, testing.box(1))
    algorithm = make(spec=spec, overrides=["model.hidden=[]"], gamma=0.5, **changes)
    with torch.no_grad():
        algorithm.target_actor.out.weight.zero_()
        algorithm.target_actor.out.bias.fill_(math.atanh(0.9))
        head = algorithm.target_critic.head  # reads action and observation, in the order of their names
        head.bias.zero_()
        first, second = torch.tensor([[2.0], [1.0]]), torch.tensor([[3.0], [0.0]])
        head.weight.copy_(torch.stack((first, second)) if algorithm.cfg.twin_q else first.T)
    return algorithm


def target_of(algorithm: DDPG, batch) -> torch.Tensor:
    """The target in its critics' loss, ``[B]``: their own values are 0."""
    with torch.no_grad():
        algorithm.critic.head.weight.zero_()
        algorithm.critic.head.bias.zero_()
    losses = algorithm.forward(batch, ("critic",))
    return losses.feedback["priority"]  # every target here is positive


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"target_noise": 0.0}, [2.7, 2.7]),  # min(2 * 0.9 + 1, 3 * 0.9) = min(2.8, 2.7)
        ({"target_noise": 0.0, "twin_q": False}, [2.8, 2.8]),
        # 0.9 - 0.2 = 0.7: min(2.4, 2.1); 0.9 - 1.0 is clipped to 0.9 - 0.5 = 0.4: min(1.8, 1.2)
        ({"target_noise": 0.2}, [2.1, 1.2]),
        ({"target_noise": 0.2, "noise_clip": 0.1}, [2.4, 2.4]),  # 0.9 - 0.1 = 0.8: min(2.6, 2.4)
    ],
)
def test_the_target_smooths_with_clipped_noise_and_takes_the_smaller_value(changes, values):
    """1802.09477, equations 10, 14 and 15, with ``gamma`` 0.5 and reward 1."""
    algorithm = by_hand(**({"twin_q": True} | changes))
    rows = {"obs": torch.ones(2, 2, 1), "action": torch.zeros(2, 2, 1), "reward": torch.ones(2, 2)}
    rows |= {"terminated": torch.zeros(2, 2, dtype=torch.bool), "valid": torch.ones(2, 2, dtype=torch.bool)}
    batch = algorithm.prepare(rows)
    if "next_noise" in batch:
        batch["next_noise"] = torch.tensor([[-1.0], [-5.0]])
    torch.testing.assert_close(target_of(algorithm, batch), 1.0 + 0.5 * torch.tensor(values))


def test_smoothed_actions_stay_within_their_bounds():
    algorithm = by_hand(target_noise=0.2)
    batch = algorithm.prepare(sample(algorithm))
    ends = batch | {"next_noise": torch.full((6, 1), 5.0), "returns": torch.full((6,), 9.0)}
    just = batch | {"next_noise": torch.full((6, 1), 0.5), "returns": torch.full((6,), 9.0)}  # 0.9 + 0.1
    assert torch.equal(target_of(algorithm, ends), target_of(algorithm, just))


def test_only_termination_stops_the_bootstrap():
    """Three rewards of 1 with gamma 0.5, where Q' is 2.7: an episode that is truncated, or terminated, after two."""
    algorithm = by_hand(target_noise=0.0, n_step=3)
    ended = torch.zeros(4, 3, dtype=torch.bool)
    valid, terminated = ~ended, ended.clone()
    valid[2, :2] = False  # the final observation
    terminated[1, 1] = True
    batch = {"obs": torch.ones(4, 3, 1), "action": torch.zeros(4, 3, 1), "reward": torch.ones(4, 3)}
    batch = algorithm.prepare(batch | {"terminated": terminated, "valid": valid})
    truncated, cut, going = 1.5 + 0.25 * 2.7, 1.5, 1.75 + 0.125 * 2.7
    torch.testing.assert_close(target_of(algorithm, batch), torch.tensor([truncated, cut, going]))


def test_noise_is_drawn_in_prepare_and_nowhere_else():
    algorithm = make()
    batch = algorithm.prepare(sample(algorithm))
    assert batch["next_noise"].shape == (6, 2)
    drawn = algorithm.ctx.generators["learner"].get_state()
    once, twice = (algorithm.forward(batch, PARTS).terms["critic"] for _ in range(2))
    assert torch.equal(once, twice)
    assert torch.equal(drawn, algorithm.ctx.generators["learner"].get_state())
    assert "next_noise" not in make(target_noise=0.0).prepare(sample(algorithm))


# ---- one step -------------------------------------------------------------------------------------------------------


def test_ddpg_is_td3_without_its_three_switches():
    off = {"name": "ddpg", "twin_q": False, "policy_delay": 1, "target_noise": 0.0}
    assert default_node("algo", "td3") | off == default_node("algo", "ddpg")


def test_a_step_of_ddpg_is_that_of_the_paper():
    """1509.02971, algorithm 1, written down with plain torch, for three updates."""
    algorithm = make("ddpg", gamma=0.9, tau=0.1, actor_lr=0.01, critic_lr=0.02)
    actor, critic, target_actor, target_critic = (
        copy.deepcopy(x) for x in (algorithm.actor, algorithm.critic, algorithm.target_actor, algorithm.target_critic)
    )
    steps = torch.optim.Adam(critic.parameters(), lr=0.02), torch.optim.Adam(actor.parameters(), lr=0.01)
    learner, rows = learner_of(algorithm), sample(algorithm)

    def mu(policy, obs):
        return torch.tanh(policy.out(policy.torso(obs, {}, None)[0]))

    for _ in range(3):
        obs, next_obs = rows["obs"]
        with torch.no_grad():
            value = target_critic(next_obs, mu(target_actor, next_obs))[0]
            y = rows["reward"][0] + 0.9 * (~rows["terminated"][0]).float() * value
        critic_loss = 0.5 * (critic(obs, rows["action"][0])[0] - y).square().mean()
        actor_loss = -critic(obs, mu(actor, obs))[0].mean()
        gradients = [
            torch.autograd.grad(loss, list(net.parameters()))
            for loss, net in ((critic_loss, critic), (actor_loss, actor))
        ]
        for net, step, grads in zip((critic, actor), steps, gradients, strict=True):
            for p, grad in zip(net.parameters(), grads, strict=True):
                p.grad = grad
            step.step()
        with torch.no_grad():
            for target, net in ((target_actor, actor), (target_critic, critic)):
                for old, new in zip(target.parameters(), net.parameters(), strict=True):
                    old.copy_(0.9 * old + 0.1 * new)
        learner.minimize(algorithm.prepare(rows), algorithm)
    for ours, plain in (
        (algorithm.actor, actor),
        (algorithm.critic, critic),
        (algorithm.target_actor, target_actor),
        (algorithm.target_critic, target_critic),
    ):
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_policy_and_targets_move_at_every_second_update_of_the_critics():
    algorithm = make(policy_delay=2)
    learner, moved = learner_of(algorithm), []
    for _ in range(4):
        before = state(algorithm)
        losses = learner.minimize(algorithm.prepare(sample(algorithm)), algorithm)
        moved.append(differences(before, algorithm))
        assert ("actor" in losses.terms) == (len(moved) % 2 == 0)
    everything = {"critic", "actor", "target_actor", "target_critic"}
    assert moved == [{"critic"}, everything, {"critic"}, everything]


def test_the_policy_follows_the_first_critic_alone():
    algorithm = make()
    batch = algorithm.prepare(sample(algorithm))
    before = algorithm.forward(batch, ("actor",)).terms["actor"]
    with torch.no_grad():
        algorithm.critic.head.bias[1] -= 100.0  # far smaller than the first one
        assert torch.equal(algorithm.forward(batch, ("actor",)).terms["actor"], before)
        algorithm.critic.head.bias[0] -= 100.0
        assert not torch.equal(algorithm.forward(batch, ("actor",)).terms["actor"], before)


# ---- switches -------------------------------------------------------------------------------------------------------


def test_errors_of_both_critics_become_priorities():
    algorithm = make()
    batch = algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        algorithm.critic.head.weight.zero_()
        algorithm.critic.head.bias.copy_(torch.tensor([1.0, -3.0]).view(2, 1, 1))
    ended = algorithm.forward(batch | {"returns": torch.zeros(6), "discount": torch.zeros(6)}, ("critic",))
    assert ended.feedback["priority"].tolist() == [2.0] * 6  # the mean of 1 and 3
    assert ended.terms["critic"].tolist() == [5.0] * 6  # 1/2 (1 + 9)


def test_regularization_pulls_all_weights_to_zero():
    algorithm = make(l2_reg=1e9, policy_delay=1)  # beside which the losses are nothing: Adam steps by its step size
    before = {name: p.detach().clone() for name, p in algorithm.named_parameters() if p.requires_grad}
    learner_of(algorithm).minimize(algorithm.prepare(sample(algorithm)), algorithm)
    for name, p in algorithm.named_parameters():
        if name in before:
            torch.testing.assert_close(p.detach(), before[name] - 1e-3 * before[name].sign(), rtol=0, atol=2e-6)


# ---- acting ---------------------------------------------------------------------------------------------------------


def test_values_are_the_smaller_critic_s_of_the_policy_s_actions():
    algorithm = make()
    batch = sample(algorithm)
    with torch.no_grad():
        action = algorithm.act({"obs": batch["obs"][1], "is_first": batch["is_first"][1]}, {}, "greedy")[0]["action"]
        for member in range(2):
            algorithm.critic.head.bias.zero_()
            algorithm.critic.head.bias[member] = -9.0
            q = algorithm.critic(batch["obs"][1], action)[member]
            torch.testing.assert_close(algorithm.values(batch)[1], q)


def test_one_unroll_is_every_row_by_itself():
    """Actions of policy and target policy are those that they play row by row, from the state that was stored."""
    algorithm = make(overrides=["model=lstm"], burn_in=0)
    batch, played = sample(algorithm), {}
    with torch.no_grad():
        for p in algorithm.target_actor.parameters():
            p *= -0.9
        for name, actor in (("policy", algorithm.actor), ("target", algorithm.target_actor)):
            carry, actions = tree.map(lambda x: x[0], batch["carry"]), []
            for obs, is_first in zip(batch["obs"], batch["is_first"], strict=True):
                action, carry = actor(obs, carry, is_first)
                actions.append(action)
            played[name] = torch.stack(actions)
        prepared = algorithm.prepare(batch)
        rows = algorithm._unroll(prepared)
    torch.testing.assert_close(rows["policy_action"], played["policy"][: algorithm.cfg.sequence_length])
    torch.testing.assert_close(rows["next_action"], played["target"][prepared["last"], torch.arange(6)])
