"""Compilation of functions of a batch, if it pays off."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch

from rlplug import tree
from rlplug.compiler.artifact import Artifact
from rlplug.compiler.captured import Captured, CudaGraphs, Generators
from rlplug.compiler.compiled import Compiled, Function
from rlplug.compiler.parity import Checked
from rlplug.types import Batch, Tree

MOST_ARTIFACTS = 4  # per function, because each takes about ten seconds; more mean that shapes keep changing
MOST_RECORDINGS = 32  # per function, because each keeps memory
EAGER = 2  # eager calls before a capture, for lazy initialization
DECIDES_AFTER = 1000  # gradient steps from which compile=auto estimates the total of the run
PAYS = 50_000  # remaining gradient steps: each saves at least 0.6 ms, and compiling without a cache takes 30 s


class Compiler:
    """Compiles functions of a batch: on a CPU to machine code (``Artifact``), on a GPU to CUDA graphs (``Captured``),
    whose capture takes milliseconds.

    The decision to compile depends only on counts, so a repeated or resumed run decides the same.

    Args:
        wanted: whether to compile. None: if it pays off, see ``decide``; on a device: always.
        generators: generators that functions draw from.
        tolerance: see ``Checked``.
        graphs: graph backend of the device; None: CUDA graphs on a CUDA device, none on a CPU.
    """

    def __init__(
        self,
        device: torch.device,
        wanted: bool | None = False,
        generators: Generators = (),
        tolerance: float = 1e-3,
        graphs: CudaGraphs | None = None,
    ) -> None:
        self.device, self.generators, self.tolerance, self._off = device, generators, tolerance, wanted is False
        on_cuda = graphs is None and device.type == "cuda" and not self._off
        self.graphs = CudaGraphs(device) if on_cuda else graphs
        self.wanted = wanted if self.graphs is None else True
        self.works = True
        self.inside = False  # whether a function is being called, which includes nested calls
        self._steps, self._since = 0, -1  # gradient steps counted for the decision, since this step of the run
        self._known: dict[Hashable, list[Compiled | Checked]] = {}  # by function, one per kind of batch
        self._eager: dict[tuple[Any, ...], int] = {}  # eager calls before the capture, by kind of batch
        self._failed = set[Hashable]()

    @property
    def active(self) -> bool:
        """Return whether gradient steps are compiled."""
        return bool(self.wanted) and self.works and not self.inside

    @property
    def settled(self) -> bool:
        """Return whether all functions called so far are compiled and checked, or permanently eager."""
        checked = any(isinstance(x, Checked) for known in self._known.values() for x in known)
        return not checked and all(n > EAGER for kind, n in self._eager.items() if kind[0] not in self._failed)

    def decide(self, done: int, total: int) -> None:
        """Start to compile if enough gradient steps remain, after ``done`` of ``total`` steps."""
        if self.wanted is not None:
            return
        if self._since < 0:
            self._since = done
        if self._steps >= DECIDES_AFTER and done > self._since:
            self.wanted = self._steps / (done - self._since) * (total - done) >= PAYS

    def step(self, of: tuple[Any, ...], function: Function, batch: Batch, varies: bool = False) -> Any:
        """Return the result of a compiled gradient step, or None if it is not compiled.

        Args:
            of: identity of the function across calls.
            varies: whether the number of rows varies; machine code then supports every number.
        """
        if not self.active:
            self._steps += 1
            return None
        found = self._call(of, f"a gradient step of {type(of[0]).__name__}", function, batch, varies)
        self.works = found is not None
        return found

    def call(self, function: Function, batch: Batch, of: Hashable = None) -> Any:
        """Return the result of a method, compiled once gradient steps are.

        Args:
            function: without side effects except in-place updates of tensors; always the same for its object.
            of: everything else that it depends on.
        """
        if not self.wanted or self.inside:
            return function(batch)
        who, name = function.__self__, function.__name__  # type: ignore[attr-defined]
        self.inside = True
        try:
            found = self._call((who, name, of), f"{type(who).__name__}.{name}", function, batch)
            return function(batch) if found is None else found
        finally:
            self.inside = False

    def _call(self, of: Hashable, name: str, function: Function, batch: Batch, varies: bool = False) -> Any:
        """Call a function compiled, compiling it if needed; return None if that is impossible."""
        if of in self._failed:
            return None
        try:
            if (found := self._compiled(of, name, batch)) is not None:
                return found
        except Exception as error:  # of various types; errors of the function itself recur in eager mode
            return self._fail(of, name, error)
        if self.graphs is not None:
            kind = of, *((x.dtype, x.shape) for x in tree.leaves(batch))
            self._eager[kind] = eager = self._eager.get(kind, 0) + 1
            if eager < EAGER:
                return function(batch)
            if eager == EAGER:
                with self.graphs.waits() as waits:
                    found = function(batch)
                return self._fail(of, name, waits[0], found) if waits else found
        known = self._known.setdefault(of, [])
        try:
            if len(known) == (most := MOST_ARTIFACTS if self.graphs is None else MOST_RECORDINGS):
                raise RuntimeError(f"it would need more than {most} graphs: its shapes keep changing")
            compiled: Compiled
            if self.graphs is None:
                compiled = Artifact(function, batch, varies)
            else:
                compiled = Captured(function, batch, self.device, self.generators, self.graphs)
            known.append(Checked(compiled, function, self.generators, self.tolerance))
            return self._compiled(of, name, batch)
        except Exception as error:
            return self._fail(of, name, error)

    def _compiled(self, of: Hashable, name: str, batch: Batch) -> Any:
        """Call the compiled function for this kind of batch; return None if there is none."""
        for place, compiled in enumerate(known := self._known.get(of, ())):
            if (found := compiled(batch)) is not None:
                if isinstance(compiled, Checked) and compiled.difference is not None:
                    return self._fail(of, name, f"compared with the eager function, {compiled.difference}", found)
                if isinstance(compiled, Checked) and not compiled.left:
                    known[place] = compiled.compiled  # type: ignore[index]
                return found
        return None

    def _fail(self, of: Hashable, name: str, why: object, found: Any = None) -> Any:
        """Warn that a function stays eager, and return ``found``."""
        self._failed.add(of)
        self._known.pop(of, None)
        reason = (str(why).strip() or type(why).__name__).splitlines()[0]
        warnings.warn(f"compile: {name} could not be compiled; it runs eagerly: {reason}", stacklevel=2)
        return found

    def state(self) -> Tree:
        """Return the state of the decision to compile; None: never."""
        state = {"wanted": self.wanted, "works": self.works, "steps": self._steps, "since": self._since}
        return None if self._off else state

    def load(self, state: Tree) -> None:
        """Restore the decision; functions are compiled again, because optimizers have other state tensors."""
        if self._off or state is None:
            return
        self.wanted, self.works = self.wanted or state["wanted"], state["works"]
        self._steps, self._since = state["steps"], state["since"]
        self._known.clear()
        self._eager.clear()
