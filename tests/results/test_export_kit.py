"""The conformance kit notices algorithms and models that cannot be exported, or act otherwise when they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from rlplug.plugins.algo.ppo import PPO
from rlplug.testing.checks.exports import check_export, check_model_export
from rlplug.testing.checks.runs import Case

CASE = Case("ppo", "cartpole")
act = PPO.act


def reads_values(self, step, carry, mode):
    out, carry = act(self, step, carry, mode)
    return {**out, "action": out["action"] if step["obs"].max() < 1e9 else out["action"] * 0}, carry


def keeps_state(self, step, carry, mode):
    out, carry = act(self, step, carry, mode)
    self.turn = 1 - getattr(self, "turn", 0)
    return {**out, "action": out["action"] * 0 + self.turn}, carry


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (reads_values, r"`rlplug export` refuses it: .*test_export_kit.py, line \d+, `return .* if step\[.obs.\].max"),
        (keeps_state, r"exported, the policy acts otherwise in row \d, by 1: does act\(\) keep state on self\?"),
    ],
)
def test_algorithms(monkeypatch, wrong, says):
    check_export(CASE)
    monkeypatch.setattr(PPO, "act", wrong)
    with pytest.raises(AssertionError, match=says):
        check_export(CASE)


class Torso(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.reads, self.linear = reads, nn.Linear(3, 2)

    def initial_carry(self, n):
        return {}

    def forward(self, x, carry, is_first):
        return self.linear(x * (2.0 if self.reads and x.sum() > 0 else 1.0)), carry


def test_models():
    space = Box(-np.inf, np.inf, (3,), np.float32)
    torch.manual_seed(0)
    check_model_export(Torso(reads=False), space, "a vector")
    with pytest.raises(AssertionError, match=r"a vector: `rlplug export` refuses a policy with it: test_export_kit.py"):
        check_model_export(Torso(reads=True), space, "a vector")
