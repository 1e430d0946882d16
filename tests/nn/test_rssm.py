"""The recurrent state-space model against the authors' formulas, and encoder and decoder on all kinds of spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import silu

from rlplug.functional.bins import symexp_bins, two_hot_loss, two_hot_mean
from rlplug.nn.rssm import (
    BLOCKS,
    RSSM,
    STOCH,
    Decoder,
    DenseHead,
    Encoder,
    Normalized,
    OneHot,
    RMSNorm,
    Size,
    TwoHotHead,
    choose,
    unimix,
)
from rlplug.types import ConfigError

SMALL = Size(deter=16, hidden=6, classes=3, depth=2, units=8)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (20, 16, 3), np.uint8)
SMALL_IMAGE = spaces.Box(0, 255, (7, 7, 3), np.uint8)
CHOICES = spaces.Tuple((VECTOR, spaces.MultiDiscrete([3, 2])))
BOTH = spaces.Dict({"image": IMAGE, "vector": VECTOR, "choice": spaces.Discrete(4)})


def an_rssm() -> RSSM:
    torch.manual_seed(0)
    return RSSM(SMALL, tokens=5, action=2).double()


def state_of(n: int):
    deter = torch.randn(n, SMALL.deter, dtype=torch.float64)
    stoch = torch.eye(SMALL.classes, dtype=torch.float64)[torch.randint(SMALL.classes, (n, STOCH))].flatten(1)
    return deter, stoch


def original_core(model: RSSM, deter, stoch, action):
    """``RSSM._core`` of danijar/dreamerv3, block by block, with the weights of ``model``."""

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4) * weight

    def dense(layer, x):
        return silu(norm(x @ layer.layers[0].weight.T + layer.layers[0].bias, layer.norms[0].weight))

    x = torch.cat([dense(model.from_deter, deter), dense(model.from_stoch, stoch), dense(model.from_action, action)], 1)
    size = SMALL.deter // BLOCKS
    hidden = []
    for g in range(BLOCKS):  # each block reads its part of the state, and all of x
        rows = slice(g * size, (g + 1) * size)
        kernel = torch.cat([model.blocks.weight[g], model.inputs[rows].T])
        bias = model.blocks.bias[g]
        hidden.append(torch.cat([deter[:, rows], x], 1) @ kernel + bias)
    hidden = silu(norm(torch.cat(hidden, 1), model.norm.weight))
    out = []
    for g in range(BLOCKS):
        rows = slice(g * size, (g + 1) * size)
        gates = hidden[:, rows] @ model.gates.weight[g] + model.gates.bias[g]
        reset, cand, update = gates.split(size, 1)
        cand, update = torch.tanh(torch.sigmoid(reset) * cand), torch.sigmoid(update - 1)
        out.append(update * cand + (1 - update) * deter[:, rows])
    return torch.cat(out, 1)


def test_the_block_gru_equals_the_original():
    model, (deter, stoch) = an_rssm(), state_of(4)
    action = torch.randn(4, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases and gains are not 0 and 1
    expected = original_core(model, deter, stoch, action)
    torch.testing.assert_close(model.next_deter(deter, stoch, model.from_action(action)), expected)


def test_rows_at_once_equal_row_by_row_and_episodes_begin_anew():
    model, rows, columns = an_rssm(), 6, 3
    tokens, action = (
        torch.randn(rows, columns, 5, dtype=torch.float64),
        torch.randn(rows, columns, 2, dtype=torch.float64),
    )
    noise, is_first = torch.rand(rows, columns, STOCH), torch.zeros(rows, columns, dtype=torch.bool)
    is_first[3, 1] = True
    deter, stoch = state_of(columns)
    carry = {"deter": deter, "stoch": model.classes(stoch)}
    whole = model.observe(tokens, action, is_first, carry, noise)
    at = carry
    for t in range(rows):
        row = model.observe(tokens[t : t + 1], action[t : t + 1], is_first[t : t + 1], at, noise[t : t + 1])
        at = {"deter": row["deter"][0], "stoch": model.classes(row["stoch"][0])}
        torch.testing.assert_close(row["deter"][0], whole["deter"][t])
        assert torch.equal(row["stoch"][0], whole["stoch"][t])
    alone = model.observe(
        tokens[3:], 0.0 * action[3:4].expand(3, columns, 2) + action[3:], is_first[3:], carry, noise[3:]
    )
    torch.testing.assert_close(alone["deter"][:, 1], whole["deter"][3:, 1])  # neither state nor action of before
    assert not torch.allclose(alone["deter"][:, 0], whole["deter"][3:, 0])


def test_choices_have_the_probabilities_and_their_gradient():
    p = torch.tensor([0.2, 0.0, 0.5, 0.3], requires_grad=True)
    noise = (torch.arange(1000) + 0.5) / 1000
    chosen = choose(p.expand(1000, 4), noise)
    assert chosen.sum(0).tolist() == [200.0, 0.0, 500.0, 300.0]
    assert chosen.sum(-1).eq(1.0).all()
    (chosen * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert p.grad.tolist() == [1000.0, 2000.0, 3000.0, 4000.0]
    assert choose(p, torch.tensor(1.0 - 1e-7)).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert choose(p, None).tolist() == [0.0, 0.0, 1.0, 0.0]
    assert OneHot.apply(p, torch.tensor(1)).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_rms_norm_and_its_gradient_by_hand():
    norm, x = RMSNorm(3).double(), torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    norm.weight.data = torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-4).sqrt() * norm.weight)
    with torch.no_grad():
        without = norm(x)
    torch.testing.assert_close(without, norm(x).detach())
    assert torch.autograd.gradcheck(Normalized.apply, (x, norm.weight))


def test_unimix_by_hand():
    p = unimix(torch.tensor([0.0, float(np.log(3.0))], dtype=torch.float64), 0.01)
    torch.testing.assert_close(p, torch.tensor([0.2525, 0.7475], dtype=torch.float64))


@pytest.mark.parametrize("space", [VECTOR, IMAGE, SMALL_IMAGE, BOTH, CHOICES], ids=str)
def test_what_is_decoded_has_the_shape_of_what_is_encoded(space):
    torch.manual_seed(0)
    encoder, decoder = (cls(space, SMALL, torch.tanh) for cls in (Encoder, Decoder))
    space.seed(0)
    picks = [space.sample() for _ in range(6)]
    obs = torch.utils.data.default_collate(picks)
    obs = torch.utils._pytree.tree_map(lambda x: x.unflatten(0, (3, 2)), obs)
    obs = {str(i): x for i, x in enumerate(obs)} if isinstance(obs, list | tuple) else obs
    assert encoder(obs).shape == (3, 2, encoder.out_dim)
    deter, stoch = torch.randn(3, 2, SMALL.deter), torch.randn(3, 2, STOCH * SMALL.classes)
    images, _ = decoder(deter, stoch)
    assert images is None or images.shape == (6, 3, 20, 16)
    losses = decoder.loss(deter, stoch, obs)
    assert all(loss.shape == (3, 2) for loss in losses.values())
    sum(loss.sum() for loss in losses.values()).backward()
    assert [name for name, p in decoder.named_parameters() if p.grad is None] == []


def test_reconstruction_losses_by_hand():
    decoder = Decoder(spaces.Dict({"a": VECTOR, "b": spaces.Discrete(2)}), SMALL, lambda x: 2.0 * x)
    guess = torch.tensor([[1.0, 2.0, 3.0, 0.0, float(np.log(3.0))]])
    obs = {"a": torch.tensor([[0.5, 0.5, 0.5]]), "b": torch.tensor([1])}
    loss = decoder.split.loss(None, guess, obs)["vector"]
    torch.testing.assert_close(loss, torch.tensor([0.0 + 1.0 + 4.0 - np.log(0.75)], dtype=torch.float32))


def test_images_of_several_resolutions_are_refused():
    with pytest.raises(ConfigError, match="one resolution"):
        Encoder(spaces.Dict({"a": IMAGE, "b": spaces.Box(0, 255, (32, 32, 3), np.uint8)}), SMALL, torch.tanh)


@pytest.mark.parametrize("bins", [254, 255])
@pytest.mark.parametrize("width", [64, 256, 512])
def test_without_rewards_the_mean_stays_zero(bins: int, width: int):
    """A ``DenseHead`` of width 256 predicts 2.3 after 60 steps: its rows are rounded differently."""
    generator, edges = torch.Generator().manual_seed(0), symexp_bins(bins)
    head = TwoHotHead([24, width], bins, scale=0.0)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-4, eps=1e-20)
    for _ in range(60):
        logits = head(torch.randn(128, 24, generator=generator))
        assert two_hot_mean(logits.detach(), edges).abs().max() == 0
        optimizer.zero_grad()
        two_hot_loss(logits, torch.zeros(128), edges).mean().backward()
        optimizer.step()
    assert logits.std() > 0


@pytest.mark.parametrize("bins", [6, 7])
def test_bins_are_in_order(bins):
    head, x = TwoHotHead([3, 4], bins), torch.randn(5, 3)
    torch.testing.assert_close(head(x), DenseHead.forward(head, x))
