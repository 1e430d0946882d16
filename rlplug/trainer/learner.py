"""The learner: the only backward of the project.

Nothing is wrapped in DDP. ``minimize`` sums per-row terms over valid rows, runs the backward, and adds up gradients,
valid counts and metrics over ranks in ONE flat all-reduce; dividing by the global count afterwards makes one rank equal
two equal four microbatches, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Exploration, Losses, Reduction, Segment, Trainable
from rlplug.compiler.compiler import Compiler
from rlplug.context import RunContext
from rlplug.contract import results
from rlplug.distributed.fabric import AnyFabric
from rlplug.functional.curiosity import rewarded
from rlplug.trainer.collectives import Collectives
from rlplug.trainer.gradients import take_over
from rlplug.trainer.graphs import CompiledSteps, WholeUpdate
from rlplug.trainer.minibatches import NO_LOSS, Total, all_reduced, column_axis, microbatches, minibatches, total_loss
from rlplug.trainer.normalize import Normalizer
from rlplug.trainer.optimizer import GradientStep, LossScale, OptimizerState, backward, find_nonfinite
from rlplug.types import Batch, Compile, Progress, RunError, Tree, Weights

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
MOST_UNREAD = 1000  # gradient steps, after which their numbers are read if nobody asked whether they were finite


class RankLearner:
    """``api.Learner`` of one rank.

    Args:
        on_nan: what happens to a gradient step with a term or gradient that is NaN or infinite. ``stop``: its numbers
            are read later, and ``check_finite`` raises. ``skip``: it is left out; numbers are read at every step, for
            which an accelerator has to wait.
        precision: of forward and backward, as Fabric names it.
        replicated: every rank's buffer holds all data, not only its own environments'.
        scale_losses: scale losses, as ``16-mixed`` needs it; steps that overflow are left out, and numbers are read.
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
        microbatches: int = 1,
        compile: Compile = "off",
        on_nan: Literal["stop", "skip"] = "stop",
        precision: str = "32-true",
        replicated: bool = False,
        scale_losses: bool = False,
    ) -> None:
        self.fabric, self.ctx, self.algorithm, self.buffer = fabric, ctx, algorithm, buffer
        self.collectives = Collectives(fabric)
        self.exploration, self.progress = dict(exploration or {}), progress or Progress()
        self.normalizer, self.replicated, self.on_nan = normalizer, replicated, on_nan
        self.microbatches, self.whole = microbatches, fabric.world_size == 1 and microbatches == 1
        self.dtype, self.scale = DTYPES.get(precision), LossScale(ctx.device) if scale_losses else None
        self._moves = self.whole and on_nan == "stop" and self.scale is None
        """whether a step is taken whatever its numbers are, and all gradients are here"""
        self.skipped = 0  # gradient steps since ``drain``
        self._observing, self._same = False, None  # the second: whether every rank has what a loop gives; see ``hold``
        observing = [type(x).observe is not Trainable.observe for x in (algorithm, *self.exploration.values())]
        self._observers = (normalizer and normalizer.counts) or any(observing)
        self._unread: list[GradientStep] = []
        self._parts: dict[Trainable, dict[str, OptimizerState]] = {}
        roughly = 1e-3 if self.dtype is None else 3e-2
        self.use(Compiler(ctx.device, compile == "max", ctx.generators.values(), roughly) if compile != "off" else None)
        self.update = self._first_update  # type: ignore[method-assign]

    def use(self, compiler: Compiler | None) -> None:
        """Compile by ``compiler``; None: run eagerly."""
        self.compiler = compiler
        varies, self._learn = self.ctx.needs.data != "windows", self._learned
        self._steps = None if compiler is None else CompiledSteps(compiler, self._forward, varies)
        if compiler and self.records and self._moves and self.ctx.needs.data == "windows":
            self._learn = WholeUpdate(compiler, self._learned, self._unread, self._optimizers, self.progress)
            self._steps = None

    @property
    def compile(self) -> bool:
        """Whether gradient steps are compiled."""
        return self.compiler is not None and self.compiler.active

    @property
    def records(self) -> bool:
        """Whether compiled functions are recordings of a device."""
        return self.compiler is not None and self.compiler.recorder is not None

    def _first_update(self, batch: Batch | None = None) -> Losses:
        """Make the first update, and check what the algorithm, the exploration and the buffer return."""
        del self.update  # type: ignore[method-assign]
        compiler = self.compiler if self.records else None
        if compiler:  # checks read numbers
            self.use(None)
        compiled = self.compiler is not None and bool(self.compiler.wanted)
        results.check_given(batch, self.exploration)
        with results.learning(self.algorithm, self.exploration, self.buffer, self.ctx.needs, compiled):
            losses = self.update(batch)
        if compiler:
            self.use(compiler)
        return losses

    def update(self, batch: Batch | None = None) -> Losses:
        """Sample, add intrinsic rewards, prepare, update the algorithm and the exploration, feed back.

        Raises:
            RunError: see ``check_finite``.
        """
        needs, same = self.ctx.needs, None if batch is None else self._same
        drawn = needs.data == "windows" or (needs.data == "episodes" and needs.off_policy)
        self.ctx.shard.whole = self.replicated and not drawn if same is None else same  # what is not drawn is whole
        try:
            batch = self.buffer.sample() if batch is None else batch
            losses = self._learn(batch)
            if losses.feedback:
                index, values = batch.get("index"), losses.feedback
                if self.replicated and index is not None:  # every rank's buffer holds every rank's rows
                    index = index.to(self.ctx.device)
                    index, values = (tree.map(self.collectives.gather_columns, x) for x in (index, values))
                self.buffer.feedback(index, values)
        except Exception:
            self.check_finite()  # an earlier step of NaN may make a later one fail in another way
            raise
        finally:
            self.ctx.shard.whole = False
        if len(self._unread) >= MOST_UNREAD:
            self.check_finite()
        self.progress.updates += 1
        return losses

    def _learned(self, batch: Batch) -> Losses:
        """Learn from a sample; see ``update``."""
        batch, bonuses = self._received(batch)
        with torch.no_grad():
            prepared = batch if "gradients" in batch else self._prepare(batch)
        losses = self.algorithm.update(prepared, self)
        losses.metrics.update(bonuses)
        for name, extra in self.exploration.items():
            if self.parts(extra) or type(extra).update is not Trainable.update:
                own = extra.update(batch, self)
                losses.metrics.update({f"{name}/{key}": value for key, value in (own.terms | own.metrics).items()})
        return losses

    def call(self, function: Callable[[Batch], Batch], batch: Batch, of: Hashable = None) -> Batch:
        """Call a method, compiled where gradient steps are; see ``Compiler.call``."""
        return function(batch) if self.compiler is None else self.compiler.call(function, batch, of)

    def _prepare(self, batch: Batch) -> Batch:
        """Prepare a batch, compiled where each has the shape of the one before and needs no unrolling."""
        needs = self.ctx.needs
        same = needs.data == "windows" or (needs.data == "rollout" and not needs.carry_stride)
        same &= not isinstance(self._learn, WholeUpdate)
        return self.call(self.algorithm.prepare, batch) if same else self.algorithm.prepare(batch)

    def sample(self) -> tuple[Batch, dict[str, Tensor]]:
        return self._received(self.buffer.sample())

    def _received(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """Move rows to the device, normalize and weight them, and add intrinsic rewards; return the mean bonuses."""
        if self.ctx.device.type != "cpu":
            batch = tree.map(lambda x: x.to(self.ctx.device, non_blocking=True), batch)
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
        """Return the optimizers of ``who`` by part; they are set up at the first call."""
        if who not in self._parts:
            self._parts[who] = {name: OptimizerState(optim) for name, optim in results.optimizers(who).items()}
        return self._parts[who]

    def minimize(
        self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None, *, diagnostics: bool = True
    ) -> Losses:
        own = self.parts(who)
        due = tuple(name for name in (own if parts is None else parts) if own[name].due())
        if not due:
            return Losses({})
        if "gradients" in batch:
            params = [p for name in due for p in own[name].params]
            losses, norms = take_over(batch, who, params, self.collectives), {}
        else:
            losses, norms = self._forward_backward(batch, who, due, step=True, diagnostics=diagnostics)
        if not self._step(who, due, losses.terms, norms):
            return Losses(losses.terms, losses.metrics)  # priorities of a skipped step are not numbers
        who.after_step(due, losses, self)
        return losses

    def gradients(self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None) -> Weights:
        due = tuple(self.parts(who) if parts is None else parts)
        self._forward_backward(batch, who, due)
        return {name: p.grad.clone() for name, p in who.named_parameters() if p.grad is not None}

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        for name, p in who.named_parameters():
            p.grad = grads.get(name)
        self._step(who, tuple(self.parts(who) if parts is None else parts), {}, {})

    def _forward_backward(
        self, batch: Batch, who: Trainable, due: Sequence[str], step: bool = False, diagnostics: bool = False
    ) -> tuple[Losses, Mapping[str, Sequence[Tensor]]]:
        """Leave global mean gradients of the due parts in ``.grad``; return losses as global means.

        With ``step`` a graph may take the step, too; then the gradients' norms come back, and no gradients.
        """
        own = self.parts(who)
        every = [p for part in own.values() for p in part.params]
        for p in every:
            p.grad = None
        params = [p for name in due for p in own[name].params]
        totals, norms = list[Total](), dict[str, Sequence[Tensor]]()
        # as a graph has, maybe on another rank
        diagnostics |= self.compiler is not None and bool(self.compiler.wanted)
        for micro in (batch,) if self.whole else microbatches(batch, self.microbatches):
            graph = self._steps and self._steps(micro, who, {name: own[name] for name in due}, step and self._moves)
            if graph is None:
                totals.append(self._forward(micro, who, due, diagnostics))
                backward(totals[-1].loss)
                continue
            losses = Losses(graph.terms, graph.metrics, graph.feedback)
            totals.append(Total(losses, graph.count, NO_LOSS))
            norms |= graph.norms
            for p, grad in zip(params, graph.grads, strict=not norms):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad + grad
        losses = totals[0].losses if self.whole else all_reduced(totals, column_axis(batch), params, self.collectives)
        if self.scale is not None and (grads := [p.grad for p in every if p.grad is not None]):
            torch._foreach_div_(grads, self.scale.value)
        return losses, norms

    def _forward(self, batch: Batch, who: Trainable, due: Sequence[str], diagnostics: bool = True) -> Total:
        with nullcontext() if self.dtype is None else torch.autocast(self.ctx.device.type, self.dtype):
            losses = who.forward(batch, due)
            if diagnostics and losses.diagnostics is not None:
                with torch.no_grad():
                    losses.metrics |= losses.diagnostics()
        total = total_loss(losses, batch.get("valid"), batch.get("alive"), who, mean=self.whole)
        return total if self.scale is None else total._replace(loss=total.loss * self.scale.value)

    def _step(
        self, who: Trainable, due: Sequence[str], terms: Mapping[str, Tensor], norms: Mapping[str, Sequence[Tensor]]
    ) -> bool:
        """Clip and step, unless ``norms`` say that a graph did. False: the step was left out, as a number is NaN or
        infinite."""
        own, moved = self.parts(who), bool(norms)
        norms = norms or {name: own[name].clip() for name in due}
        step = GradientStep(self.progress.updates + 1, self.progress.env_steps, who, dict(terms), norms)
        if self.scale is not None and not self.scale.fits(step):
            return False
        if self.on_nan == "stop":
            self._unread.append(step)
            if len(self._unread) >= MOST_UNREAD and not isinstance(self._learn, WholeUpdate):
                self.check_finite()
        elif find_nonfinite([step]) is not None:
            self.skipped += 1
            return False
        for name in () if moved else due:
            own[name].optim.optimizer.step()
        return True

    def check_finite(self, wait: bool = True) -> None:
        """Read whether gradient steps since the last call were made of finite numbers; on a device only if ``wait``.

        Raises:
            RunError: names the first term or gradient that was not, and when. Every later call raises it again:
                these weights are lost.
        """
        if not wait and self.ctx.device.type != "cpu":
            return
        if (message := find_nonfinite(self._unread)) is not None:
            raise RunError(message)
        self._unread.clear()

    def minibatches(self, batch: Batch, size: int, unit: Literal["row", "column"]) -> Iterator[Batch]:
        same = self.ctx.shard.whole
        return minibatches(batch, size, unit, self.ctx.generators["learner"], self.collectives, same)

    def hold(self, same: bool) -> None:
        """Take batches of a loop, from now on, for what every rank has; False: each has a part of the whole."""
        self._same = same

    def reduce(self, x: Tensor, op: Reduction, where: Tensor | None = None) -> Tensor:
        return self.collectives.reduce(x, op, where)

    def gather(self, x: Tensor) -> Tensor:
        return x if self._observing else self.collectives.gather(x)

    def observe(self, segment: Segment) -> None:
        """Let the running statistics of all that learns see a collected segment, or episodes that every rank has."""
        if not self._observers:
            return
        self._observing = self.replicated or segment.whole  # every rank has it, and nothing is to be gathered
        self.algorithm.observe(segment, self)
        if self.normalizer is not None:
            self.normalizer.observe(segment, self)
            segment = replace(segment, batch=self.normalizer.normalized(segment.batch))
        for extra in self.exploration.values():
            extra.observe(segment, self)
        self._observing = False

    def drain(self) -> dict[str, float]:
        """Return what is logged of gradient steps since the last call."""
        row: dict[str, float] = {"skipped": self.skipped} if self.on_nan == "skip" else {}
        if self.scale is not None:
            row["loss_scale"] = self.scale.value.item()
        self.skipped = 0
        return row

    def state(self) -> Tree:
        used = {name: self._parts[who] for name, who in self._trainables() if who in self._parts}
        scale = None if self.scale is None else self.scale.state()
        graphs = None if self.compiler is None else self.compiler.state()
        optimizers = tree.map(OptimizerState.state, used)
        return {"optimizers": optimizers, "loss_scale": scale, "skipped": self.skipped, "graphs": graphs}

    def load(self, state: Tree) -> None:
        for name, who in self._trainables():
            for key, saved in state["optimizers"].get(name, {}).items():
                self.parts(who)[key].load(saved)
        if self.scale is not None and state["loss_scale"] is not None:
            self.scale.load(state["loss_scale"])
        self.skipped = state["skipped"]
        if self.compiler and state["graphs"]:  # compile may have been off
            self.compiler.load(state["graphs"])
            self.use(self.compiler)

    def _optimizers(self) -> list[OptimizerState]:
        return [own for parts in self._parts.values() for own in parts.values()]

    def _trainables(self) -> list[tuple[str, Trainable]]:
        """Return everything that may have optimizers, by its place: ``algorithm``, ``exploration.icm.predictor``."""
        roots = {"algorithm": self.algorithm} | {f"exploration.{name}": x for name, x in self.exploration.items()}
        named = (pair for prefix, root in roots.items() for pair in root.named_modules(prefix=prefix))
        return [(name, module) for name, module in named if isinstance(module, Trainable)]
