"""Gated Transformer-XL against its equations, row by row in float64, and what it may read."""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, vmap
from torch.testing import assert_close

from rlplug.nn import GTrXL
from rlplug.nn.attention import Gate, RelativeAttention

T, B, F, DIM, HEADS, HEAD, M = 9, 3, 3, 6, 2, 4, 3


def make(layers=2, **changes):
    torch.manual_seed(0)
    sizes = {"dim": DIM, "heads": HEADS, "head_dim": HEAD, "memory": M, "mlp_dim": 5}
    return GTrXL(F, layers=layers, **sizes | changes)


def beginnings():
    is_first = torch.zeros(T, B, dtype=torch.bool)
    is_first[0, 0] = is_first[4, 1] = is_first[5, 1] = is_first[7, 2] = True
    return is_first


# ---- the equations ---------------------------------------------------------------------------------------------------


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normed(x, norm):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * array(norm.weight) + array(norm.bias)


def array(x):
    return x.detach().numpy()


def sinusoid(distance):
    angles = [distance / 10_000 ** (2 * i / DIM) for i in range(DIM // 2)]
    return np.array([*map(math.sin, angles), *map(math.cos, angles)])


def gated(gate, x, y):
    """Parisotto et al. 2019, gated-recurrent-unit-type gating."""
    (w_r, w_z, w_g), (u_r, u_z, u_g) = np.split(array(gate.weight_y), 3), np.split(array(gate.weight_x), 3)
    r = sigmoid(w_r @ y + u_r @ x)
    z = sigmoid(w_z @ y + u_z @ x - array(gate.bias))
    return (1 - z) * x + z * np.tanh(w_g @ y + u_g @ (r * x))


def attended(attention, rows, t):
    """Dai et al. 2019, section 3.3: what row ``t`` reads of ``rows``, normalized layer inputs by row number."""
    w_k, w_v = np.split(array(attention.key_value), 2)
    read = []
    for head in range(HEADS):
        own = slice(head * HEAD, (head + 1) * HEAD)
        query = array(attention.query)[own] @ rows[t]
        u, v = array(attention.content_bias)[head, 0], array(attention.position_bias)[head, 0]
        scores = [
            (query + u) @ (w_k[own] @ row) + (query + v) @ (array(attention.position)[own] @ sinusoid(t - s))
            for s, row in rows.items()
        ]
        weights = softmax(np.array(scores) / math.sqrt(HEAD))
        read.append(sum(weight * (w_v[own] @ row) for weight, row in zip(weights, rows.values(), strict=True)))
    return array(attention.out) @ np.concatenate(read)


def by_hand(core, x, is_first):
    """The features of one column ``[T, F]`` that begins without a memory, row by row."""
    inputs = [array(core.embedding.weight) @ row + array(core.embedding.bias) for row in array(x)]
    for layer in core.layers:
        outputs = []
        for t in range(len(inputs)):
            start = max(s for s in range(t + 1) if s == 0 or is_first[s])
            rows = {s: normed(inputs[s], layer.norm) for s in range(max(start, t - M), t + 1)}
            y = gated(layer.gate, inputs[t], np.maximum(attended(layer.attention, rows, t), 0))
            hidden = normed(y, layer.mlp_norm)
            for linear in layer.mlp.layers:
                hidden = np.maximum(array(linear.weight) @ hidden + array(linear.bias), 0)
            outputs.append(gated(layer.mlp_gate, y, hidden))
        inputs = outputs
    return np.stack(inputs)


@pytest.mark.parametrize("init", ["default", "orthogonal"])
def test_features_are_those_of_the_equations(init):
    torch.set_default_dtype(torch.float64)
    try:
        core = make(init=init)
    finally:
        torch.set_default_dtype(torch.float32)
    for p in core.parameters():
        p.data += 0.3 * torch.randn_like(p)  # biases of the attention and norms that are not their initial values
    x, is_first = torch.randn(T, B, F, dtype=torch.float64), beginnings()
    y, _ = core(x, {}, is_first)
    for b in range(B):
        assert_close(array(y[:, b]), by_hand(core, x[:, b], is_first[:, b]), rtol=0, atol=1e-12)


# ---- what a row reads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_reads_the_memory_of_every_layer_and_no_other_episode(layers):
    core, is_first = make(layers, dim=32), beginnings()
    x = torch.randn(T, B, F, requires_grad=True)
    y, _ = core(x, {}, is_first)
    for t in range(T):
        for b in range(B):
            (gradient,) = torch.autograd.grad(y[t, b].sum(), x, retain_graph=True)
            start = max(s for s in range(t + 1) if s == 0 or is_first[s, b])
            expected = [(s, b) for s in range(max(start, t - layers * M), t + 1)]
            assert [tuple(at) for at in gradient.any(-1).nonzero().tolist()] == expected


def test_the_carry_has_the_inputs_of_every_layer():
    core, x, is_first = make(), torch.randn(T, B, F), beginnings()
    _, carry = core(x, {}, is_first)
    assert carry["length"].tolist() == [3.0, 3.0, 2.0]
    first = core.embedding(x)
    for b, length in enumerate(carry["length"].int().tolist()):
        assert_close(carry["memory"][b, 0, M - length :], first[T - length :, b])
        assert not carry["memory"][b, :, : M - length].any()
    alone = make(1)
    alone.load_state_dict({key: value for key, value in core.state_dict().items() if not key.startswith("layers.1")})
    second, _ = alone(x, {}, is_first)
    assert_close(carry["memory"][0, 1], second[T - M :, 0])


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_segment_in_two_parts_is_the_whole(cut):
    core, x, is_first = make(), torch.randn(T, B, F), beginnings()
    y, last = core(x, {}, is_first)
    before, carry = core(x[:cut], {}, is_first[:cut])
    after, end = core(x[cut:], carry, is_first[cut:])
    assert_close(torch.cat([before, after]), y, atol=1e-5, rtol=1e-5)
    assert_close(end, last, atol=1e-5, rtol=1e-5)


def test_position_matters():
    """Without relative positions, attention could not tell the order of the rows in its memory."""
    attention = RelativeAttention(DIM, HEADS, HEAD, 2)
    rows, all_of_them = torch.randn(3, 1, DIM), torch.ones(1, 1, 3, dtype=torch.bool)
    swapped = rows[[1, 0, 2]]
    assert (attention(rows, all_of_them) - attention(swapped, all_of_them)).abs().max() > 1e-3
    attention.position.data.zero_()
    assert_close(attention(rows, all_of_them), attention(swapped, all_of_them))


# ---- beginnings, and where it runs -----------------------------------------------------------------------------------


def test_a_layer_begins_near_the_identity():
    x, y = torch.randn(8, DIM), torch.randn(8, DIM)
    far = [(Gate(DIM, bias)(x, y) - x).norm() / x.norm() for bias in (0.0, 2.0, 20.0)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 1e-5


def test_orthogonal_matrices():
    core = make(1, init="orthogonal")
    gate, attention = core.layers[0].gate, core.layers[0].attention
    for matrix in (*gate.weight_x.chunk(3), *gate.weight_y.chunk(3)):
        assert_close(matrix @ matrix.T, torch.eye(DIM))
    assert_close(attention.query.T @ attention.query, torch.eye(DIM))  # 8 rows of 6
    assert not core.embedding.bias.any()


def test_weights_alone_are_its_state():
    core = make()
    assert set(core.state_dict()) == {name for name, _ in core.named_parameters()}


def test_it_acts_under_vmap():
    cores = [make(), make()]
    cores[1].load_state_dict({key: value + 0.1 for key, value in cores[1].state_dict().items()})
    x, is_first = torch.randn(2, B, F), torch.tensor([[False, True, False], [False, False, True]])
    _, carry = cores[0](torch.randn(5, 2 * B, F), {}, None)
    carries = {key: s.unflatten(0, (2, B)) for key, s in carry.items()}
    weights = {key: torch.stack([core.state_dict()[key] for core in cores]) for key in cores[0].state_dict()}
    found = vmap(lambda w, *args: functional_call(cores[0], w, args))(weights, x, carries, is_first)
    for i, core in enumerate(cores):
        y, last = core(x[i], {key: s[i] for key, s in carries.items()}, is_first[i])
        assert_close((found[0][i], {key: s[i] for key, s in found[1].items()}), (y, last))
