"""Gated Transformer-XL (GTrXL): attention over the last rows of an episode."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug.nn.mlp import MLP, Init, LayerNorm, Linear
from rlplug.nn.module import Module
from rlplug.types import Batch


def _matrices(count: int, out_features: int, in_features: int, init: Init) -> nn.Parameter:
    """Return ``count`` matrices ``[out, in]`` on top of each other, each initialized by itself."""
    matrices = [torch.empty(out_features, in_features) for _ in range(count)]
    for matrix in matrices:
        if init == "orthogonal":
            nn.init.orthogonal_(matrix)
        else:
            nn.init.uniform_(matrix, -(in_features**-0.5), in_features**-0.5)
    return nn.Parameter(torch.cat(matrices))


class RelativeAttention(Module):
    """Multi-head attention with relative positions: Dai et al. 2019 (arXiv:1901.02860), section 3.3 and appendix B.

    Args:
        dim: size of a row.
        heads: number of heads.
        head_dim: size of the query, key and value of a head.
        memory: a row attends to itself and to this many rows before it.
        init: ``orthogonal`` or torch's ``default``.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, memory: int, *, init: Init = "default") -> None:
        super().__init__()
        self.heads, self.head_dim, self.memory = heads, head_dim, memory
        size = heads * head_dim
        self.query, self.position = _matrices(1, size, dim, init), _matrices(1, size, dim, init)
        self.key_value, self.out = _matrices(2, size, dim, init), _matrices(1, dim, size, init)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))  # u of the paper
        self.position_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))  # v
        angles = torch.arange(memory, -1, -1)[:, None] * 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        self.distances: Tensor  # sinusoids [memory + 1, dim] of the distances memory, ..., 0
        self.register_buffer("distances", torch.cat([angles.sin(), angles.cos()], 1)[:, :dim], persistent=False)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return the output of the attention for the last ``T`` rows.

        Args:
            rows: ``[memory + T, B, dim]``.
            mask: ``[B, T, memory + T]`` bool: which rows each of the last ``T`` may attend to; itself at least, and
                none that is farther away than ``memory``.

        Returns:
            ``[T, B, dim]``.
        """
        each = (self.heads, self.head_dim)
        query = F.linear(rows[self.memory :], self.query).unflatten(-1, each).permute(1, 2, 0, 3)  # [B, heads, T, ...]
        key, value = F.linear(rows, self.key_value).unflatten(-1, (2, *each)).permute(2, 1, 3, 0, 4)
        position = F.linear(self.distances, self.position).unflatten(-1, each).transpose(0, 1)
        scores = (query + self.content_bias) @ key.transpose(-2, -1)  # [B, heads, T, memory + T]
        scores = scores + self._shifted((query + self.position_bias) @ position.transpose(-2, -1))
        scores = (scores * self.head_dim**-0.5).masked_fill(~mask[:, None], -torch.inf)
        return F.linear((scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(-2), self.out)

    def _shifted(self, by_distance: Tensor) -> Tensor:
        """Move the scores of row ``t`` by distance, ``[..., T, memory + 1]``, to its keys ``t``, ..., ``t + memory``.

        Rows that are longer by one than the result shift by one from row to row.
        """
        t = by_distance.shape[-2]
        width = self.memory + t
        return F.pad(by_distance, (0, t)).flatten(-2)[..., : t * width].unflatten(-1, (t, width))


class Gate(Module):
    """The gate of a GRU in place of a residual connection: Parisotto et al. 2019, gating layers.

    Args:
        dim: size of both inputs.
        bias: initial bias; if positive, the gate is near the identity at first.
        init: ``orthogonal`` or torch's ``default``.
    """

    def __init__(self, dim: int, bias: float, *, init: Init = "default") -> None:
        super().__init__()
        self.weight_y = _matrices(3, dim, dim, init)  # W of the reset gate, the update gate, the candidate
        self.weight_x = _matrices(3, dim, dim, init)  # U of the same
        self.bias = nn.Parameter(torch.full((dim,), float(bias)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the update of the stream ``x [..., dim]`` by the output ``y [..., dim]`` of a submodule."""
        gates, candidate = self.weight_x.split((2 * len(self.bias), len(self.bias)))
        reset_y, update_y, new_y = F.linear(y, self.weight_y).chunk(3, -1)
        reset_x, update_x = F.linear(x, gates).chunk(2, -1)
        update = torch.sigmoid(update_y + update_x - self.bias)
        new = torch.tanh(new_y + F.linear(torch.sigmoid(reset_y + reset_x) * x, candidate))
        return (1 - update) * x + update * new


