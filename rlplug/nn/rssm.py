"""Recurrent state-space model, encoder and decoder of DreamerV3: Hafner et al. 2025 (arXiv:2301.04104).

The state of a row is ``deter [..., D]``, the state of a block GRU, and ``stoch [..., S, C]``, ``S`` one-hot variables
of ``C`` classes. Layers are those of the authors' code: root-mean-square normalization, SiLU, truncated normal weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn import products
from rlplug.nn.cnn import Pixels, is_image
from rlplug.nn.mlp import Linear
from rlplug.nn.module import Module
from rlplug.nn.spaces import Flatten, Path, choices_of, part_at, parts_of, reaches_255
from rlplug.types import Batch, ConfigError

Squash: TypeAlias = Callable[[Tensor], Tensor]

STOCH, BLOCKS = 32, 8
"""variables of the stochastic state, and blocks of the GRU"""
MULTIPLES, KERNEL = (2, 3, 4, 4), 5
"""channels of the convolutions, as multiples of ``Size.depth``, and size of their kernels"""


class Size(NamedTuple):
    """Widths of all networks."""

    deter: int  # deterministic state
    hidden: int  # layers of the RSSM
    classes: int  # of each stochastic variable
    depth: int  # channels of the first convolution, halved
    units: int  # layers of encoder, decoder and heads


SIZES = {name: Size(*(k * n for n in (512, 64, 4, 4, 64))) for name, k in {"1m": 1, "12m": 4, "25m": 6}.items()}
SIZES |= {name: Size(*(k * n for n in (512, 64, 4, 4, 64))) for name, k in {"50m": 8, "100m": 12, "200m": 16}.items()}
"""by the number of parameters, roughly, with images of 64x64"""


@torch.no_grad()
def initialized(weight: Tensor, fan_in: int, scale: float = 1.0) -> nn.Parameter:
    """Return ``weight [...]``, overwritten by truncated normal numbers of variance ``scale^2 / fan_in``."""
    std = 1.1368 * fan_in**-0.5  # 1.1368: the truncated distribution's standard deviation is its inverse
    return nn.Parameter(nn.init.trunc_normal_(weight, 0.0, std, -2.0 * std, 2.0 * std).mul_(scale))


def linear(before: int, after: int, scale: float = 1.0) -> Linear:
    """Return a layer with ``initialized`` weights and zero bias."""
    layer = Linear(before, after)
    layer.weight = initialized(layer.weight.data, before, scale)
    nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(Module):
    """Root-mean-square normalization with a gain: Zhang & Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., D]`` divided by its root mean square, times the weight."""
        if not torch.is_grad_enabled():
            return normalized(x)[0] * self.weight
        return Normalized.apply(x, self.weight)  # type: ignore[no-any-return]


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [..., n]`` divided by its root mean square, and the inverse of that, ``[..., 1]``."""
    inverse = x.square().mean(-1, keepdim=True).add(1e-4).rsqrt()
    return x * inverse, inverse


class Normalized(torch.autograd.Function):
    """``RMSNorm`` with its gradient in closed form, which needs half the passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, inverse = normalized(x)
        ctx.save_for_backward(y, inverse, weight)
        return y * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the gradients of ``x [..., D]`` and ``weight [D]``."""
        y, inverse, weight = ctx.saved_tensors
        along = grad * y
        shared = (along @ weight).div(len(weight)).unsqueeze(-1)
        return (grad * weight).addcmul_(y, shared, value=-1.0).mul_(inverse), along.flatten(0, -2).sum(0)


class Dense(Module):
    """Layers, each followed by ``RMSNorm`` and SiLU."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(before, after) for before, after in pairwise(sizes))
        self.norms = nn.ModuleList(RMSNorm(n) for n in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in] -> [..., out]``."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.silu(norm(layer(x)))
        return x


class DenseHead(Module):
    """``Dense`` layers and a linear output layer.

    Args:
        scale: of the output's weights; 0: the output is 0 at first.
    """

    def __init__(self, sizes: Sequence[int], out: int, scale: float = 1.0) -> None:
        super().__init__()
        self.dense, self.out = Dense(sizes), linear(sizes[-1], out, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in] -> [..., out]``."""
        return self.out(self.dense(x))


