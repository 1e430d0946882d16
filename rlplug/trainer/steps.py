"""Gradient steps, with the only backward pass of the project.

Modules are not wrapped in DDP. ``compute`` sums per-row terms over valid rows, runs the backward pass, and sums
gradients, valid counts and metrics over ranks in ONE flat all-reduce. Dividing by the global count afterwards makes the
result independent of the number of ranks and microbatches, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rlplug import tree
from rlplug.api import Losses, Trainable
from rlplug.compiler.compiler import Compiler
from rlplug.context import RunContext
from rlplug.contract import results
from rlplug.distributed.collectives import Collectives
from rlplug.functional.minibatches import column_axis, microbatches
from rlplug.nn.optim import Adam, LossScale, backward, replaced
from rlplug.trainer.losses import Total, all_reduced, forward, total_loss
from rlplug.trainer.optimizer import GradientStep, OptimizerState, find_nonfinite
from rlplug.types import Batch, Compile, Progress, RunError, Tree

COMPILE: Mapping[Compile, bool | None] = {"off": False, "auto": None, "max": True}
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
MOST_UNREAD = 1000  # maximum number of gradient steps between two checks of finiteness

Norms: TypeAlias = Mapping[str, Sequence[Tensor]]
"""0-d gradient norms before clipping, by part; empty if no step was taken"""


class GradientSteps:
    """Makes the gradient steps of a rank, compiled if that pays off.

    Args:
        progress: counters of the run, for messages.
        on_nan: handling of a step with a term or gradient that is NaN or infinite. ``stop``: ``check_finite`` finds it
            later and raises. ``skip``: skip the step, which synchronizes with an accelerator at every step.
        precision: precision of forward and backward passes, as named by Fabric.
        scale_losses: scale losses, as ``16-mixed`` needs; skips steps that overflow, and synchronizes.
    """

    def __init__(
        self,
        ctx: RunContext,
        ranks: Collectives,
        progress: Progress,
        *,
        microbatches: int = 1,
        compile: Compile = "off",
        on_nan: Literal["stop", "skip"] = "stop",
        precision: str = "32-true",
        scale_losses: bool = False,
    ) -> None:
        self.device, self.ranks, self.progress, self.chosen = ctx.device, ranks, progress, ctx.optimizer
        self.microbatches, self.undivided = microbatches, ranks.world_size == 1 and microbatches == 1
        self.on_nan: Literal["stop", "skip"] = on_nan
        self.dtype, self.scale = DTYPES.get(precision), LossScale(ctx.device) if scale_losses else None
        self.moves = self.undivided and on_nan == "stop" and self.scale is None
        """whether steps are unconditional and need no gradients of other ranks or microbatches"""
        self.skipped, self.unread = 0, list[GradientStep]()  # since ``drain``, and since ``check_finite``
        replaced(Adam([torch.zeros(1)], 1.0), *self.chosen)  # refuses wrong options before any step
        wanted, roughly = COMPILE[compile], 1e-3 if self.dtype is None else 3e-2
        self.compiler = Compiler(ctx.device, wanted, ctx.generators.values(), roughly)
        self._varies = ctx.needs.data != "windows"
        self._parts: dict[Trainable, dict[str, OptimizerState]] = {}

    def use(self, compiler: Compiler) -> None:
        """Set the compiler of later steps."""
        self.compiler = compiler

    def parts(self, who: Trainable) -> dict[str, OptimizerState]:
        """Return the optimizers of ``who`` by part, created at the first call."""
        if who not in self._parts:
            self._parts[who] = {key: OptimizerState(own, *self.chosen) for key, own in results.optimizers(who).items()}
        return self._parts[who]

    def optimizers(self) -> list[OptimizerState]:
        """Return all optimizers created so far."""
        return [own for parts in self._parts.values() for own in parts.values()]

    def compute(
        self, batch: Batch, who: Trainable, due: Sequence[str], moves: bool = False, diagnostics: bool = False
    ) -> tuple[Losses, Norms]:
        """Set ``.grad`` of the due parts to global mean gradients; return losses as global means.

        With ``moves``, a compiled step may also update the parameters; it then returns norms instead of gradients.
        """
        own = self.parts(who)
        every = [p for part in own.values() for p in part.params]
        for p in every:
            p.grad = None
        parts = {name: own[name] for name in due}
        params = [p for part in parts.values() for p in part.params]
        totals, norms = list[Total](), dict[str, Sequence[Tensor]]()
        diagnostics |= bool(self.compiler.wanted)  # compiled steps have them, possibly on another rank only
        for micro in (batch,) if self.undivided else microbatches(batch, self.microbatches):
            found = self._compiled(micro, who, parts, moves and self.moves)
            if found is None:
                totals.append(self.forward(micro, who, due, diagnostics))
                backward(totals[-1].loss)
                continue
            totals.append(Total(Losses(*found["losses"]), found["count"], torch.zeros(())))
            norms |= found["norms"]
            for p, grad in zip(params, found["grads"], strict=not norms):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad + grad
        losses = totals[0].losses if self.undivided else all_reduced(totals, column_axis(batch), params, self.ranks)
        if self.scale is not None and (grads := [p.grad for p in every if p.grad is not None]):
            torch._foreach_div_(grads, self.scale.value)
        return losses, norms

    def forward(self, batch: Batch, who: Trainable, due: Sequence[str], diagnostics: bool = True) -> Total:
        """Return the losses of the due parts, as means if the batch is whole, else as sums."""
        with nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
            losses = forward(who, batch, due, diagnostics)
        total = total_loss(losses, batch.get("valid"), batch.get("alive"), who, mean=self.undivided)
        return total if self.scale is None else total._replace(loss=total.loss * self.scale.value)

    def _compiled(
        self, batch: Batch, who: Trainable, parts: Mapping[str, OptimizerState], moves: bool
    ) -> dict[str, Any] | None:
        """Return the result of a compiled ``gradient_step``, or None. The only side effect is Adam's step."""
        moves = moves and all(type(part.optim.optimizer) is Adam for part in parts.values())
        for part in parts.values() if moves and self.compiler.active else ():
            part.optim.optimizer.unshare()  # type: ignore[attr-defined]
        function = partial(gradient_step, self.forward, who, parts, moves)
        return self.compiler.step((who, tuple(parts), moves), function, batch, self._varies)

    def take(self, who: Trainable, due: Sequence[str], terms: Mapping[str, Tensor], norms: Norms) -> bool:
        """Clip and step, unless ``norms`` show that a compiled step did. Return False if the step was skipped because
        of a NaN or infinite number."""
        own, moved = self.parts(who), bool(norms)
        norms = norms or {name: own[name].clip() for name in due}
        step = GradientStep(self.progress.updates + 1, self.progress.env_steps, who, dict(terms), norms)
        if self.scale is not None and not self.scale.fits(terms.values(), chain.from_iterable(norms.values())):
            return False
        if self.on_nan == "stop":
            self.unread.append(step)
            if len(self.unread) >= MOST_UNREAD and not self.compiler.inside:
                self.check_finite()
        elif find_nonfinite([step]) is not None:
            self.skipped += 1
            return False
        for name in () if moved else due:
            own[name].optim.optimizer.step()
        return True

    def check_finite(self, wait: bool = True) -> None:
        """Check that losses and gradients since the last call were finite; on a device only if ``wait``.

        Raises:
            RunError: names the first term or gradient that was not, and its step. Later calls raise it again, because
                the weights are invalid.
        """
        if not wait and self.device.type != "cpu":
            return
        if (message := find_nonfinite(self.unread)) is not None:
            raise RunError(message)
        self.unread.clear()

    def drain(self) -> dict[str, float]:
        """Return metrics of the steps since the last call."""
        row: dict[str, float] = {"skipped": self.skipped} if self.on_nan == "skip" else {}
        row |= {} if self.scale is None else {"loss_scale": self.scale.value.item()}
        self.skipped = 0
        return row

    def state(self, named: Iterable[tuple[str, Trainable]]) -> Tree:
        """Return the state of optimizers, by module name, and the compiler's and loss scale's state."""
        used = {name: self._parts[who] for name, who in named if who in self._parts}
        state = {"optimizers": tree.map(OptimizerState.state, used), "skipped": self.skipped}
        return state | {"loss_scale": self.scale and self.scale.state(), "graphs": self.compiler.state()}

    def load(self, state: Tree, named: Iterable[tuple[str, Trainable]]) -> None:
        for name, who in named:
            for key, saved in state["optimizers"].get(name, {}).items():
                self.parts(who)[key].load(saved)
        if self.scale is not None and state["loss_scale"] is not None:
            self.scale.load(state["loss_scale"])
        self.skipped = state["skipped"]
        self.compiler.load(state["graphs"])


