"""Recurrent layers against torch's own, and all layers with a carry against episodes that are played one by one."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from rlplug.nn import GRU, LSTM, GTrXL, unroll

LAYERS = {LSTM: nn.LSTM, GRU: nn.GRU}
T, B, F, H = 13, 5, 3, 4


@pytest.fixture(params=LAYERS, ids=lambda cls: cls.__name__)
def layer(request):
    torch.manual_seed(0)
    return request.param(F, H)


def attention():
    return GTrXL(F, layers=2, dim=H, heads=2, head_dim=3, memory=5, mlp_dim=6)


CORES = {"LSTM": lambda: LSTM(F, H), "GRU": lambda: GRU(F, H), "GTrXL": attention}


@pytest.fixture(params=CORES)
def core(request):
    torch.manual_seed(0)
    return CORES[request.param]()


def carry_of(core):
    """A carry after rows of which some began an episode; as far from 0 as states get."""
    torch.manual_seed(1)
    is_first = torch.zeros(3, B, dtype=torch.bool)
    is_first[1, 2] = True
    with torch.no_grad():
        return core(10 * torch.randn(3, B, F), {}, is_first)[1]


def theirs(layer, x, carry):
    """torch's own module with the same weights."""
    module = LAYERS[type(layer)](F, H)
    module.load_state_dict({f"{name}_l0": p for name, p in layer.named_parameters()})
    h = carry["h"][None]
    y, last = module(x, (h, carry["c"][None]) if "c" in carry else h)
    return y, dict(zip(layer.states, (s[0] for s in (last if isinstance(last, tuple) else (last,))), strict=True))


PATTERNS = {
    "none": [],
    "at the start": [(0, 0), (0, 3)],
    "one inside": [(4, 2)],
    "last row": [(12, 1), (12, 2)],
    "uneven": [(0, 1), (1, 1), (2, 1), (7, 1), (5, 0), (5, 3), (12, 3)],
    "every row": [(t, b) for t in range(T) for b in range(B)],
}


def beginnings(pattern):
    is_first = torch.zeros(T, B, dtype=torch.bool)
    for t, b in PATTERNS[pattern]:
        is_first[t, b] = True
    return is_first


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_unroll_is_torch_on_every_episode_alone(layer, pattern):
    x, carry, is_first = torch.randn(T, B, F), carry_of(layer), beginnings(pattern)
    y, last = layer(x, carry, is_first)
    for b in range(B):
        cuts = [*sorted({0, *is_first[:, b].nonzero().flatten().tolist()}), T]
        for start, end in itertools.pairwise(cuts):
            begin = {key: s[b : b + 1] * ~is_first[start, b] for key, s in carry.items()}
            expected, state = theirs(layer, x[start:end, b : b + 1], begin)
            assert_close(y[start:end, b], expected[:, 0])
        assert_close({key: s[b : b + 1] for key, s in last.items()}, state)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_unroll_is_its_single_steps_with_its_gradients(core, pattern):
    x, carry, is_first = torch.randn(T, B, F, requires_grad=True), carry_of(core), beginnings(pattern)
    start = [s.requires_grad_() for key, s in carry.items() if key != "length"]
    y, last = core(x, carry, is_first)
    steps, at = [], carry
    for t in range(T):
        step, at = core(x[t], at, is_first[t])
        steps.append(step)
    assert_close(y, torch.stack(steps), atol=1e-5, rtol=1e-5)
    assert_close(last, at, atol=1e-5, rtol=1e-5)
    weights = torch.randn(T, B, H)
    into = [x, *start, *core.parameters()]
    one = torch.autograd.grad((y * weights).sum() + sum(s.sum() for s in last.values()), into)
    many = torch.autograd.grad((torch.stack(steps) * weights).sum() + sum(s.sum() for s in at.values()), into)
    assert_close(one, many, atol=1e-4, rtol=1e-4)


def test_nothing_of_another_episode_gets_through(core):
    """Not even from a state that is as far from 0 as floats go."""
    if isinstance(core, LSTM | GRU):
        core.weight_hh.data *= 100.0
    x, is_first = torch.randn(T, B, F, requires_grad=True), beginnings("every row")
    y, last = core(x, {key: torch.full_like(s, 1e6) for key, s in core.initial_carry(B).items()}, is_first)
    fresh, _ = core(x.flatten(0, 1), {}, None)
    assert_close(y.flatten(0, 1), fresh)
    (grad,) = torch.autograd.grad(y[6].sum(), x)
    assert grad[6].ne(0).any(-1).all()
    assert not grad[[t for t in range(T) if t != 6]].any()
    assert {key: s.shape for key, s in last.items()} == {key: s.shape for key, s in core.initial_carry(B).items()}


def test_an_empty_carry_is_zeros_and_no_is_first_no_beginning(core):
    x, none = torch.randn(T, B, F), torch.zeros(T, B, dtype=torch.bool)
    expected = core(x, core.initial_carry(B), none)
    assert_close(core(x, {}, None), expected, rtol=0, atol=0)
    assert core.initial_carry(B).keys() == set(core.states)
    assert all(not s.any() and len(s) == B for s in core.initial_carry(B).values())


def test_under_functional_call_it_uses_the_weights_given(core):
    x, is_first = torch.randn(T, B, F), beginnings("uneven")
    other = CORES[type(core).__name__]()
    given = {name: p.detach() for name, p in other.named_parameters()}
    for args in [(x, {}, is_first), (x, {}, None), (x[0], {}, is_first[0])]:
        y, _ = functional_call(core, given, args)
        assert torch.equal(y, other(*args)[0])
        assert not y.requires_grad


def test_weights_alone_are_its_state(layer):
    assert set(layer.state_dict()) == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def test_orthogonal_gates(layer):
    layer.reset_parameters("orthogonal")
    for gate in layer.weight_hh.chunk(layer.gates):
        assert_close(gate @ gate.T, torch.eye(H))
    assert not layer.bias_ih.any()
    assert not layer.bias_hh.any()


def test_default_weights_are_drawn_as_torch_draws_them(layer):
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    module = LAYERS[type(layer)](F, H)
    assert_close(dict(layer.named_parameters()), {n.removesuffix("_l0"): p for n, p in module.named_parameters()})


def test_mixed_precision_stops_at_the_state(core):
    x, is_first = torch.randn(T, B, F).bfloat16(), beginnings("uneven")
    expected = core(x.float(), {}, is_first)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(core(x, {}, is_first), expected, rtol=0, atol=0)
        _, state = core(x[0], {}, is_first[0])
    assert {s.dtype for s in state.values()} == {torch.float32}


@pytest.mark.parametrize("burn_in", [0, 5])
def test_rows_that_warm_up_have_an_effect_and_no_gradient(core, burn_in):
    x, carry, is_first = torch.randn(T, B, F, requires_grad=True), carry_of(core), beginnings("one inside")
    features = unroll(core, {"obs": x, "is_first": is_first, "other": None}, carry, burn_in)
    assert_close(features, core(x, carry, is_first)[0][burn_in:])
    (gradient,) = torch.autograd.grad(features.sum(), x)
    assert not gradient[:burn_in].any()
    assert gradient[burn_in:].any(-1).all()


def test_an_unroll_takes_dicts_of_observations():
    def torso(obs, carry, is_first):
        return obs["a"], {}

    x = torch.randn(T, B, F)
    assert torch.equal(unroll(torso, {"obs": {"a": x}, "is_first": beginnings("none")}, {}, 2), x[2:])
