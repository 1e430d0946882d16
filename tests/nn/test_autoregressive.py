"""Choices that depend on each other, against enumerations of all joint actions."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiBinary, MultiDiscrete
from torch.testing import assert_close

from rlplug.nn import Adam, AutoregressiveHead, MultiCategoricalHead, head_for
from rlplug.nn.adaptation import AdaptivePolicy
from rlplug.nn.autoregressive import along
from rlplug.testing.context import context

SIZES = (2, 4, 3)
ACTIONS = torch.tensor([*itertools.product(*map(range, SIZES))])  # [24, 3]
OPTIONS = SimpleNamespace(distribution="autoregressive", free_log_std=True, initial_log_std=0.0)


def made(seed, sizes=SIZES, dtype=torch.float64):
    """Return a head whose choices depend on each other, with random biases."""
    torch.manual_seed(seed)
    head = AutoregressiveHead(5, sizes, gain=2.0).to(dtype)
    torch.nn.init.normal_(head.linear.bias)
    return head


def rows(seed=0, dtype=torch.float64):
    return torch.randn(7, 1, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def joint(dist):
    """Return the log-probabilities of all joint actions, ``[7, 24]``, of distributions of ``[7, 1]`` rows."""
    return dist.logp(ACTIONS.expand(7, *ACTIONS.shape))


def by_hand(head, features, action):
    """Return the log-probability of one action of one row, choice by choice."""
    total, hidden = 0.0, head.hidden(features)
    base = head.linear(features).view(len(SIZES), head.n)
    for i, (size, chosen) in enumerate(zip(SIZES, action, strict=True)):
        total += (base[i, :size] + head.leave[i, :size] @ hidden.tanh()).log_softmax(0)[chosen]
        hidden = hidden + head.enter[i, chosen]
    return total


def test_log_probabilities_are_those_of_the_choices_in_turn_and_sum_to_one():
    head, features = made(0), rows()
    logp = joint(head(features))
    assert_close(logp.exp().sum(-1), torch.ones(7, dtype=torch.float64))
    assert_close(logp, torch.stack([torch.stack([by_hand(head, x, a) for a in ACTIONS]) for x in features[:, 0]]))


def test_a_known_action_gives_the_same_probabilities_as_any_other():
    dist, actions = made(0)(rows()), ACTIONS.expand(7, *ACTIONS.shape)
    given = along(dist, actions)
    assert_close(given.logp(actions), joint(dist))
    assert_close(given.logp(actions.flip(1)), joint(dist).flip(1))
    assert along(dist, None) is dist
    assert_close(joint(dist.rebuild(dist.params)), joint(dist))


def test_gradients_are_those_of_finite_differences():
    head, features, action = made(0), rows().requires_grad_(), ACTIONS[torch.arange(7) * 3].unsqueeze(1)
    old = along(made(1)(rows()), action).params.detach()
    names, weights = zip(*head.named_parameters(), strict=True)

    def numbers(x, *values):
        own = dict(zip(names, values, strict=True))
        dist = along(torch.func.functional_call(head, own, (x,)), action)
        return dist.logp(action), dist.entropy(), dist.kl_from(old)

    assert torch.autograd.gradcheck(numbers, (features, *(w.detach().requires_grad_() for w in weights)))


def test_means_over_sampled_actions_are_entropy_and_divergence_of_the_whole():
    new, old, actions = made(0)(rows()), made(1)(rows()), ACTIONS.expand(7, *ACTIONS.shape)
    p, q = joint(new), joint(old)
    assert_close((p.exp() * along(new, actions).entropy()).sum(-1), -(p.exp() * p).sum(-1))
    divergence = along(new, actions).kl_from(along(old, actions).params)
    assert (divergence >= 0).all()
    assert_close((q.exp() * divergence).sum(-1), (q.exp() * (q - p)).sum(-1))
    assert_close(along(new, actions).kl_from(along(new, actions).params), torch.zeros_like(divergence))
    assert_close(new.entropy(), along(new, new.mode()).entropy())
    other = made(0)(rows(1))
    assert_close(new.kl_from(other.params), along(new, other.mode()).kl_from(along(other, other.mode()).params))


def test_samples_have_the_probabilities():
    head, n = made(0), 40_000
    dist = head(rows()[0].expand(n, 5))
    action = dist.sample(torch.rand(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    counts = (action[:, None] == ACTIONS).all(-1).sum(0)
    assert_close(counts / n, joint(head(rows()))[0].exp(), atol=0.01, rtol=0.0, check_dtype=False)
    first, second, third = dist.mode()[0].tolist()
    assert first == max(range(2), key=lambda i: joint(head(rows()))[0].exp().view(SIZES)[i].sum())
    assert third == joint(head(rows()))[0].view(SIZES)[first, second].argmax()


def test_masks_hold_whatever_was_chosen_before():
    head, mask = made(0), torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    dist = head(rows(), mask.expand(7, 1, 9))
    allowed = torch.tensor([a2 in (1, 3) and a3 in (0, 2) for _, a2, a3 in ACTIONS.tolist()])
    assert_close(joint(dist).exp()[:, allowed].sum(-1), torch.ones(7, dtype=torch.float64))
    assert (joint(dist).exp()[:, ~allowed] == 0).all()
    entropy = along(dist, ACTIONS[allowed][0].expand(7, 1, 3)).entropy()
    entropy.sum().backward()
    assert (entropy <= math.log(2 * 2 * 2) + 1e-9).all()
    assert all(p.grad.isfinite().all() for p in head.parameters())
    assert_close(dist.uniform().entropy(), torch.full((7, 1), math.log(8), dtype=torch.float64))


@pytest.mark.parametrize(
    ("space", "size"),
    [(MultiDiscrete([2, 5, 3]), 3), (MultiDiscrete(np.array([[2, 3], [4, 5]])), 4), (MultiBinary((2, 3)), 6)],
    ids=str,
)
def test_the_head_of_a_space_acts_in_it(space, size):
    torch.manual_seed(0)
    head = head_for(space, 8, options=OPTIONS)
    assert isinstance(head, AutoregressiveHead)
    features, noise = torch.randn(4, 5, 8), head.noise(context(), 20)
    dist = head(features)
    assert noise.shape == (20, size)
    action = dist.sample(noise.view(4, 5, size))
    assert action.dtype == torch.int64
    assert action.shape == dist.mode().shape == (4, 5, *space.shape)
    for row in [*action.flatten(0, 1), *dist.mode().flatten(0, 1)]:
        assert space.contains(row.numpy().astype(space.dtype))
    flat = head(features.flatten(0, 1))
    assert_close(dist.logp(action).flatten(), flat.logp(action.flatten(0, 1)))
    assert_close(along(dist, action).entropy().flatten(), along(flat, action.flatten(0, 1)).entropy())


def cloned(head, steps=200):
    """Return the probabilities ``[3, 3]`` that a head learns from pairs of equal choices."""
    features, pairs = torch.ones(30, 4), torch.arange(3).repeat(10)[:, None].expand(30, 2)
    optimizer = Adam(head.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (-head(features).logp(pairs).mean()).backward()
        optimizer.step()
    every = torch.tensor([*itertools.product(range(3), repeat=2)])
    return head(torch.ones(9, 4)).logp(every).exp().view(3, 3).detach()


def test_it_represents_what_independent_choices_cannot():
    torch.manual_seed(0)
    own, independent = cloned(AutoregressiveHead(4, [3, 3])), cloned(MultiCategoricalHead(4, [3, 3]))
    assert_close(own, torch.eye(3) / 3, atol=0.01, rtol=0.0)
    assert_close(independent, torch.full((3, 3), 1 / 9), atol=0.01, rtol=0.0)


class Torso(torch.nn.Module):
    out_dim = 5

    def forward(self, x, carry, is_first):
        return x, {}


def test_weights_of_each_task_and_their_second_derivatives():
    policy = AdaptivePolicy(Torso(), MultiDiscrete(SIZES), OPTIONS).double()
    weights, obs = policy.initial(2), rows()[:, 0].expand(2, 7, 5)
    out = policy.sample(weights, {"obs": obs, "noise": torch.full((2, 7, 3), 0.4, dtype=torch.float64)})
    logp, kl, _ = policy.evaluate(weights, {"obs": obs, **{key: out[key] for key in ("action", "dist")}})
    assert_close(logp, out["logp"])
    assert_close(kl, torch.zeros_like(kl))
    own = weights["policy.enter"]
    (grad,) = torch.autograd.grad(logp.sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), policy.policy.enter)
    assert second.isfinite().all()
    assert second.any()