def gradient_step(
    forward: Callable[[Batch, Trainable, Sequence[str]], Total],
    who: Trainable,
    parts: Mapping[str, OptimizerState],
    moves: bool,
    batch: Batch,
) -> dict[str, Any]:
    """Compute losses and gradients, and with ``moves`` clip and take Adam's step; can be compiled.

    Returns:
        ``losses``: terms, metrics and feedback; ``norms``; and, without ``moves``, ``grads`` of the parameters of the
        due parts and the ``count`` of valid rows.
    """
    total = forward(batch, who, tuple(parts))
    params = [p for part in parts.values() for p in part.params]
    left: Sequence[Any] = torch.autograd.grad(total.loss, params, allow_unused=True)
    losses, norms = total.losses, dict[str, Sequence[Tensor]]()
    found = {"losses": [losses.terms, losses.metrics, losses.feedback], "norms": norms}
    if not moves:
        return found | {"count": total.count, "grads": left}
    with torch.no_grad():
        for name, part in parts.items():
            grads, left = left[: len(part.params)], left[len(part.params) :]
            norms[name] = part.clip([grad for grad in grads if grad is not None])
            adam: Any = part.optim.optimizer
            (adam.move if is_compiling() else adam.apply)(grads)
    return found | {"count": 1.0, "grads": []}


