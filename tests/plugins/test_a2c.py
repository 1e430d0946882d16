"""A2C beside its paper: the losses of a rollout, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlplug.plugins.algo.a2c import A2C
from tests.plugins.acting import make, segment


def plain(**changes) -> A2C:
    """Its policy is uniform over two actions, and its values are 1/2."""
    algorithm = make(A2C, "a2c", gamma=0.5, **changes)
    with torch.no_grad():
        for layer in (algorithm.net.policy.linear, algorithm.net.value):
            layer.weight.zero_()
            layer.bias.zero_()
        algorithm.net.value.bias.fill_(0.5)
    return algorithm


def rollout(terminated: int | None = None, final: int | None = None):
    """Rewards 1, 2, 3 in one column: which row's action ended the episode for good, which row is a final one."""
    batch = {"obs": torch.randn(4, 1, 3), "action": torch.zeros(4, 1, dtype=torch.long)}
    batch["reward"] = torch.tensor([1.0, 2.0, 3.0, torch.nan]).unsqueeze(1)
    batch["terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    batch["valid"] = torch.tensor([True, True, True, False]).unsqueeze(1)
    if terminated is not None:
        batch["terminated"][terminated] = True
    if final is not None:
        batch["valid"][final] = False
    return batch


@pytest.mark.parametrize(
    ("batch", "lambda_", "advantage"),
    [
        (rollout(), 1.0, [2.3125, 3.125, 2.75]),  # returns 1 + 3.625 / 2, 2 + 3.25 / 2, 3 + 0.5 / 2; less 0.5
        (rollout(), 0.0, [0.75, 1.75, 2.75]),  # r + 0.5 / 2 - 0.5
        (rollout(final=2), 1.0, [1.625, 1.75, None]),  # truncated: the final observation has a value
        (rollout(terminated=1, final=2), 1.0, [1.5, 1.5, None]),
    ],
    ids=["n-step", "one step", "truncated", "terminated"],
)
def test_losses_by_hand(batch, lambda_, advantage):
    """``-log pi(a) A``, ``c (V - R)^2`` and ``-beta H``, where ``pi`` is 1/2 and ``V - R`` is minus ``A``."""
    terms = plain(lambda_=lambda_, vf_loss_coeff=0.25, entropy_coeff=0.1).forward(batch, ("policy",)).terms
    for t, a in enumerate(advantage):
        if a is not None:
            found = [terms[name][t].item() for name in ("policy", "value", "entropy")]
            assert found == pytest.approx([math.log(2) * a, 0.25 * a * a, -0.1 * math.log(2)])


def test_without_a_bonus_there_is_no_term_of_it():
    assert plain(entropy_coeff=0.0).forward(rollout(), ("policy",)).terms.keys() == {"policy", "value"}


def test_the_policy_s_loss_gives_the_value_no_gradient_and_the_other_way_round():
    algorithm = make(A2C, "a2c")
    reached = {}
    for name in ("policy", "value"):
        algorithm.zero_grad()
        algorithm.forward(segment(algorithm), ("policy",)).terms[name][:-1].mean().backward()
        found = (key for key, p in algorithm.net.named_parameters() if p.grad is not None and p.grad.any())
        reached[name] = {key.partition(".")[0] for key in found}
    assert reached == {"policy": {"torso", "policy"}, "value": {"value_torso", "value"}}
