"""What operations become in machine code for a processor is what they were, to a few roundings."""

import pytest
import torch

from rlplug.compiler.artifact import Artifact
from rlplug.compiler.decompositions import FEW, cumsum, searchsorted, tanh
from rlplug.compiler.tracing import traced as _traced
from rlplug.nn.distributions import Categorical

ROUNDING = 2.0**-23


@pytest.mark.parametrize("compiled", [False, True])
def test_tanh_is_right_to_six_roundings_everywhere(compiled):
    """In machine code a multiplication and an addition are rounded once."""
    x = torch.cat([torch.linspace(-12.0, 12.0, 2_000_001), torch.logspace(-38, 1, 100_000)])
    with torch.no_grad():
        call = Artifact(lambda b: {"y": torch.tanh(b["x"])}, {"x": x}) if compiled else lambda b: {"y": tanh(b["x"])}
        y, exact = call({"x": x})["y"], torch.tanh(x.double())
        assert torch.equal(call({"x": -x})["y"], -y)
    assert ((y.double() - exact).abs() <= 6 * ROUNDING * exact.abs()).all()
    assert y.abs().max() <= 1.0
    assert not torch.equal(y, torch.tanh(x))  # it is this one


def test_tanh_of_what_is_no_number_and_of_infinity():
    y = tanh(torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]))
    assert y[0].isnan()
    torch.testing.assert_close(y[1:], torch.tensor([1.0, -1.0, 0.0]), rtol=6 * ROUNDING, atol=0.0)


def operations(function, batch):
    graph, *_ = _traced(function, batch, varies=False)
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, False), (torch.float64, True)])
def test_float32_alone_is_taken_apart(dtype, left):
    """Other types would be rounded in between."""
    weight, bias = torch.ones(2, 3, 4, dtype=dtype), torch.ones(2, 1, 4, dtype=dtype)
    batch = {"x": torch.randn(2, 5, 3, dtype=dtype)}

    def function(b):
        y = torch.tanh(torch.baddbmm(bias, b["x"], weight))[0]
        return torch.addmm(bias[0], y, y.T @ y).cumsum(-1)

    names = operations(function, batch)
    for name in ("aten.tanh.default", "aten.baddbmm.default", "aten.addmm.default", "aten.cumsum.default"):
        assert (name in names) is left


@pytest.mark.parametrize("n", [1, 2, FEW])
def test_few_numbers_are_summed_and_searched_as_the_library_does(n):
    x = torch.rand(7, n)
    x[0] = 0.0
    ordered = cumsum(x, -1)
    torch.testing.assert_close(ordered, x.cumsum(-1))
    torch.testing.assert_close(cumsum(x, 0), x.cumsum(0))
    values = torch.cat((torch.rand(7, 5) * n, ordered), 1)  # equal ones among them
    assert torch.equal(searchsorted(ordered, values, right=True), torch.searchsorted(ordered, values, right=True))
    left = operations(lambda b: torch.searchsorted(b["x"], b["x"]), {"x": ordered})
    assert "aten.searchsorted.Tensor" in left
    many = {"x": torch.rand(2, FEW + 1)}
    many = operations(lambda b: torch.searchsorted(b["x"].cumsum(-1), b["x"], right=True), many)
    assert {"aten.searchsorted.Tensor", "aten.cumsum.default"} <= many


def test_machine_code_draws_the_actions_that_eager_code_draws():
    """And none of probability 0, however close the noise is to 1."""
    mask = torch.rand(4096, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    noise = torch.rand(4096, 1, generator=torch.Generator().manual_seed(1))
    noise[:1000] = 1.0 - 2.0**-24
    batch = {"logits": torch.randn(4096, 5), "noise": noise, "mask": mask}

    def sample(b):
        return {"action": Categorical(b["logits"], b["mask"]).sample(b["noise"])}

    with torch.no_grad():
        action, eager = Artifact(sample, batch)(batch)["action"], sample(batch)["action"]
    assert action.dtype == torch.int64
    assert (action == eager).float().mean() > 0.999  # sums are rounded otherwise
    allowed = mask.any(1)
    assert mask[allowed].gather(1, action[allowed, None]).all()
