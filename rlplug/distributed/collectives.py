"""Collectives, the only ones of the project."""

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
    """Collectives over the ranks of ``fabric``; with one rank they return their argument.

    Every rank must make the same calls in the same order.
    """

    def __init__(self, fabric: AnyFabric) -> None:
        self.fabric, self.rank, self.world_size = fabric, fabric.global_rank, fabric.world_size

    def broadcast(self, x: T) -> T:
        """Return the ``x`` of rank 0 on every rank; it must be picklable."""
        return x if self.world_size == 1 else self.fabric.broadcast(x)

    def exchange(self, x: T) -> list[T]:
        """Return the ``x`` of all ranks, in rank order; it must be picklable."""
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
        """Concatenate ``x [n, ...]`` of all ranks, in rank order; ``n`` may differ."""
        if self.world_size == 1:
            return x
        counts = self.counts(len(x))
        padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])
        gathered = cast(Tensor, self.fabric.all_gather(padded))
        return torch.cat([y[:n] for y, n in zip(gathered, counts, strict=True)])

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        """Reduce all elements of ``x [...]`` over all ranks to a 0-d tensor; see ``api.Learner.reduce``."""
        x = x.detach()
        if self.world_size == 1 and (where is None or x.is_cpu):
            x = (x if where is None else x[where]).reshape(-1)
            own = {"mean": x.mean, "sum": x.sum, "max": x.amax, "min": x.amin, "std": partial(x.std, correction=0)}[op]
            return own() if len(x) or op in ("max", "min") else x.new_zeros(())
        where = torch.ones_like(x, dtype=torch.bool) if where is None else where  # a count would synchronize
        where = where.reshape((*where.shape, *(1 for _ in x.shape[where.ndim :]))).expand_as(x)
        if op in ("max", "min"):
            worst = torch.full((1,), -torch.inf if op == "max" else torch.inf, dtype=x.dtype, device=x.device)
            every = torch.cat([torch.where(where, x, worst).flatten(), worst])
            return self.all_reduce(every.amax() if op == "max" else every.amin(), op)
        kept = torch.where(where, x, 0.0).double()
        count, total = self.all_reduce(torch.stack([where.sum(dtype=torch.double), kept.sum()]), "sum")
        mean = total / count.clamp(min=1.0)
        if op != "std":
            return (total if op == "sum" else mean).to(x.dtype)
        squares = torch.where(where, kept - mean, 0.0).square().sum()
        return (self.all_reduce(squares, "sum") / count.clamp(min=1.0)).sqrt().to(x.dtype)

    def all_reduce(self, x: Tensor, op: Literal["sum", "max", "min"]) -> Tensor:
        """Reduce every element of ``x [...]`` over ranks, in place, without the barrier of Fabric's version."""
        if self.world_size > 1:
            distributed.all_reduce(x, getattr(distributed.ReduceOp, op.upper()))
        return x
