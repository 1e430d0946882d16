"""Ahead-of-time compilation of a function of a batch: traced once, and called without Python or dynamo.

Small networks are bound by call overhead. ``torch.compile`` keeps about twenty Python frames around its kernels, which
take longer than the kernels; an AOTInductor artifact is one call into C++ with a list of tensors.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug.compiler.cache import own_folder
from rlplug.compiler.compiled import Compiled, Function, restored
from rlplug.compiler.tracing import traced
from rlplug.types import Batch


class Artifact(Compiled):
    """``function(batch)`` compiled to machine code.

    Tensors that the function closes over (weights, schedules, optimizer state) are inputs: the artifact reads them, and
    updates them in place, at their current address. Random numbers are inputs, too, drawn before each call in the same
    order. All other state is constant from tracing.

    Args:
        varies: support other lengths of the leaves' first axis, unless the function depends on it.

    Raises:
        Exception: of various types, if the function cannot be traced or compiled: it reads a tensor's value, draws
            without a generator, or has data-dependent shapes.
    """

    def __init__(self, function: Function, batch: Batch, varies: bool = False) -> None:
        super().__init__(batch, int(varies))
        gradient = torch.is_grad_enabled()
        with (
            warnings.catch_warnings(action="ignore"),  # from the compiler's code
            torch.inference_mode(False),
            torch.set_grad_enabled(gradient),
        ):
            graph, self._others, self.template, inputs, self._serves = traced(function, batch, varies)
            self._run = loaded(graph, inputs)
        self._draws = [(i, draw) for i, draw in enumerate(self._others) if not isinstance(draw, Tensor)]

    def inputs(self, batch: Batch) -> list[Tensor] | None:
        inputs = super().inputs(batch)
        return inputs if inputs is None or not self._skip or self._serves(*[x.shape[:1] for x in inputs]) else None

    def run(self, inputs: list[Tensor]) -> Any:
        others = self._others
        if self._draws:
            others = others.copy()
            for i, draw in self._draws:
                others[i] = draw()
        return restored(self.template, inputs, iter(self._run(inputs + others)))


def loaded(graph: Any, inputs: list[Any]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Compile a graph, unless it is in the compiler's cache, and load it."""
    folder = own_folder()  # first, because it sets the folder of torch's compiler
    from torch._inductor import aot_compile
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = {"cpp.enable_floating_point_contract_flag": "fast"}  # fused multiply-add
    debug = os.getenv("TORCHINDUCTOR_DEBUG_COMPILE")
    flags = (options, torch.__version__, str(pick_vec_isa()), torch.get_num_threads(), debug)
    flags += (torch.are_deterministic_algorithms_enabled(),)
    shapes = [(x.dtype, x.device, [*map(str, x.shape)], [*map(str, x.stride())]) for x in inputs]
    key = hashlib.sha256(f"{graph.code}{shapes}{flags}".encode()).hexdigest()
    known = folder / "rlplug" / key
    if not known.exists() or not Path(known.read_text()).exists():
        said = "rlplug: compiling takes about ten seconds; later runs use the compiler's cache"
        print(said, file=sys.stderr, flush=True)
        known.parent.mkdir(parents=True, exist_ok=True)
        made = str(aot_compile(graph, tuple(inputs), options=options))
        (own := known.with_suffix(f".{os.getpid()}")).write_text(made)
        own.replace(known)
    runners: Any = torch._C._aoti  # pyright: ignore[reportAttributeAccessIssue]
    return runners.AOTIModelContainerRunnerCpu(known.read_text(), 1).run
