"""DDPG and TD3 beside their papers: the target, the delay, the gradients of the one graph."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlplug import testing, tree
from rlplug.config import default_node
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError

SPEC = testing.spec(3, testing.box(2))
IMAGE = spaces.Box(0, 255, (3, 12, 12), np.uint8)
KINDS = {
    "vector": (SPEC, []),
    "image": (testing.spec(IMAGE, testing.box(2)), ["model=cnn", "model.filters=[[4, 3, 2]]", "model.hidden=[8]"]),
    "dict": (
        testing.spec(spaces.Dict({"a": IMAGE, "b": testing.box(2)}), testing.box(2)),
        ["model=multi_input", "model.image.filters=[[4, 3, 2]]", "model.image.hidden=[8]"],
    ),
    "matrix of actions": (testing.spec(3, spaces.Box(-1.0, 1.0, (2, 2))), []),
    "number as action": (testing.spec(3, spaces.Box(-1.0, 1.0, ())), []),
    "lstm": (SPEC, ["model=lstm"]),
    "memory of the policy alone": (SPEC, ["model=gru", "model@critic_model=mlp"]),
}
PARTS = ("critic", "actor")


def make(name: str = "td3", spec=SPEC, overrides=(), **changes) -> DDPG:
    torch.manual_seed(0)
    cfg = testing.config(f"algo/{name}", **{"sequence_length": 4, "burn_in": 2, **changes})
    needs = DDPG.needs(cfg, spec)
    if any("lstm" in word or "gru" in word for word in overrides):
        needs = DDPG.recurrent(cfg, needs)
    return DDPG(cfg, testing.context(spec, overrides=[f"algo={name}", *overrides], needs=needs))


def learner_of(algorithm: DDPG) -> RankLearner:
    return RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)


def sample(algorithm: DDPG, n: int = 6):
    """Windows as a buffer gives them; in those of sequences episodes end and begin."""
    g = torch.Generator().manual_seed(1)
    needs, space = algorithm.ctx.needs, algorithm.ctx.spec.single_agent
    rows = needs.window.burn_in + needs.window.length + 1

    def draw(space):
        if isinstance(space, spaces.Dict):
            return {key: draw(part) for key, part in space.spaces.items()}
        if space.dtype == np.uint8:
            return torch.randint(256, (rows, n, *space.shape), generator=g, dtype=torch.uint8)
        return torch.randn(rows, n, *space.shape, generator=g)

    batch = {"obs": draw(space.obs), "reward": torch.randn(rows, n, generator=g)}
    batch["action"] = torch.rand(rows, n, *space.action.shape, generator=g) * 2 - 1
    for key in ("terminated", "is_first"):
        batch[key] = torch.zeros(rows, n, dtype=torch.bool)
    batch["valid"] = torch.ones(rows, n, dtype=torch.bool)
    if algorithm.sequences:  # column 0 ends within the rows that are learned from, column 1 in the burn-in
        for column, row in ((0, needs.window.burn_in + 1), (1, 0)):
            batch["terminated"][row, column] = column == 0
            batch["valid"][row + 1, column] = False
            batch["is_first"][row + 2, column] = True
        batch["carry"] = tree.map(lambda x: torch.randn(1, *x.shape, generator=g), algorithm.initial_carry(n))
    else:
        batch["terminated"][0, 0] = True
    return batch


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


def test_targets_wait_for_as_many_updates_of_the_policy_as_asked():
    algorithm = make(policy_delay=1, target_network_update_freq=3, tau=1.0)
    learner, moved = learner_of(algorithm), []
    for _ in range(6):
        before = state(algorithm)
        learner.minimize(algorithm.prepare(sample(algorithm)), algorithm)
        moved.append("target_critic" in differences(before, algorithm))
    assert moved == [False, False, True] * 2
    for target, online in ((algorithm.target_actor, algorithm.actor), (algorithm.target_critic, algorithm.critic)):
        assert all(torch.equal(a, b) for a, b in zip(target.parameters(), online.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_gives_the_gradients_of_two_losses_computed_one_by_one(kind):
    spec, overrides = KINDS[kind]
    algorithm = make(spec=spec, overrides=overrides)
    batch = algorithm.prepare(sample(algorithm))

    def gradients(parts):
        algorithm.zero_grad()
        sum(term.mean() for term in algorithm.forward(batch, parts).terms.values()).backward()
        return {name: p.grad.clone() for name, p in algorithm.named_parameters() if p.grad is not None}

    together, apart = gradients(PARTS), [gradients((part,)) for part in PARTS]
    assert [{name.partition(".")[0] for name in one} for one in apart] == [{"critic"}, {"actor"}]
    merged = apart[0] | apart[1]
    assert merged.keys() == together.keys() == {n for n, p in algorithm.named_parameters() if p.requires_grad}
    for name, grad in merged.items():
        torch.testing.assert_close(together[name], grad, rtol=1e-5, atol=1e-7)


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


@pytest.mark.parametrize(
    ("changes", "loss"),
    [({"td_error_loss_fn": "mse"}, 2.0), ({"td_error_loss_fn": "huber"}, 1.5), ({"huber_threshold": 0.5}, 2.0)],
)
def test_losses_of_an_error_of_2(changes, loss):
    """1/2 2^2; 1 (2 - 1/2); the threshold alone changes nothing."""
    algorithm = by_hand(twin_q=False, **changes)
    with torch.no_grad():
        algorithm.critic.head.weight.zero_()
        algorithm.critic.head.bias.fill_(1.0)
    batch = algorithm.prepare(sample(algorithm)) | {"returns": torch.full((6,), 3.0), "discount": torch.zeros(6)}
    torch.testing.assert_close(algorithm.forward(batch, ("critic",)).terms["critic"], torch.full((6,), loss))


def test_the_huber_loss_is_linear_beyond_its_threshold():
    algorithm = by_hand(twin_q=False, td_error_loss_fn="huber", huber_threshold=0.5)
    batch = algorithm.prepare(sample(algorithm)) | {"returns": torch.full((6,), 2.0), "discount": torch.zeros(6)}
    target_of(algorithm, batch)  # the critic says 0
    loss = algorithm.forward(batch, ("critic",)).terms["critic"]
    torch.testing.assert_close(loss, torch.full((6,), 0.5 * (2.0 - 0.25)))


def test_importance_weights_scale_the_critics_loss_and_errors_become_priorities():
    algorithm = make()
    batch, weight = algorithm.prepare(sample(algorithm)), torch.linspace(0.0, 1.0, 6)
    plain, weighted = (algorithm.forward(x, PARTS) for x in (batch, batch | {"weight": weight}))
    torch.testing.assert_close(weighted.terms["critic"], weight * plain.terms["critic"])
    assert torch.equal(weighted.terms["actor"], plain.terms["actor"])
    assert torch.equal(weighted.feedback["priority"], plain.feedback["priority"])
    assert torch.equal(algorithm.prepare(sample(algorithm) | {"weight": weight})["weight"], weight)
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_acts_and_learns_a_step(kind):
    spec, overrides = KINDS[kind]
    algorithm = make(spec=spec, overrides=overrides, n_step=3, policy_delay=1)
    batch = sample(algorithm)
    step = {"obs": tree.map(lambda x: x[0], {"obs": batch["obs"]})["obs"], "is_first": torch.ones(6, dtype=torch.bool)}
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 6, range(6)
    actions = {}
    for mode in ("explore", "greedy", "random"):
        out, carry = algorithm.act(step, algorithm.initial_carry(6), mode)
        actions[mode] = out["action"].detach()
        assert all(spec.single_agent.action.contains(np.asarray(a)) for a in actions[mode].numpy().astype(np.float32))
        assert bool(carry) == algorithm.sequences
    assert torch.equal(actions["explore"], actions["greedy"])  # noise is that of exploration modules
    assert not torch.equal(actions["random"], actions["greedy"])
    losses = learner_of(algorithm).minimize(algorithm.prepare(batch), algorithm)
    assert all(torch.isfinite(x) for x in (losses.terms | losses.metrics).values())
    assert losses.feedback["priority"].shape == (6,)


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


@pytest.mark.parametrize("action", [spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)])
def test_actions_without_bounds_and_discrete_ones_are_refused(action):
    with pytest.raises(ConfigError, match=r"^algo: needs continuous actions within bounds, .*algo=ppo"):
        make(spec=testing.spec(3, action))


def test_a_memory_of_the_critics_alone_is_refused():
    with pytest.raises(ConfigError, match=r"^model: has no recurrent state, but critic_model has"):
        make(overrides=["model=mlp", "model@critic_model=lstm"])
