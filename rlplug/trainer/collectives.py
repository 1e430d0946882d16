"""Exchanges between ranks: the only collectives of the project. One rank alone gets back what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed

from rlplug.api import Reduction
from rlplug.distributed.fabric import AnyFabric

T = TypeVar("T")


class Collectives:
    """Collectives over the ranks of ``fabric``. Every rank has to make the same calls in the same order."""

    def __init__(self, fabric: AnyFabric) -> None:
        self.fabric, self.rank, self.world_size = fabric, fabric.global_rank, fabric.world_size

    def broadcast(self, x: T) -> T:
        """Return the first rank's ``x``, which can be pickled, on every rank."""
        return x if self.world_size == 1 else self.fabric.broadcast(x)

    def exchange(self, x: T) -> list[T]:
        """Return what every rank gave, in the order of ranks; ``x`` can be pickled."""
        if self.world_size == 1:
            return [x]
        given: list[Any] = [None] * self.world_size
        distributed.all_gather_object(given, x)
        return given

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks."""
        if self.world_size == 1:
            return [*numbers]
        every = torch.tensor(numbers, dtype=torch.float64, device=self.fabric.device)
        return self.all_reduce(every, "sum").int().tolist()

    def counts(self, n: int) -> list[int]:
        """Return the ``n`` of every rank."""
        return self.sums([n if rank == self.rank else 0 for rank in range(self.world_size)])

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x [n, ...]`` of all ranks one behind another; ``n`` may differ between them."""
        if self.world_size == 1:
            return x
        counts = self.counts(len(x))
        padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])
        gathered = cast(Tensor, self.fabric.all_gather(padded))
        return torch.cat([y[:n] for y, n in zip(gathered, counts, strict=True)])

    def gather_columns(self, x: Tensor) -> Tensor:
        """Return ``[B]`` or ``[T, B, ...]`` of all ranks side by side."""
        return self.gather(x) if x.ndim == 1 else self.gather(x.transpose(0, 1)).transpose(0, 1)

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        """Reduce all elements of ``x [...]`` of all ranks to one number, 0-d; see ``api.Learner.reduce``."""
        x = x.detach()
        if where is not None and not x.is_cpu:  # the host does not wait for how many there are
            return self._masked(x, op, where)
        x = (x if where is None else x[where]).reshape(-1)
        own = {"mean": x.mean, "sum": x.sum, "max": x.amax, "min": x.amin, "std": partial(x.std, correction=0)}[op]
        if self.world_size == 1:
            return own() if len(x) or op in ("max", "min") else x.new_zeros(())
        if op in ("max", "min"):
            return self.all_reduce(own() if len(x) else x.new_tensor(-torch.inf if op == "max" else torch.inf), op)
        sums = torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()]).double()
        count, total, squares = self.all_reduce(sums, "sum")
        count = count.clamp(min=1)
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return {"sum": total, "mean": mean, "std": std}[op].to(x.dtype)

    def _masked(self, x: Tensor, op: Reduction, where: Tensor) -> Tensor:
        where = where.view(*where.shape, *(1 for _ in x.shape[where.ndim :])).expand_as(x)
        if op in ("max", "min"):
            own = x.masked_fill(~where, -torch.inf if op == "max" else torch.inf)
            return self.all_reduce(own.amax() if op == "max" else own.amin(), op)
        kept = torch.where(where, x, 0.0).double()
        count, total = self.all_reduce(torch.stack([where.sum(dtype=torch.double), kept.sum()]), "sum")
        if op == "sum":
            return total.to(x.dtype)
        mean = total / count.clamp(min=1.0)
        if op == "mean":
            return mean.to(x.dtype)
        squares = torch.where(where, kept - mean, 0.0).square().sum()
        return (self.all_reduce(squares, "sum") / count.clamp(min=1.0)).sqrt().to(x.dtype)

    def all_reduce(self, x: Tensor, op: Literal["sum", "max", "min"]) -> Tensor:
        """Reduce every element of ``x [...]`` over ranks, in place, without the barrier that Fabric's puts first."""
        if self.world_size > 1:
            distributed.all_reduce(x, getattr(distributed.ReduceOp, op.upper()))
        return x
