"""Gradient steps as graphs of ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlplug.api import Trainable
from rlplug.nn import Adam
from rlplug.trainer.minibatches import Total
from rlplug.trainer.optimizer import OptimizerState
from rlplug.types import Batch, Tree

MOST_GRAPHS = 64  # of a step; torch counts those of all learners of a process
DECIDES_AFTER = 1000  # gradient steps, by which compile=auto knows how many there are in the whole run
PAYS = 100_000  # gradient steps ahead: a graph saves a tenth of a millisecond each, and takes some ten seconds to make

Forward: TypeAlias = Callable[[Batch, Trainable, Sequence[str]], Total]


class Graph(NamedTuple):
    """What came out of one."""

    total: Total
    """without what is differentiated"""
    grads: Sequence[Tensor | None]
    """of the parameters of the due parts; none where the graph moved them"""
    norms: Mapping[str, Sequence[Tensor]]
    """of the gradients before they were clipped, by part; none where the graph moved nothing"""


class Graphs:
    """Compiles a gradient step into one graph: forward and backward, and with ``moves`` clipping and Adam's step.

    Whether it does is decided by counts alone, so that a run that is repeated or resumed decides the same.

    Args:
        forward: computes the losses of the due parts of a trainable.
        at_once: from the first step on; otherwise where it pays, see ``decide``.
        varies: batches have one and another number of rows; then one graph serves every size.
        moves: a step is taken whatever its numbers are, and all gradients are here.
    """

    def __init__(self, forward: Forward, at_once: bool, varies: bool, moves: bool) -> None:
        self.forward, self.varies, self.moves = forward, varies, moves
        self.wanted: bool | None = at_once or None
        """None: not decided yet"""
        self.works = True
        self._steps, self._since = 0, -1.0  # that were counted to decide, since this share of the run
        self._graphs: dict[tuple[Trainable, Sequence[str], bool], Callable[[Batch], Graph]] = {}

    def decide(self, done: float) -> None:
        """Compile from now on if so many gradient steps are ahead that it pays. ``done``: the share of the run."""
        if self.wanted is not None:
            return
        if self._since < 0.0:
            self._since = done
        if self._steps >= DECIDES_AFTER and done > self._since:
            self.wanted = self._steps / (done - self._since) * (1.0 - done) >= PAYS

    def run(
        self, batch: Batch, who: Trainable, due: Sequence[str], own: Mapping[str, OptimizerState], step: bool
    ) -> Graph | None:
        """Run a graph. None: there is none; a warning says once if it cannot be made.

        Args:
            own: optimizers by part.
            step: move the parameters, if the graph can.
        """
        if not (self.wanted and self.works):
            self._steps += 1
            return None
        moves = step and self.moves and all(type(own[name].optim.optimizer) is Adam for name in due)
        if (who, due, moves) not in self._graphs:
            self._graphs[who, due, moves] = self._compiled(who, {name: own[name] for name in due}, moves)
        try:
            return self._graphs[who, due, moves](batch)
        except Exception as error:  # of many kinds; one that is not the compiler's comes again without it
            reason = str(error).strip().splitlines()[0]
            self.works, name = False, type(who).__name__
            warnings.warn(f"compile: {name} could not be compiled and runs eagerly: {reason}", stacklevel=2)
            return None

    def _compiled(self, who: Trainable, parts: Mapping[str, OptimizerState], moves: bool) -> Callable[[Batch], Graph]:
        from torch._dynamo import config as dynamo  # here: it takes seconds

        dynamo.trace_autograd_ops = True  # for good: setting them around a call costs as much as a small product
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
        due, params = tuple(parts), [p for part in parts.values() for p in part.params]
        if moves:
            for part in parts.values():
                part.optim.optimizer.collect(share=False)  # type: ignore[attr-defined]

        def step(batch: Batch) -> Graph:
            total = self.forward(batch, who, due)
            left: Sequence[Any] = torch.autograd.grad(total.loss, params, allow_unused=True)
            total = total._replace(loss=total.loss.detach())
            if not moves:
                return Graph(total, left, {})
            norms: dict[str, Sequence[Tensor]] = {}
            with torch.no_grad():
                for name, part in parts.items():
                    grads, left = left[: len(part.params)], left[len(part.params) :]
                    norms[name] = part.clip([grad for grad in grads if grad is not None])
                    part.optim.optimizer.move(grads)  # type: ignore[attr-defined]
            return Graph(total, (), norms)

        # on the host a graph is called from C++: for small networks Python's calls of its kernels are a fifth of it
        options: dict[str, Any] | None = {"cpp_wrapper": True} if params[0].is_cpu else None
        return torch.compile(step, fullgraph=True, dynamic=self.varies, options=options)

    def state(self) -> Tree:
        return {"wanted": self.wanted, "steps": self._steps, "since": self._since}

    def load(self, state: Tree) -> None:
        """Go on; graphs are made anew, as optimizers have another state."""
        self.wanted = self.wanted or state["wanted"]
        self._steps, self._since = state["steps"], state["since"]
        self._graphs.clear()
