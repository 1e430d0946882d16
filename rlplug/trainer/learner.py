"""The learner: preprocessing of samples, updates, and random draws and reductions over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Exploration, Losses, Reduction, Segment, Trainable
from rlplug.compiler.compiler import Compiler
from rlplug.context import RunContext
from rlplug.contract import results
from rlplug.distributed.collectives import Collectives
from rlplug.distributed.fabric import AnyFabric
from rlplug.functional.curiosity import rewarded
from rlplug.functional.minibatches import minibatches
from rlplug.host import on_device
from rlplug.trainer.normalize import Normalizer
from rlplug.trainer.optimizer import OptimizerState
from rlplug.trainer.placement import Placement
from rlplug.trainer.steps import MOST_UNREAD, GradientSteps, WholeUpdate
from rlplug.types import Batch, Progress, Tree, Weights


class RankLearner:
    """``api.Learner`` of one rank.

    Args:
        placement: placement of the run's data; None: every rank's buffer holds the data of its own environments.
        watching: further modules that observe rows.
        options: arguments of ``GradientSteps``.
    """

    def __init__(
        self,
        *,
        fabric: AnyFabric,
        ctx: RunContext,
        algorithm: Algorithm,
        buffer: Buffer,
        exploration: Mapping[str, Exploration] | None = None,
        progress: Progress | None = None,
        normalizer: Normalizer | None = None,
        placement: Placement | None = None,
        watching: Sequence[Trainable] = (),
        **options: Any,
    ) -> None:
        self.fabric, self.ctx, self.algorithm, self.buffer = fabric, ctx, algorithm, buffer
        self.placement = placement or Placement(Collectives(fabric))
        self.exploration, self.progress, self.normalizer = dict(exploration or {}), progress or Progress(), normalizer
        self.steps = GradientSteps(ctx, self.placement.ranks, self.progress, **options)
        self._whole_update = WholeUpdate(self._learned, self.steps)
        self._checked = False  # whether the first update has been checked
        self._observing, self._watching = False, (*self.exploration.values(), *watching)
        drawn = ctx.needs.data == "windows" or (ctx.needs.data == "episodes" and ctx.needs.off_policy)
        self._replicated = self.placement.parts == 1 and not drawn  # whether every rank has all rows of a sample
        self._same = self._replicated  # the same for batches that a loop passes; see ``hold``
        observing = [type(x).observe is not Trainable.observe for x in (algorithm, *self._watching)]
        self.observers = (normalizer and normalizer.counts) or any(observing)  # whether a module observes rows

    def _first_update(self, batch: Batch | None) -> Losses:
        """Make the first update, and check the results of algorithm, exploration modules and buffer."""
        self._checked, compiler = True, self.steps.compiler
        if compiler.graphs:  # checks read tensors on the host
            self.steps.use(Compiler(self.ctx.device))
        results.check_given(batch, self.exploration)
        compiled = bool(self.steps.compiler.wanted)
        with results.learning(self.algorithm, self.exploration, self.buffer, self.ctx.needs, compiled):
            losses = self.update(batch)
        self.steps.use(compiler)
        return losses

    def update(self, batch: Batch | None = None) -> Losses:
        """Sample, add intrinsic rewards, prepare, update algorithm and exploration modules, and feed back.

        Raises:
            RunError: see ``check_finite``.
        """
        if not self._checked:
            return self._first_update(batch)
        recorded = self.steps.compiler.graphs and self.steps.moves and self.ctx.needs.data == "windows"
        self.ctx.shard.replicated = self._replicated if batch is None else self._same
        try:
            batch = self.buffer.sample() if batch is None else batch
            losses = self._whole_update(batch) if recorded else self._learned(batch)
            if losses.feedback:
                given: list[Any] = [batch.get("index"), losses.feedback]
                if given[0] is not None:
                    given = [self.placement.merge(x) for x in given]
                self.buffer.feedback(*given)
        except Exception:
            self.check_finite()  # an earlier NaN may make a later step fail with another error
            raise
        finally:
            self.ctx.shard.replicated = self._same
        if len(self.steps.unread) >= MOST_UNREAD:
            self.check_finite()
        self.progress.updates += 1
        return losses

    def _learned(self, batch: Batch) -> Losses:
        """Learn from a sample; see ``update``."""
        batch, bonuses = self._received(batch)
        with torch.no_grad():
            prepared = self._prepare(batch)
        losses = self.algorithm.update(prepared, self)
        losses.metrics.update(bonuses)
        for name, extra in self.exploration.items():
            if self.parts(extra) or type(extra).update is not Trainable.update:
                own = extra.update(batch, self)
                losses.metrics.update({f"{name}/{key}": value for key, value in (own.terms | own.metrics).items()})
        return losses

    def _prepare(self, batch: Batch) -> Batch:
        """Prepare a batch, compiled if shapes are constant and no recurrent model is unrolled."""
        needs, prepare = self.ctx.needs, self.algorithm.prepare
        same = needs.data == "windows" or (needs.data == "rollout" and not needs.window.stride)
        return self.steps.compiler.call(prepare, batch) if same else prepare(batch)

    def sample(self) -> tuple[Batch, dict[str, Tensor]]:
        return self._received(self.buffer.sample())

    def _received(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """Move rows to the device, normalize them, scale weights, and add intrinsic rewards; return mean bonuses."""
        if self.ctx.device.type != "cpu":
            batch = on_device(batch, self.ctx.device)
        if self.normalizer is not None:
            batch = self.normalizer.normalized(batch)
        if "weight" in batch:  # Schaul et al. 2016 (arXiv:1511.05952), section 3.4
            batch["weight"] = batch["weight"] / self.reduce(batch["weight"], "max")
        given = {name: b for name, x in self.exploration.items() if (b := x.intrinsic_reward(batch)) is not None}
        bonuses = dict[str, Tensor]()
        for name, bonus in given.items():
            rows = torch.cat([x[:-1].reshape(*batch["valid"][:-1].shape, -1) for x in tree.leaves(bonus)], -1)
            bonuses[f"{name}/reward"] = self.reduce(rows, "mean", batch["valid"][:-1])
            batch = rewarded(batch, bonus)
        return batch, bonuses

    # ---- gradient steps -------------------------------------------------------------------------------------------

    def parts(self, who: Trainable) -> dict[str, OptimizerState]:
        """Return the optimizers of ``who`` by part, created at the first call."""
        return self.steps.parts(who)

    def minimize(
        self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None, *, diagnostics: bool = True
    ) -> Losses:
        own = self.parts(who)
        due = tuple(name for name in (own if parts is None else parts) if own[name].due())
        if not due:
            return Losses({})
        losses, norms = self.steps.compute(batch, who, due, True, diagnostics)
        if not self.steps.take(who, due, losses.terms, norms):
            return Losses(losses.terms, losses.metrics)  # priorities of a skipped step may be NaN
        who.after_step(due, losses, self)
        return losses

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        for name, p in who.named_parameters():
            p.grad = grads.get(name)
        self.steps.take(who, tuple(self.parts(who) if parts is None else parts), {}, {})

    def check_finite(self, wait: bool = True) -> None:
        """See ``GradientSteps.check_finite``."""
        self.steps.check_finite(wait)

    # ---- ranks ----------------------------------------------------------------------------------------------------

    def minibatches(self, batch: Batch, size: int, unit: Literal["row", "column"]) -> Iterator[Batch]:
        ranks, generator = self.placement.ranks, self.ctx.generators["learner"]
        counts = None if self.ctx.shard.replicated else ranks.counts
        return minibatches(batch, size, unit, generator, ranks.rank, ranks.world_size, counts)

    def hold(self, same: bool) -> None:
        """Set whether later batches of the loop are the same on every rank (True) or parts of the whole (False)."""
        self._same = self.ctx.shard.replicated = same

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        return self.placement.ranks.reduce(x, op, where)

    def gather(self, x: Tensor) -> Tensor:
        return x if self._observing else self.placement.ranks.gather(x)

    def observe(self, segment: Segment) -> None:
        """Update all running statistics with a collected segment, or with episodes that every rank has."""
        if not self.observers:
            return
        self._observing = self.placement.parts == 1 or segment.whole  # every rank has it: no gather
        self.algorithm.observe(segment, self)
        if self.normalizer is not None:
            self.normalizer.observe(segment, self)
            segment = replace(segment, batch=self.normalizer.normalized(segment.batch))
        for extra in self._watching:
            extra.observe(segment, self)
        self._observing = False

    def state(self) -> Tree:
        return self.steps.state(self._trainables())

    def load(self, state: Tree) -> None:
        self.steps.load(state, self._trainables())

    def _trainables(self) -> list[tuple[str, Trainable]]:
        """Return all modules that may have optimizers, by path: ``algorithm``, ``exploration.icm.predictor``."""
        roots = {"algorithm": self.algorithm} | {f"exploration.{name}": x for name, x in self.exploration.items()}
        named = (pair for prefix, root in roots.items() for pair in root.named_modules(prefix=prefix))
        return [(name, module) for name, module in named if isinstance(module, Trainable)]
