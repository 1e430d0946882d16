"""The learner: the only backward and the only collectives of the project.

Nothing is wrapped in DDP. ``minimize`` sums per-row terms over valid rows, runs the backward, and
adds up gradients, valid counts and metrics over ranks in ONE flat all-reduce; dividing by the
global count afterwards makes one rank equal two equal four microbatches, to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
import torch._dynamo
from lightning.fabric import Fabric
from torch import Tensor, distributed
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Exploration, Losses, Optim, Trainable
from rlplug.context import RunContext
from rlplug.trainer.gradient_step import Step, find_nonfinite
from rlplug.trainer.normalize import Normalizer
from rlplug.trainer.optimizer import OptimizerState
from rlplug.trainer.scaling import LossScale
from rlplug.types import Batch, Progress, RunError, Tree, Weights

Reduction = Literal["mean", "std", "sum", "max", "min"]
Graph: TypeAlias = Callable[[Batch], tuple[Losses, Sequence[Tensor | None]]]

T = TypeVar("T")

MOST_UNREAD = 1000  # gradient steps, where nobody asks whether they were finite


class FabricLearner:
    """``api.Learner`` on Fabric.

    Args:
        preprocess: what is done to every sample before it is learnt from.
        on_nan: what becomes of a gradient step with a term or gradient that is NaN or infinite. ``stop``: nothing is
            read back at once, and ``check_finite`` raises. ``skip``: it is not made; its numbers are read back at
            every step, for which an accelerator has to wait.
        replicated: every rank's buffer holds all data, not its own environments'.
        scaled: losses are scaled before they are differentiated, as ``16-mixed`` needs it. Steps whose gradients
            overflow are left out, and numbers are read back at every step.
    """

    def __init__(
        self,
        fabric: Fabric,
        ctx: RunContext,
        algorithm: Algorithm,
        buffer: Buffer,
        exploration: Mapping[str, Exploration] | None = None,
        progress: Progress | None = None,
        microbatches: int = 1,
        compile: bool = False,
        on_nan: Literal["stop", "skip"] = "stop",
        preprocess: Normalizer | None = None,
        replicated: bool = False,
        scaled: bool = False,
    ) -> None:
        self.fabric, self.ctx, self.algorithm, self.buffer = fabric, ctx, algorithm, buffer
        self.exploration, self.progress = dict(exploration or {}), progress or Progress()
        self.normalizer, self.replicated = preprocess, replicated
        self.same = replicated and not buffer.off_policy  # a rollout is given whole, to every rank
        self.microbatches = microbatches
        self.whole = fabric.world_size == 1 and microbatches == 1
        self.compile = compile and self.whole
        self.on_nan = on_nan
        self.scale = LossScale(ctx.device) if scaled else None
        self.skipped = 0
        """gradient steps that were skipped; set back by whoever reports it"""
        self._gathered = False
        self._unread: list[Step] = []
        self._parts: dict[int, dict[str, OptimizerState]] = {}
        self._graphs: dict[tuple[int, Sequence[str]], Graph] = {}

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | None = None) -> Losses:
        """Sample, add intrinsic rewards, prepare, update, train the exploration, feed back.

        Raises:
            RunError: see ``check_finite``.
        """
        try:
            return self._update(batch)
        except Exception:
            self.check_finite()  # after a step that went wrong, a later one may fail in a way of its own
            raise

    def _update(self, batch: Batch | None) -> Losses:
        batch = self.sample() if batch is None else self._received(batch)
        with torch.no_grad():
            prepared = self.algorithm.prepare(batch)
        losses = self.algorithm.update(prepared, self)
        losses.metrics.update(self._bonuses)
        for name, extra in self.exploration.items():
            if self.parts(extra) or type(extra).update is not Trainable.update:
                mine = extra.update(batch, self)
                losses.metrics.update({f"{name}/{key}": value for key, value in (mine.terms | mine.metrics).items()})
        if losses.feedback:
            index, values = batch["index"], losses.feedback
            if self.replicated:  # every rank's buffer hears of every rank's rows
                index, values = self.gather(index), tree.map(self._gather_columns, values)
            self.buffer.feedback(index, values)
        self.progress.updates += 1
        return losses

    def sample(self) -> Batch:
        return self._received(self.buffer.sample())

    def _received(self, batch: Batch) -> Batch:
        """Rows as they are learnt from: here, preprocessed, weighted, with intrinsic rewards."""
        if self.ctx.device.type != "cpu":
            batch = tree.map(lambda x: x.to(self.ctx.device, non_blocking=True), batch)
        if self.normalizer is not None:
            batch = self.normalizer.normalized(batch)
        if "weight" in batch:  # Schaul et al. 2016 (arXiv:1511.05952), section 3.4
            batch["weight"] = batch["weight"] / self.reduce(batch["weight"], "max")
        self._bonuses: dict[str, Tensor] = {}
        bonuses = {
            name: bonus for name, x in self.exploration.items() if (bonus := x.intrinsic_reward(batch)) is not None
        }
        for name, bonus in bonuses.items():
            batch["reward_int"] = batch["reward_int"] + bonus if "reward_int" in batch else bonus
            self._bonuses[f"{name}/reward"] = self.reduce(bonus[:-1], "mean", batch["valid"][:-1])
        if bonuses:
            batch["reward"] = batch["reward"] + batch["reward_int"]
        return batch

    # ---- gradients ------------------------------------------------------------------------------------------------

    def parts(self, who: Trainable) -> dict[str, OptimizerState]:
        """The optimizers of ``who``, set up once."""
        parts = self._parts.get(id(who))
        if parts is None:
            parts = self._parts[id(who)] = {name: self._part(optim) for name, optim in who.optimizers().items()}
        return parts

    def _part(self, optim: Optim) -> OptimizerState:
        params = [p for group in optim.optimizer.param_groups for p in group["params"]]
        part = OptimizerState(optim, self.fabric.setup_optimizers(optim.optimizer), params)
        part.follow_schedule()
        return part

    def minimize(self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None) -> Losses:
        mine = self.parts(who)
        due = tuple(name for name in (mine if parts is None else parts) if mine[name].due())
        if not due:
            return Losses({})
        losses = self._backward(batch, who, due)
        if not self._step(who, due, losses.terms):
            return Losses(losses.terms, losses.metrics)  # priorities of such a step are no priorities
        who.after_step(due, losses, self)
        return losses

    def gradients(self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None) -> Weights:
        due = tuple(self.parts(who) if parts is None else parts)
        self._backward(batch, who, due)
        return {name: p.grad.clone() for name, p in who.named_parameters() if p.grad is not None}

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        for name, p in who.named_parameters():
            p.grad = grads.get(name)
        self._step(who, tuple(self.parts(who) if parts is None else parts), {})

    def _step(self, who: Trainable, due: Sequence[str], terms: Mapping[str, Tensor]) -> bool:
        """Clip and step, unless the step is to be left out: False."""
        mine = self.parts(who)
        norms = {name: mine[name].clip() for name in due}
        made = Step(self.progress.updates + 1, self.progress.env_steps, who, dict(terms), norms)
        if self.scale is not None and not self.scale.fits(made):
            return False
        if self.on_nan == "stop":
            self._unread.append(made)
            if len(self._unread) >= MOST_UNREAD:
                self.check_finite()
        elif find_nonfinite([made]) is not None:
            self.skipped += 1
            return False
        for name in due:
            mine[name].optimizer.step()
        return True

    def check_finite(self) -> None:
        """Read whether the gradient steps since the last call were made of finite numbers, and forget them.

        Raises:
            RunError: names the first term or gradient that was not, and when. Raised again by every later call:
                these weights are lost.
        """
        if (message := find_nonfinite(self._unread)) is not None:
            raise RunError(message)
        self._unread.clear()

    def _backward(self, batch: Batch, who: Trainable, due: Sequence[str]) -> Losses:
        """Global mean gradients of the due parts, left in ``.grad``; losses as global means."""
        mine = self.parts(who)
        for part in mine.values():
            for p in part.params:
                p.grad = None
        params = [p for name in due for p in mine[name].params]
        losses = (self._compiled if self.compile else self._eager)(batch, who, due, params)
        if self.scale is not None:
            self.scale.unscale_([p.grad for part in mine.values() for p in part.params if p.grad is not None])
        return losses

    def _eager(self, batch: Batch, who: Trainable, due: Sequence[str], params: Sequence[Tensor]) -> Losses:
        if self.whole:
            losses, _, total = self._forward(batch, who, due)
            self.fabric.backward(total)
            return losses

        sums: Losses | None = None
        count: Tensor = torch.zeros((), device=self.ctx.device)
        for micro in _microbatches(batch, self.microbatches):
            losses, n, total = self._forward(micro, who, due)
            self.fabric.backward(total)
            sums, count = losses if sums is None else _add(sums, losses, _column_axis(batch)), count + n
        assert sums is not None
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        numbers = [count, *sums.terms.values(), *sums.metrics.values()]
        flat = torch.cat([torch.stack(numbers), *(p.grad.reshape(-1) for p in params if p.grad is not None)])
        flat = self._all_reduce(flat, "sum")
        flat /= flat[0].clamp(min=1.0)
        values = iter(flat[1 : len(numbers)].clone().unbind())  # they are kept, and not the gradients with them
        offset = len(numbers)
        for p in params:
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        return Losses({k: next(values) for k in sums.terms}, {k: next(values) for k in sums.metrics}, sums.feedback)

    def _compiled(self, batch: Batch, who: Trainable, due: Sequence[str], params: Sequence[Tensor]) -> Losses:
        """Forward and backward as one graph; where that cannot be compiled, eagerly from then on, and said so."""
        graph = self._graphs.get((id(who), due))
        if graph is None:

            def forward_and_backward(batch: Batch) -> tuple[Losses, Sequence[Tensor | None]]:
                losses, _, total = self._forward(batch, who, due)
                return losses, torch.autograd.grad(total, params, allow_unused=True)

            graph = self._graphs[id(who), due] = torch.compile(forward_and_backward, fullgraph=True, dynamic=False)
        try:
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                losses, gradients = graph(batch)
        except (TorchDynamoException, InductorError) as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"compile: {type(who).__name__} could not be compiled and runs eagerly: {reason}", stacklevel=2
            )
            self.compile = False
            return self._eager(batch, who, due, params)
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        return losses

    def _forward(self, batch: Batch, who: Trainable, due: Sequence[str]) -> tuple[Losses, Tensor | float, Tensor]:
        """Losses (detached), the count of valid rows, and the number to call backward on.

        On one rank without microbatches everything is a mean; otherwise a sum over valid rows,
        0-d values counting once a row, to be divided by the global count.
        """
        with self.fabric.autocast():
            losses = who.forward(batch, due)
        mask: Tensor | None = batch.get("valid")
        rows = next((x for x in (*losses.terms.values(), *losses.metrics.values()) if x.ndim), None)
        count: Tensor | float = float(rows.numel()) if rows is not None else 1.0
        weight = None
        if mask is not None:
            weight, count = mask.float(), mask.sum().float()
            if self.whole:
                weight = weight / count.clamp(min=1.0)

        def collapse(x: Tensor) -> Tensor:
            if x.ndim == 0:
                return x if self.whole else x * count
            if weight is None:
                if rows is None or x.shape != rows.shape:
                    raise ValueError(f"{type(who).__name__}: a term of shape {[*x.shape]} beside another's rows")
                return x.mean() if self.whole else x.sum()
            w = weight if x.shape == weight.shape else weight[: len(x)]
            if x.shape != w.shape:
                raise ValueError(f"{type(who).__name__}: a term of shape {[*x.shape]} for valid rows {[*weight.shape]}")
            return torch.where(w > 0, x, 0.0).mul(w).sum()

        terms = {name: collapse(term) for name, term in losses.terms.items()}
        metrics = {name: collapse(value.detach()) for name, value in losses.metrics.items()}
        total = torch.stack(list(terms.values())).sum()
        if self.scale is not None:
            total = total * self.scale.value
        return Losses({k: v.detach() for k, v in terms.items()}, metrics, losses.feedback), count, total

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, Trainable]]:
        """Everything that may have optimizers, by its place: ``algorithm``, ``exploration.0.predictor``."""
        roots = [("algorithm", self.algorithm), *((f"exploration.{name}", x) for name, x in self.exploration.items())]
        for prefix, root in roots:
            for name, module in root.named_modules(prefix=prefix):
                if isinstance(module, Trainable):
                    yield name, module

    def state(self) -> Tree:
        """Optimizers and how often they were called; those that were never used have none. The scale of losses."""
        state: Tree = {
            name: {key: part.state() for key, part in self._parts[id(who)].items()}
            for name, who in self._named()
            if id(who) in self._parts
        }
        return state if self.scale is None else state | {"loss_scale": self.scale.state()}

    def load(self, state: Tree) -> None:
        for name, who in self._named():
            for key, saved in state.get(name, {}).items():
                self.parts(who)[key].load(saved)
        if self.scale is not None and "loss_scale" in state:
            self.scale.load(state["loss_scale"])

    # ---- batches and statistics -----------------------------------------------------------------------------------

    def minibatches(self, batch: Batch, size: int, unit: Literal["row", "column"]) -> Iterator[Batch]:
        mine = batch["valid"].any(0) if unit == "column" else batch["valid"][:-1].T.flatten()
        mine = mine.nonzero().squeeze(1)  # row: column-major, so that the order does not depend on the ranks
        rank, world = self.fabric.global_rank, self.fabric.world_size
        counts = [len(mine)] if self.same else self._gather_counts(len(mine))
        total, offset = sum(counts), 0 if self.same else sum(counts[:rank])
        order = torch.randperm(total, generator=self.ctx.generators["learner"], device=self.ctx.device)
        cuts = torch.linspace(0, total, min(total, max(1, round(total / size))) + 1).round().long().tolist()
        if world > 1:
            ours = (order >= offset) & (order < offset + len(mine))
            if self.same:
                ours[torch.arange(total, device=ours.device) % world != rank] = False
            below = torch.cat([ours.new_zeros(1, dtype=torch.long), ours.cumsum(0)])
            cuts = below[torch.as_tensor(cuts, device=below.device)].tolist()
            order = order[ours] - offset
        mine = mine[order]
        if unit == "column":
            for low, high in pairwise(cuts):
                yield _pick(batch, 1, mine[low:high])
            return
        length, columns = batch["valid"].shape
        places = mine % (length - 1) * columns + mine // (length - 1)
        rows = tree.map(lambda x: x.flatten(0, 1)[places], {k: v for k, v in batch.items() if k != "valid"})
        for low, high in pairwise(cuts):
            yield _pick(rows, 0, slice(low, high))

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        x = (x if where is None else x[where]).detach().reshape(-1)
        if self.fabric.world_size == 1:
            if op == "std":
                return x.std(correction=0)
            return {"mean": x.mean, "sum": x.sum, "max": x.amax, "min": x.amin}[op]()
        if op in ("max", "min"):
            own = (
                {"max": x.amax, "min": x.amin}[op]()
                if len(x)
                else x.new_tensor(-torch.inf if op == "max" else torch.inf)
            )
            return self._all_reduce(own, op)
        sums = self._all_reduce(torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()]).double(), "sum")
        if op == "sum":
            return sums[1].to(x.dtype)
        mean = sums[1] / sums[0]
        return (mean if op == "mean" else (sums[2] / sums[0] - mean.square()).clamp(min=0).sqrt()).to(x.dtype)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """What is gathered meanwhile is of segments, which every rank may have already."""
        self._gathered = self.replicated
        try:
            yield
        finally:
            self._gathered = False

    def gather(self, x: Tensor) -> Tensor:
        if self.fabric.world_size == 1 or self._gathered:
            return x
        counts = self._gather_counts(len(x))
        padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])
        gathered = cast(Tensor, self.fabric.all_gather(padded))
        return torch.cat([y[:n] for y, n in zip(gathered, counts, strict=True)])

    def _gather_columns(self, x: Tensor) -> Tensor:
        """``[B]`` or ``[T, B, ...]`` of all ranks side by side."""
        return self.gather(x) if x.ndim == 1 else self.gather(x.transpose(0, 1)).transpose(0, 1)

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Sums over ranks."""
        return (
            self._all_reduce(torch.tensor(numbers, dtype=torch.float64, device=self.ctx.device), "sum").int().tolist()
        )

    def broadcast(self, x: T) -> T:
        """The first rank's ``x``, which can be pickled, on every rank."""
        return x if self.fabric.world_size == 1 else self.fabric.broadcast(x)

    def _gather_counts(self, n: int) -> list[int]:
        if self.fabric.world_size == 1:
            return [n]
        return cast(Tensor, self.fabric.all_gather(torch.tensor(n, device=self.ctx.device))).tolist()

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        """In place, and without the barrier that Fabric's puts before it."""
        if self.fabric.world_size > 1:
            distributed.all_reduce(x, getattr(distributed.ReduceOp, op.upper()))
        return x


def _column_axis(batch: Batch) -> int:
    """1 for a segment ``[T+1, B]``, where leaves ``[B]`` belong to columns too; 0 for flat rows."""
    return 0 if "valid" not in batch or batch["valid"].ndim == 1 else 1


def _pick(batch: Batch, axis: int, where: Any) -> Batch:
    """The rows or columns ``where`` of every leaf."""
    return tree.map(lambda x: x[:, where] if axis and x.ndim > 1 else x[where], batch)


def _add(a: Losses, b: Losses, axis: int) -> Losses:
    return Losses(
        {k: a.terms[k] + v for k, v in b.terms.items()},
        {k: a.metrics[k] + v for k, v in b.metrics.items()},
        tree.map(lambda y, x: torch.cat([x, y], min(axis, y.ndim - 1)), b.feedback, a.feedback),
    )


def _microbatches(batch: Batch, n: int) -> Iterator[Batch]:
    """Cut a batch into ``n`` parts: flat batches by rows, segments by columns."""
    axis = _column_axis(batch)
    size = next(x.shape[axis] for x in tree.leaves(batch) if x.ndim > axis)
    for i in range(n):
        yield _pick(batch, axis, slice(i * size // n, (i + 1) * size // n))
