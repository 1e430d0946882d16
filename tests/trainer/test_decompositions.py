"""What operations become in machine code for a processor is what they were, to a few roundings."""

from __future__ import annotations

import pytest
import torch

from rlplug.trainer.artifact import _traced
from rlplug.trainer.decompositions import tanh

ROUNDING = 2.0**-23


def test_tanh_is_right_to_four_roundings_everywhere():
    x = torch.cat([torch.linspace(-12.0, 12.0, 2_000_001), torch.logspace(-38, 1, 100_000)])
    y, exact = tanh(x), torch.tanh(x.double())
    assert ((y.double() - exact).abs() <= 4 * ROUNDING * exact.abs()).all()
    assert torch.equal(tanh(-x), -y)
    assert y.abs().max() == 1.0


def test_tanh_of_what_is_no_number_and_of_infinity():
    y = tanh(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]))
    assert y[0].isnan()
    torch.testing.assert_close(y[1:], torch.tensor([1.0, -1.0, 0.0]), rtol=4 * ROUNDING, atol=0.0)


def operations(function, batch):
    graph, *_ = _traced(function, batch, varies=False)
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, False), (torch.float64, True)])
def test_float32_alone_is_taken_apart(dtype, left):
    """Other types would be rounded in between."""
    weight, bias = torch.ones(2, 3, 4, dtype=dtype), torch.ones(2, 1, 4, dtype=dtype)
    batch = {"x": torch.randn(2, 5, 3, dtype=dtype)}
    names = operations(lambda b: torch.tanh(torch.baddbmm(bias, b["x"], weight)), batch)
    for name in ("aten.tanh.default", "aten.baddbmm.default"):
        assert (name in names) is left
