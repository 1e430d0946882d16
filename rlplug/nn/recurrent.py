"""LSTM and GRU layers over streams of episodes, which clear their state at the start of an episode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlplug import tree
from rlplug.nn.mlp import Init
from rlplug.nn.module import Module
from rlplug.types import Batch

# cuDNN warns on every call if weights are not contiguous in memory; the copy that it makes is cheap.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

FAR = 1e4
"""A gate input of this magnitude closes or opens the gate exactly."""


class Recurrent(Module):
    """Base of the layers. Weights are laid out as in ``torch.nn.LSTM`` and ``torch.nn.GRU``.

    Rows of many episodes go through torch's fused kernels in ONE call, wherever episodes begin: before each start
    inside the segment, a row is inserted whose gates are forced to clear the state. Columns with fewer starts are
    padded with rows whose gates keep the state. The cost is that of the extra rows.

    Args:
        in_features: size of the input.
        hidden: size of the state, and of the features.
        init: ``orthogonal`` (gain 1, zero bias) or torch's ``default``.
    """

    gates: ClassVar[int]
    states: ClassVar[tuple[str, ...]]

    def __init__(self, in_features: int, hidden: int, *, init: Init = "default") -> None:
        super().__init__()
        self.in_features, self.hidden = in_features, hidden
        size = self.gates * hidden
        self.weight_ih = nn.Parameter(torch.empty(size, in_features))
        self.weight_hh = nn.Parameter(torch.empty(size, hidden))
        self.bias_ih = nn.Parameter(torch.empty(size))
        self.bias_hh = nn.Parameter(torch.empty(size))
        self.forced: Tensor
        forced = FAR * torch.tensor(self._forced()).repeat_interleave(hidden, 0)
        self.register_buffer("forced", forced, persistent=False)
        self.reset_parameters(init)

    @torch.no_grad()
    def reset_parameters(self, init: Init = "default") -> None:
        """Initialize the weights again; see the class for ``init``."""
        for p in self.parameters():
            if init == "default":
                p.uniform_(-(self.hidden**-0.5), self.hidden**-0.5)
            elif p.ndim == 1:
                p.zero_()
            else:
                for gate in p.chunk(self.gates):
                    nn.init.orthogonal_(gate)

    def initial_carry(self, n: int) -> Batch:
        """Return zeros; leaves ``[n, hidden]``."""
        return {key: self.weight_hh.new_zeros(n, self.hidden) for key in self.states}

    def forward(self, x: Tensor, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map ``[B, in]`` or ``[T, B, in]`` to ``[..., hidden]``, and to the carry after the last row.

        Args:
            carry: the state before the first row, leaves ``[B, hidden]``; empty means zeros.
            is_first: ``[B]`` or ``[T, B]``: clear the state before these rows; None: none.
        """
        with torch.autocast(x.device.type, enabled=False):  # errors of a state accumulate
            y, state = self._forward(x.to(self.weight_hh.dtype), carry, is_first)
        return y, dict(zip(self.states, state, strict=True))

    def _forward(self, x: Tensor, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        carry = carry or self.initial_carry(x.shape[-2])
        state = tuple(carry[key] for key in self.states)
        if is_first is not None:
            keep = ~(is_first if x.ndim == 2 else is_first[0])[:, None]
            state = tuple(s * keep for s in state)
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        if x.ndim == 2:
            state = self._step(x, state, weights)
            return state[0], state
        if is_first is None or len(x) == 1:
            return self._unroll(x, state, weights)
        before = is_first[1:].cumsum(0)
        more = int(before[-1].max()) if before.shape[1] else 0  # a rank may have no columns of a small minibatch
        if not more:
            return self._unroll(x, state, weights)
        y, state = self._unroll_episodes(x, state, before, more)
        return y, (y[-1], *state[1:])  # padding does not keep an LSTM's h: its output gate still acts

    def _unroll_episodes(
        self, x: Tensor, state: tuple[Tensor, ...], before: Tensor, more: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        # before [T-1, B]: starts inside the segment up to each row but the first; more: the maximum over columns
        rows, columns, _ = x.shape
        at = torch.arange(rows, device=x.device)[:, None].repeat(1, columns)
        at[1:] += before
        index = (at * columns + torch.arange(columns, device=x.device)).flatten()
        behind = torch.arange(rows + more, device=x.device)[:, None] > at[-1]
        # three more inputs: 1 for the bias, "clear the state", "keep the state"
        kinds = torch.stack([torch.zeros_like(behind), ~behind, behind], -1).to(x.dtype).flatten(0, 1)
        kinds = kinds.index_copy(0, index, kinds.new_tensor([[1.0, 0.0, 0.0]]).expand(len(index), 3))
        wide = x.new_zeros(len(kinds), self.in_features).index_copy(0, index, x.flatten(0, 1))
        weight = torch.cat([self.weight_ih, self.bias_ih[:, None], self.forced], 1)
        weights = (weight, self.weight_hh, torch.zeros_like(self.bias_ih), self.bias_hh)
        y, state = self._unroll(torch.cat([wide, kinds], 1).unflatten(0, behind.shape), state, weights)
        return y.flatten(0, 1)[index].unflatten(0, (rows, columns)), state

    @staticmethod
    def _forced() -> list[tuple[float, float]]:
        """Return for each gate how it is forced to clear the state, and to keep it (-1 closed, 1 open)."""
        raise NotImplementedError

    @staticmethod
    def _step(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Process one row ``[B, in]``."""
        raise NotImplementedError

    @staticmethod
    def _unroll(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Process rows ``[T, B, in]`` without episode starts."""
        raise NotImplementedError


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997) with forget gates (Gers et al. 2000).

    Its carry is ``{"h": [n, hidden], "c": [n, hidden]}``.
    """

    gates = 4
    states = ("h", "c")

    @staticmethod
    def _forced() -> list[tuple[float, float]]:
        return [(-1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]  # input, forget, cell, output

    @staticmethod
    def _step(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.lstm_cell(x, state, *weights)

    @staticmethod
    def _unroll(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c = state
        train = torch.is_grad_enabled()
        y, h, c = torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, train, False, False)
        return y, (h[0], c[0])


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), in the form of ``torch.nn.GRU``.

    Its carry is ``{"h": [n, hidden]}``.
    """

    gates = 3
    states = ("h",)

    @staticmethod
    def _forced() -> list[tuple[float, float]]:
        return [(-1.0, 0.0), (-1.0, 1.0), (0.0, 0.0)]  # reset, update, new

    @staticmethod
    def _step(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.gru_cell(x, *state, *weights),)

    @staticmethod
    def _unroll(x: Tensor, state: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (h,) = state
        y, h = torch.gru(x, h[None], weights, True, 1, 0.0, torch.is_grad_enabled(), False, False)
        return y, (h[0],)


def unroll(torso: Callable[..., tuple[Tensor, Batch]], rows: Batch, carry: Batch, burn_in: int = 0) -> Tensor:
    """Compute the features of a sequence whose first rows only warm up the state: Kapturowski et al. 2019, section 3.

    Args:
        torso: maps ``(obs, carry, is_first)`` to features and the new carry.
        rows: ``obs`` and ``is_first``, leaves ``[T, B, ...]``; other keys are ignored.
        carry: the state before the first row, leaves ``[B, ...]``; empty means zeros.
        burn_in: rows that warm up the state; they get no gradient.

    Returns:
        ``[..., T - burn_in, B, F]``.
    """
    rows = {"obs": rows["obs"], "is_first": rows["is_first"]}
    if burn_in:
        warm = tree.take(rows, slice(burn_in))
        rows = tree.take(rows, slice(burn_in, None))
        with torch.no_grad():
            _, carry = torso(warm["obs"], carry, warm["is_first"])
    features, _ = torso(rows["obs"], carry, rows["is_first"])
    return features