class GTrXLLayer(Module):
    """A layer: attention and a position-wise MLP, each with layer normalization before it and a gate after it."""

    def __init__(
        self, dim: int, heads: int, head_dim: int, memory: int, mlp_dim: int, gate_bias: float, *, init: Init
    ) -> None:
        super().__init__()
        self.norm, self.mlp_norm = LayerNorm(dim), LayerNorm(dim)
        self.attention = RelativeAttention(dim, heads, head_dim, memory, init=init)
        self.mlp = MLP(dim, [mlp_dim, dim], "relu", init=init)
        self.gate, self.mlp_gate = Gate(dim, gate_bias, init=init), Gate(dim, gate_bias, init=init)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Map ``[memory + T, B, dim]`` to the last ``T`` rows of the next layer; see ``RelativeAttention``."""
        x = rows[self.attention.memory :]
        x = self.gate(x, torch.relu(self.attention(self.norm(rows), mask)))
        return self.mlp_gate(x, self.mlp(self.mlp_norm(x)))


class GTrXL(Module):
    """Gated Transformer-XL (Parisotto et al. 2019, arXiv:1910.06764) over streams of episodes.

    A row attends to itself and to the ``memory`` rows before it in its episode. The carry holds the inputs of every
    layer for the last rows of the episode: ``memory [n, layers, memory, dim]``, the latest one at the end and 0 where
    there is none, and ``length [n]``, how many there are. Callers pass it as a constant, so gradients end at the first
    row of a sequence.

    Args:
        in_features: size of the input.
        layers: number of layers.
        dim: size of the rows of every layer, and of the features.
        heads: heads of the attention.
        head_dim: size of the query, key and value of a head.
        memory: rows before the current one that it attends to.
        mlp_dim: hidden units of the position-wise MLP.
        gate_bias: initial bias of the gates.
        init: ``orthogonal`` or torch's ``default``.
    """

    states: ClassVar[tuple[str, ...]] = ("memory", "length")

    def __init__(
        self,
        in_features: int,
        *,
        layers: int,
        dim: int,
        heads: int,
        head_dim: int,
        memory: int,
        mlp_dim: int,
        gate_bias: float = 2.0,
        init: Init = "default",
    ) -> None:
        super().__init__()
        self.dim, self.memory = dim, memory
        self.embedding = Linear(in_features, dim, gain=1.0 if init == "orthogonal" else None)
        self.layers = nn.ModuleList(
            GTrXLLayer(dim, heads, head_dim, memory, mlp_dim, gate_bias, init=init) for _ in range(layers)
        )

    def initial_carry(self, n: int) -> Batch:
        """Return zeros: no row is remembered."""
        weight = self.embedding.weight
        return {"memory": weight.new_zeros(n, len(self.layers), self.memory, self.dim), "length": weight.new_zeros(n)}

    def forward(self, x: Tensor, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map ``[B, in]`` or ``[T, B, in]`` to ``[..., dim]``, and to the carry after the last row.

        Args:
            carry: the state before the first row, shaped like ``initial_carry``; empty means ``initial_carry``.
            is_first: ``[B]`` or ``[T, B]``: rows at which an episode begins, which attend to no row before; None: none.
        """
        with torch.autocast(x.device.type, enabled=False):  # the carry is float32, with or without autocast
            x, carry = x.to(self.embedding.weight.dtype), carry or self.initial_carry(x.shape[-2])
            if x.ndim == 3:
                return self._attend(x, carry, is_first)
            y, carry = self._attend(x[None], carry, None if is_first is None else is_first[None])
            return y[0], carry

    def _attend(self, x: Tensor, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        episode, mask = self._episodes(x, carry["length"], is_first)
        x, seen = self.embedding(x), list[Tensor]()
        for layer, memory in zip(self.layers, carry["memory"].unbind(1), strict=True):
            rows = torch.cat([memory.transpose(0, 1), x])
            seen.append(rows[-self.memory :].transpose(0, 1))
            x = layer(rows, mask)
        kept = episode[:, -self.memory :] == episode[:, -1:]
        memory = torch.stack(seen, 1).masked_fill(~kept[:, None, :, None], 0.0)
        return x, {"memory": memory, "length": kept.sum(1, dtype=memory.dtype)}

    def _episodes(self, x: Tensor, length: Tensor, is_first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of every row's episode, ``[B, memory + T]``, and the mask of the attention.

        Rows of the carry belong to episode 0, like the first row unless an episode begins there; padding belongs to -1.
        """
        if is_first is None:
            is_first = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        at = torch.arange(self.memory + len(x), device=x.device)
        there = at[: self.memory] >= self.memory - length[:, None]
        episode = torch.cat([there.long() - 1, is_first.transpose(0, 1).long().cumsum(1)], 1)
        distance = at[self.memory :, None] - at
        near = (distance >= 0) & (distance <= self.memory)
        return episode, near & (episode[:, self.memory :, None] == episode[:, None])
