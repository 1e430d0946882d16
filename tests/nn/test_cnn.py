"""Convolutional networks against torch's own layers, and the layout of images."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from rlplug.nn import CNN, Pixels, ResidualCNN, is_image
from rlplug.types import ConfigError

NATURE = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]


def image(*shape, dtype=np.uint8):
    return Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((4, 84, 84), (4, 84, 84)), ((7, 9, 3), (3, 7, 9)), ((5, 5, 5), (5, 5, 5)), ((1, 20, 10), (1, 20, 10))],
)
@pytest.mark.parametrize("lead", [(2,), (3, 2)])
def test_pixels_are_laid_out_by_the_space_and_scaled(shape, size, lead):
    pixels = Pixels(image(*shape))
    assert (pixels.channels, pixels.height, pixels.width) == size
    x = torch.randint(0, 256, (*lead, *shape), dtype=torch.uint8)
    y = pixels(x)
    assert y.shape == (np.prod(lead), *size)
    assert y.dtype == torch.float32
    expected = x.reshape(-1, *shape)
    if size != shape:
        expected = expected.movedim(-1, 1)
    assert_close(y, expected.float() / 255)


def test_floats_are_not_scaled_and_bytes_by_what_is_said():
    x = torch.rand(2, 3, 8, 8)
    assert_close(Pixels(image(3, 8, 8, dtype=np.float32))(x), x, rtol=0, atol=0)
    cells = torch.randint(0, 11, (2, 7, 7, 3), dtype=torch.uint8)
    assert_close(Pixels(image(7, 7, 3), 10.0)(cells), cells.movedim(-1, 1) / 10.0)


def test_pixels_become_what_autocast_computes_in():
    pixels, x = Pixels(image(4, 84, 84)), torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        seen = pixels(x)
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert_close(seen, pixels(x).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("channels", [1, 4])
def test_channels_lie_next_to_one_another_even_if_there_is_one(channels: int):
    x = torch.randint(256, (2, channels, 84, 84), dtype=torch.uint8)
    seen = Pixels(image(channels, 84, 84))(x)
    assert seen.stride() == (channels * 84 * 84, 1, channels * 84, channels)
    assert CNN((channels, 84, 84), [(8, 8, 4)], []).convs[0](seen).stride(1) == 1


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(4, 84, 84), (1, 84, 84), (7, 7, 3)])
def test_many_networks_see_the_pixels_that_one_sees(shape: tuple[int, ...], kind: type):
    """As candidates do, which act under torch.vmap."""
    pixels, x = Pixels(image(*shape, dtype=kind)), torch.randint(256, (3, 2, *shape), dtype=torch.uint8)
    x = x if kind is np.uint8 else x.float()
    assert_close(torch.vmap(pixels)(x), torch.stack([pixels(one) for one in x]), rtol=0, atol=0)


@pytest.mark.parametrize("space", [Box(-1, 1, (4,)), Discrete(3), image(84, 84), image(2, 3, 84, 84)], ids=str)
def test_what_is_no_image_is_refused_with_ways_out(space):
    with pytest.raises(ConfigError, match=r"model: .*\[C, H, W\].*model=mlp.*model=multi_input"):
        Pixels(space)
    assert not is_image(space)


@pytest.mark.parametrize(
    ("space", "yes"),
    [
        (image(4, 84, 84), True),
        (image(7, 7, 3), True),
        (image(4, 4, 4, dtype=np.float32), True),
        (image(3, 3, 3), False),
        (image(2, 84, 1), False),
    ],
    ids=str,
)
def test_what_is_an_image(space, yes):
    assert is_image(space) == yes


def test_the_network_of_the_paper():
    """Mnih et al. 2015, methods: 32 8x8/4, 64 4x4/2, 64 3x3/1, 512, each with a rectifier."""
    net = CNN((4, 84, 84), NATURE, [512])
    assert [tuple(p.shape) for p in net.parameters()] == [
        *[(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)],
        *[(512, 64 * 7 * 7), (512,)],
    ]
    x = torch.rand(3, 4, 84, 84)
    h = x
    for conv, stride in zip(net.convs, (4, 2, 1), strict=True):
        h = F.relu(F.conv2d(h, conv.weight, conv.bias, stride))
    (layer,) = net.head.layers
    assert_close(net(x), F.relu(F.linear(h.flatten(1), layer.weight, layer.bias)))
    assert net.out_dim == 512


def test_channels_last_input_gives_the_same_features():
    net, x = CNN((3, 9, 8), [(8, 3, 2), (8, 2, 1)], [16]), torch.rand(3, 9, 8, 3)
    assert_close(net(x.permute(0, 3, 1, 2)), net(x.permute(0, 3, 1, 2).contiguous()))


def test_too_small_an_image():
    with pytest.raises(ValueError, match="7x7 pixels are left for a kernel of 8x8"):
        CNN((3, 7, 7), NATURE, [8])
    with pytest.raises(ValueError, match="1x2 pixels are left for a kernel of 3x3"):
        CNN((3, 20, 32), NATURE, [8])


def test_the_residual_network_of_the_paper():
    """Espeholt et al. 2018, figure 3: 15 convolutions in 3 sections of 16, 32, 32 channels, then 256."""
    net = ResidualCNN((4, 84, 84), (16, 32, 32), [256])
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convs] == [16] * 5 + [32] * 10
    assert all((c.kernel_size, c.stride, c.padding) == ((3, 3), (1, 1), (1, 1)) for c in convs)
    (layer,) = net.head.layers
    assert tuple(layer.weight.shape) == (256, 32 * 11 * 11)

    def conv(i, x):
        return F.conv2d(x, convs[i].weight, convs[i].bias, padding=1)

    x = h = torch.rand(2, 4, 84, 84)
    for section in range(0, 15, 5):
        h = F.max_pool2d(conv(section, h), 3, 2, 1)
        for block in (section + 1, section + 3):
            h = h + conv(block + 1, F.relu(conv(block, F.relu(h))))
    assert_close(net(x), F.relu(F.linear(F.relu(h).flatten(1), layer.weight, layer.bias)))


@pytest.mark.parametrize("size", [(3, 7, 7), (1, 1, 1), (4, 10, 13)])
def test_the_residual_network_serves_any_size(size):
    assert ResidualCNN(size, (4, 8), [16])(torch.rand(2, *size)).shape == (2, 16)


MAKE = {
    "cnn": lambda **options: CNN((3, 8, 8), [(4, 3, 1), (6, 2, 2)], [12], **options),
    "residual": lambda **options: ResidualCNN((3, 8, 8), (4, 6), [12], **options),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_orthogonal_weights(make):
    net = make(init="orthogonal")
    for name, p in net.named_parameters():
        if p.ndim == 1:
            assert not p.any()
            continue
        rows = p.flatten(1)
        gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
        assert_close(gram, 2.0 * torch.eye(len(gram)), atol=1e-5, rtol=0, msg=name)
    assert any(p.any() for p in make(init="default").parameters() if p.ndim == 1)


@pytest.mark.parametrize(("name", "norms"), [("cnn", 3), ("residual", 10)])
def test_layer_norm_stands_before_every_activation(name, norms):
    plain, normed = MAKE[name](), MAKE[name](layer_norm=True)
    found = [m for m in normed.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm)]
    assert len(found) == norms
    seen = []
    for norm in found:
        norm.register_forward_hook(lambda m, x, y: seen.append(y.flatten(1)))
    for net in (plain, normed):
        for p in net.parameters():
            if p.ndim > 1:
                p.data *= 100.0
    x = torch.rand(5, 3, 8, 8)
    assert plain(x).square().mean() > 100.0
    normed(x)
    assert len(seen) == norms
    for y in seen:
        assert_close(y.mean(1), torch.zeros(5), atol=1e-5, rtol=0)
        assert_close(y.var(1, correction=0), torch.ones(5), atol=1e-3, rtol=0)
