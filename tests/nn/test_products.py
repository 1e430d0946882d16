"""Products by oneDNN are those of torch, with their first and second derivatives."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from rlplug.compiler.artifact import Artifact
from rlplug.nn import products
from rlplug.nn.mlp import MLP

ROWS, INPUTS, OUTPUTS = 512, 192, 192
MEMBERS = 2


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch):
    """Use oneDNN on every processor, and count its products."""
    calls: list[torch.Size] = []
    plain = products.Product.forward

    def counted(x: Any, weight: Any, bias: Any) -> Any:
        calls.append(weight.shape)
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "without_avx512", lambda: True)
    monkeypatch.setattr(products.Product, "forward", staticmethod(counted))
    return calls


def parts(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=source).requires_grad_() for shape in shapes]


CASES = {
    "linear": (products.linear, F.linear, ((ROWS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))),
    "no bias": (products.linear, F.linear, ((ROWS, INPUTS), (OUTPUTS, INPUTS))),
    "rows of rows": (products.linear, F.linear, ((4, 128, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))),
    "ensemble": (
        products.baddbmm,
        torch.baddbmm,
        ((MEMBERS, 1, OUTPUTS), (MEMBERS, ROWS, INPUTS), (MEMBERS, INPUTS, OUTPUTS)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives_are_those_of_torch(case, on_any_processor):
    own, peer, shapes = CASES[case]
    found = []
    for function in (own, peer):
        given = parts(*shapes)
        out = function(*given)
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), given)
        found.append([out, *first, *second])
    assert on_any_processor
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.detach().abs().max()))


def test_only_gradients_that_are_wanted_are_computed(on_any_processor):
    x, weight = parts((ROWS, INPUTS), (OUTPUTS, INPUTS))
    products.linear(x.detach(), weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert len(on_any_processor) == 2  # the product, and the gradient of its weight


@pytest.mark.parametrize(
    "shapes",
    [((ROWS, 8), (8, 8)), ((16, 16384), (64, 16384)), ((0, INPUTS), (OUTPUTS, INPUTS))],
    ids=["small", "long sums", "no rows"],
)
def test_other_products_are_those_of_mkl(shapes, on_any_processor):
    x, weight = parts(*shapes)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    assert not on_any_processor


def test_other_precisions_are_those_of_torch(on_any_processor):
    x, weight = (part.detach() for part in parts((ROWS, INPUTS), (OUTPUTS, INPUTS)))
    assert products.linear(x.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        products.linear(x, weight)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not on_any_processor


def test_lanes_of_weights_multiply_by_vmap(on_any_processor):
    x, weights = (part.detach() for part in parts((ROWS, INPUTS), (3, OUTPUTS, INPUTS)))
    found = torch.func.vmap(products.linear, (None, 0))(x, weights)
    torch.testing.assert_close(found, torch.einsum("ni,eoi->eno", x, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("members", [1, MEMBERS])
def test_a_gradient_step_compiles(members, on_any_processor):
    """The compiled step calls oneDNN with weights that change."""
    net = MLP(INPUTS, [256, 256], ensemble_size=members)
    batch = {"x": torch.randn(ROWS, INPUTS)}

    def step(batch: Any) -> Any:
        loss = net(batch["x"]).square().mean()
        grads = torch.autograd.grad(loss, [*net.parameters()])
        with torch.no_grad():
            for p, grad in zip(net.parameters(), grads, strict=True):
                p.sub_(grad)
        return loss.detach()

    compiled, before = Artifact(step, batch), [p.detach().clone() for p in net.parameters()]
    assert on_any_processor
    outcomes = []
    for function in (step, compiled):
        with torch.no_grad():
            for p, value in zip(net.parameters(), before, strict=True):
                p.copy_(value)
        losses = [function(batch) for _ in range(3)]
        outcomes.append([*losses, *(p.detach().clone() for p in net.parameters())])
    assert outcomes[0][0] > outcomes[0][2]
    for x, y in zip(*outcomes, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