class WholeUpdate:
    """A whole update as one function of a sample: ``prepare``, gradient steps and ``after_step``.

    The bookkeeping of an update (due optimizers, numbers to check later) runs in Python at every call, even if the
    function is replayed.

    Args:
        learn: makes the update.
        steps: its gradient steps.
    """

    def __init__(self, learn: Callable[[Batch], Losses], steps: GradientSteps) -> None:
        self.learn, self.steps = learn, steps

    def __call__(self, batch: Batch) -> Losses:
        """Make the update of a sample, and return its losses."""
        steps, progress = self.steps, self.steps.progress
        self._begin = len(steps.unread), [(optimizer, optimizer.calls) for optimizer in steps.optimizers()]
        phases = tuple(calls % optimizer.optim.every for optimizer, calls in self._begin[1])
        found = steps.compiler.call(self.function, batch, phases)
        for (optimizer, calls), more in zip(self._begin[1], found["calls"], strict=True):
            optimizer.calls = calls + more
        for who, terms, norms in found["steps"]:
            steps.unread.append(GradientStep(progress.updates + 1, progress.env_steps, who, terms, norms))
        return Losses(*found["losses"])

    def function(self, batch: Batch) -> dict[str, Any]:
        (start, begin), unread = self._begin, self.steps.unread
        del unread[start:]  # those of an unfinished attempt
        for optimizer, calls in begin:
            optimizer.calls = calls
        losses = self.learn(batch)
        steps = [
            (step.who, step.terms, {name: [torch.stack([*norms]).sum()] for name, norms in step.norms.items() if norms})
            for step in unread[start:]
        ]
        del unread[start:]
        found = {"losses": [losses.terms, losses.metrics, losses.feedback], "steps": steps}
        return found | {"calls": [optimizer.calls - before for optimizer, before in begin]}