class TwoHotHead(DenseHead):
    """A ``DenseHead`` for the logits of ``two_hot_mean``, in which bins of opposite sign are computed alike.

    Before any reward, both have equal weights and gradients, so that the mean is 0. As rows of one matrix product they
    could be rounded differently: the outer bins, of 5e8, turn a difference of 1e-8 between two logits into values of 3,
    which the critic bootstraps from and the actor pursues.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in] -> [..., K]``."""
        x, weight, bias, bins = self.dense(x), self.out.weight, self.out.bias, len(self.out.bias)
        half = bins - bins // 2  # with the middle bin; products of 2^n columns are faster
        low = products.linear(x, weight[:half], bias[:half])
        high = products.linear(x, weight[-half:].flip(0), bias[-half:].flip(0))
        return torch.cat((low, high[..., : bins // 2].flip(-1)), -1)


class BlockLinear(Module):
    """A linear layer with a block-diagonal matrix: block ``g`` of the output depends on block ``g`` of the input."""

    def __init__(self, before: int, after: int, blocks: int, fan_in: int | None = None) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = initialized(torch.empty(blocks, before // blocks, after // blocks), fan_in or before)
        self.bias = nn.Parameter(torch.zeros(blocks, 1, after // blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Map blocks ``[G, n, in / G] -> [G, n, out / G]``."""
        return products.baddbmm(self.bias, x, self.weight)


def unimix(logits: Tensor, share: float) -> Tensor:
    """Return probabilities ``[..., C]``: ``share`` uniform, the rest ``softmax(logits [..., C])``."""
    p = logits.movedim(-1, 0).softmax(0).movedim(0, -1)  # on a CPU, 13 times as fast over the first axis as the last
    return (1.0 - share) * p + share / logits.shape[-1]


class OneHot(torch.autograd.Function):
    """One-hot choices, whose gradient is passed to the probabilities: Bengio et al. 2013 (arXiv:1308.3432)."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(p).scatter_(-1, index.unsqueeze(-1), 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient of ``p [..., C]``, as if the choices were the probabilities."""
        return grad, None


def choose(p: Tensor, noise: Tensor | None) -> Tensor:
    """Return one-hot samples of probabilities ``p [..., C]`` with a straight-through gradient.

    Args:
        noise: uniform, ``[...]``; None: the most likely class.
    """
    if noise is None:
        return torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1.0)
    index = (p.detach().cumsum(-1) <= noise.unsqueeze(-1)).sum(-1).clamp(max=p.shape[-1] - 1)
    return OneHot.apply(p, index)  # type: ignore[no-any-return]


class RSSM(Module):
    """The world model's dynamics.

    Args:
        size: widths.
        tokens: size of the encoder's output.
        action: size of an encoded action.
        share: of the uniform distribution in all categorical distributions.
    """

    def __init__(self, size: Size, tokens: int, action: int, share: float = 0.01) -> None:
        super().__init__()
        deter, hidden, code = size.deter, size.hidden, STOCH * size.classes
        self.size, self.share, self.out_dim = size, share, deter + code
        self.from_deter, self.from_stoch = Dense([deter, hidden]), Dense([code, hidden])
        self.from_action = Dense([action, hidden])
        fan_in = deter + BLOCKS * 3 * hidden  # all blocks read the three inputs, so that a dense layer serves them
        self.blocks = BlockLinear(deter, deter, BLOCKS, fan_in)
        self.inputs = initialized(torch.empty(deter, 3 * hidden), fan_in)
        self.norm = RMSNorm(deter)
        self.gates = BlockLinear(deter, 3 * deter, BLOCKS)
        self.prior = DenseHead([deter, hidden, hidden], code)
        self.seen, self.seen_norm = linear(deter + tokens, hidden), RMSNorm(hidden)
        self.posterior = linear(hidden, code)

    def initial_carry(self, n: int) -> Batch:
        """Return the state before an episode: ``deter [n, D]`` zeros, and ``stoch [n, S]`` int64, the classes."""
        device = self.norm.weight.device
        zeros = torch.zeros(n, STOCH, dtype=torch.long, device=device)
        return {"deter": torch.zeros(n, self.size.deter, device=device), "stoch": zeros}

    def next_deter(self, deter: Tensor, stoch: Tensor, action: Tensor) -> Tensor:
        """Return the next deterministic state, equation 1.

        Args:
            deter: ``[n, D]``.
            stoch: ``[n, S * C]``.
            action: ``[n, hidden]``, as ``from_action`` returns.
        """

        def split(x: Tensor) -> Tensor:  # [n, D] -> [G, n, D / G]; contiguous, so that a traced graph has equal strides
            return x.unflatten(-1, (BLOCKS, -1)).transpose(0, 1).contiguous()

        x, h = torch.cat((self.from_deter(deter), self.from_stoch(stoch), action), -1), split(deter)
        x = products.linear(x, self.inputs) + self.blocks(h).transpose(0, 1).flatten(1)
        reset, candidate, update = self.gates(split(F.silu(self.norm(x)))).chunk(3, -1)
        h = torch.lerp(h, (reset.sigmoid() * candidate).tanh(), (update - 1.0).sigmoid())
        return h.transpose(0, 1).flatten(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities ``[..., S, C]`` of ``logits [..., S * C]``."""
        return unimix(logits.unflatten(-1, (STOCH, -1)), self.share)

    def imagine(self, deter: Tensor, stoch: Tensor, action: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Predict the next state without an observation; shapes as in ``next_deter``.

        Args:
            action: encoded, ``[n, A]``.
            noise: uniform, ``[n, S]``; None: the most likely classes.
        """
        deter = self.next_deter(deter, stoch, self.from_action(action.to(deter.dtype)))
        return deter, choose(self.probabilities(self.prior(deter)), noise).flatten(-2)

    def observe(self, tokens: Tensor, action: Tensor, is_first: Tensor, carry: Batch, noise: Tensor | None) -> Batch:
        """Return the states of consecutive rows, given their observations.

        Args:
            tokens: ``[T, B, F]``, output of the encoder.
            action: ``[T, B, A]``, encoded, of the row before.
            is_first: ``[T, B]``; the state before, and the action, are then zeros.
            carry: the state before row 0, as in ``initial_carry``.
            noise: uniform, ``[T, B, S]``; None: the most likely classes.

        Returns:
            ``deter [T, B, D]``, ``stoch [T, B, S * C]`` and the posterior's probabilities ``p [T, B, S, C]``.
        """
        keep = ~is_first.unsqueeze(-1)
        actions = self.from_action(action.to(tokens.dtype) * keep)
        seen = products.linear(tokens, self.seen.weight[:, self.size.deter :], self.seen.bias)
        weight = self.seen.weight[:, : self.size.deter]
        deter = carry["deter"]
        stoch = F.one_hot(carry["stoch"], self.size.classes).to(deter.dtype).flatten(-2)
        states = list[tuple[Tensor, ...]]()
        for t in range(len(tokens)):
            deter = self.next_deter(deter * keep[t], stoch * keep[t], actions[t])
            x = F.silu(self.seen_norm(seen[t] + products.linear(deter, weight)))
            p = self.probabilities(self.posterior(x))
            stoch = choose(p, None if noise is None else noise[t]).flatten(-2)
            states.append((deter, stoch, p))
        deters, stochs, ps = zip(*states, strict=True)
        return {"deter": torch.stack(deters), "stoch": torch.stack(stochs), "p": torch.stack(ps)}

    def classes(self, stoch: Tensor) -> Tensor:
        """Return the classes ``[..., S]`` int64 of ``stoch [..., S * C]``, as in a carry."""
        return stoch.unflatten(-1, (STOCH, -1)).argmax(-1)


# ---- actions and observations ----------------------------------------------------------------------------------------


class Actions:
    """Encodes actions of a space as vectors ``[..., width]``: one-hot choices, or numbers in [-1, 1]."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        assert space.shape is not None
        self.shape, self.choices, self.size = space.shape, choices_of(space) or [], math.prod(space.shape)
        self.width = sum(self.choices) or self.size

    def __call__(self, action: Tensor) -> Tensor:
        """Encode ``action [..., *shape]``."""
        flat = action.reshape(*action.shape[: action.ndim - len(self.shape)], self.size)
        if not self.choices:
            return flat.clamp(-1.0, 1.0)
        parts = zip(flat.long().unbind(-1), self.choices, strict=True)
        return torch.cat([F.one_hot(x, n) for x, n in parts], -1).float()


class Observations:
    """Splits observations of a space into one stack of images and one vector of everything else.

    An image is a Box with 3 axes of bytes, or of numbers from 0 to 255 or from 0 to 1, and at least 16x16 pixels;
    smaller ones are vectors. Images have one resolution.

    Args:
        squash: applied to the numbers of vectors, such as ``symlog``.

    Raises:
        ConfigError: images differ in resolution, or a space is not supported.
    """

    def __init__(self, space: spaces.Space[Any], squash: Squash) -> None:
        self.squash = squash
        images = {path: part for path, part in parts_of(space) if _is_picture(part)}
        self.images: dict[Path, Pixels] = {path: Pixels(part) for path, part in images.items()}
        self.vectors = {path: Flatten(part) for path, part in parts_of(space) if path not in images}
        self.width = sum(part.size for part in self.vectors.values())
        self.channels = sum(part.channels for part in self.images.values())
        sides = {(part.height, part.width) for part in self.images.values()}
        self.sides = max(sides, default=(0, 0))
        if len(sides) > 1:
            raise ConfigError("model", f"rssm needs images of one resolution, but these have {sorted(sides)}")

    def __call__(self, obs: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return images ``[n, C, H, W]`` from 0 to 1 and vectors ``[..., width]`` squashed; None without."""
        images = [pixels(part_at(obs, path)) for path, pixels in self.images.items()]
        vectors = [self._vector(flatten, part_at(obs, path)) for path, flatten in self.vectors.items()]
        return torch.cat(images, 1) if images else None, torch.cat(vectors, -1) if vectors else None

    def lead(self, obs: Any) -> tuple[int, ...]:
        """Return the leading axes of an observation."""
        path, pixels = next(iter(self.images.items()))
        return tuple(part_at(obs, path).shape[: -len(pixels.shape)])

    def _vector(self, flatten: Flatten, x: Any) -> Tensor:
        return flatten(x) if flatten.choices else self.squash(flatten(x))

    def loss(self, images: Tensor | None, vector: Tensor | None, obs: Any) -> dict[str, Tensor]:
        """Return the squared errors of decoded images and vectors, and cross-entropies of choices, ``[...]`` each."""
        true_images, true_vector = self(obs)
        losses = dict[str, Tensor]()
        if images is not None and true_images is not None:
            losses["image"] = (images - true_images).square().flatten(1).sum(-1).view(self.lead(obs))
        if vector is not None and true_vector is not None:
            parts = zip(vector.split(self._widths(), -1), true_vector.split(self._widths(), -1), strict=True)
            terms = [
                -(true * guess.log_softmax(-1)).sum(-1) if choice else (guess - true).square().sum(-1)
                for choice, (guess, true) in zip(self._choices(), parts, strict=True)
            ]
            losses["vector"] = torch.stack(terms).sum(0)
        return losses

    def _widths(self) -> list[int]:
        return [n for part in self.vectors.values() for n in (part.choices or [part.size])]

    def _choices(self) -> list[bool]:
        return [bool(part.choices) for part in self.vectors.values() for _ in (part.choices or [0])]


def _is_picture(space: spaces.Space[Any]) -> bool:
    if not isinstance(space, spaces.Box) or not is_image(space):
        return False
    unit = bool((space.low == 0).all() and (space.high == 1).all())
    large = sorted(space.shape)[1] >= 2 ** len(MULTIPLES)  # each convolution halves the sides
    return large and (space.dtype == np.uint8 or reaches_255(space) or unit)


class Convolution(Module):
    """A convolution that keeps the resolution, and normalizes each pixel's channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = _conv(before, after), RMSNorm(after)

    def forward(self, x: Tensor, pool: bool) -> Tensor:
        """Map ``[n, C, H, W]`` to ``[n, C', H, W]``, or with ``pool`` to half of the resolution."""
        x = self.conv(x)
        x = F.max_pool2d(x, 2) if pool else x
        return F.silu(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def _conv(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, KERNEL, padding=KERNEL // 2)
    conv.weight = initialized(conv.weight.data, before * KERNEL**2)
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class Encoder(Module):
    """Encodes observations: images by convolutions, everything else by three dense layers."""

    def __init__(self, space: spaces.Space[Any], size: Size, squash: Squash) -> None:
        super().__init__()
        self.split, self.out_dim = Observations(space, squash), 0
        channels, sides = [self.split.channels, *(size.depth * k for k in MULTIPLES)], self.split.sides
        if self.split.images:
            self.convs = nn.ModuleList(Convolution(*pair) for pair in pairwise(channels))
            self.out_dim += channels[-1] * math.prod(side >> len(MULTIPLES) for side in sides)
        if self.split.width:
            self.dense = Dense([self.split.width, *[size.units] * 3])
            self.out_dim += size.units

    def forward(self, obs: Any) -> Tensor:
        """Map ``[..., *space] -> [..., out_dim]``."""
        images, vector = self.split(obs)
        out = [] if vector is None else [self.dense(vector)]
        if images is not None:
            x = images - 0.5
            for conv in self.convs:
                x = conv(x, True)
            out.append(x.flatten(1).view(*self.split.lead(obs), -1))
        return torch.cat(out, -1)


class Decoder(Module):
    """Decodes states: images from a grid of 16ths of their sides, which is enlarged step by step; vectors by layers.

    Args:
        code: size of the stochastic state; None: that of ``RSSM``.
    """

    def __init__(self, space: spaces.Space[Any], size: Size, squash: Squash, code: int | None = None) -> None:
        super().__init__()
        self.split, code = Observations(space, squash), code or STOCH * size.classes
        self.sides = [[side >> k for side in self.split.sides] for k in reversed(range(len(MULTIPLES) + 1))]
        channels = [size.depth * k for k in reversed(MULTIPLES)]
        self.grid = (*self.sides[0], channels[0])
        if self.split.images:
            self.from_deter = BlockLinear(size.deter, math.prod(self.grid), BLOCKS)
            self.from_stoch = DenseHead([code, 2 * size.units], math.prod(self.grid))
            self.norm = RMSNorm(channels[0])
            self.convs = nn.ModuleList(Convolution(*pair) for pair in pairwise(channels))
            self.out = _conv(channels[-1], self.split.channels)
        if self.split.width:
            self.dense = DenseHead([size.deter + code, *[size.units] * 3], self.split.width)

    def forward(self, deter: Tensor, stoch: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return images ``[n, C, H, W]`` from 0 to 1 and vectors ``[..., width]`` of states ``[..., D]``."""
        vector = self.dense(torch.cat((deter, stoch), -1)) if self.split.width else None
        if not self.split.images:
            return None, vector
        h, w, channels = self.grid
        blocks = deter.flatten(0, -2).unflatten(-1, (BLOCKS, -1)).transpose(0, 1)
        x: Tensor = self.from_deter(blocks).unflatten(-1, (h, w, channels // BLOCKS)).permute(1, 2, 3, 0, 4).flatten(-2)
        x = F.silu(self.norm(x + self.from_stoch(stoch.flatten(0, -2)).view(x.shape))).permute(0, 3, 1, 2)
        for conv, sides in zip(self.convs, self.sides[1:-1], strict=True):
            x = conv(F.interpolate(x, sides), False)
        return self.out(F.interpolate(x, self.sides[-1])).sigmoid(), vector

    def loss(self, deter: Tensor, stoch: Tensor, obs: Any) -> dict[str, Tensor]:
        """Return the losses of ``Observations.loss``, ``[...]`` each."""
        images, vector = self(deter, stoch)
        return self.split.loss(images, vector, obs)
