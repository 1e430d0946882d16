"""Ahead-of-time compilation of a function of a batch: traced once, and called without Python or dynamo.

Small networks are bound by call overhead. ``torch.compile`` keeps about twenty Python frames around its kernels, which
take longer than the kernels; an AOTInductor artifact is one call into C++ with a list of tensors.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug.compiler.compiled import Compiled, Function, restored
from rlplug.compiler.tracing import traced
from rlplug.types import Batch

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # folder of the libraries of torch's compiler


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
        others = self._others.copy()
        for i, draw in self._draws:
            others[i] = draw()
        return restored(self.template, inputs, iter(self._run(inputs + others)))


def loaded(graph: Any, inputs: list[Any]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Compile a graph, unless it is in the compiler's cache, and load it."""
    folder = own_folder()  # first, because it sets the folder of torch's compiler
    from torch._inductor import aot_compile
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import lowerings
    from torch._inductor.mkldnn_ir import LinearUnary

    options = {"cpp.enable_floating_point_contract_flag": "fast"}  # fused multiply-add
    flags = (options, torch.__version__, str(pick_vec_isa()), torch.get_num_threads())
    flags += (os.getenv("TORCHINDUCTOR_DEBUG_COMPILE"), torch.are_deterministic_algorithms_enabled())
    shapes = [(x.dtype, x.device, [*map(str, x.shape)], [*map(str, x.stride())]) for x in inputs]
    key = hashlib.sha256(f"{graph.code}{shapes}{flags}".encode()).hexdigest()
    known = folder / "rlplug" / key
    if not known.exists() or not Path(known.read_text()).exists():
        said = "rlplug: compiling takes about ten seconds; later runs use the compiler's cache"
        print(said, file=sys.stderr, flush=True)
        known.parent.mkdir(parents=True, exist_ok=True)
        linear = torch.ops.mkldnn._linear_pointwise.default
        with ExitStack() as stack:  # torch's own lowering would accept constant weights only
            stack.callback(lowerings.__setitem__, linear, lowerings[linear])
            lowerings[linear] = lambda *args: TensorBox.create(LinearUnary.create(*args))
            made = str(aot_compile(graph, tuple(inputs), options=options))
        (own := known.with_suffix(f".{os.getpid()}")).write_text(made)
        own.replace(known)
    return torch._C._aoti.AOTIModelContainerRunnerCpu(known.read_text(), 1).run  # pyright: ignore


def own_folder() -> Path:
    """Return the folder for compiled functions, creating it if needed, and set it for torch's compiler.

    Its code is executed, so other users must not be able to write there.

    It is ``$TORCHINDUCTOR_CACHE_DIR``, or if that is unset or torch's default in the shared temporary folder,
    ``$XDG_CACHE_HOME/rlplug`` or ``~/.cache/rlplug``.

    Raises:
        OSError: the folder cannot be created, or another user can write to it or replace it.
    """
    chosen = os.environ.get(VARIABLE, "")
    if not chosen or os.path.abspath(chosen).startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        base = os.environ.get("XDG_CACHE_HOME", "")
        chosen = os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "rlplug")
    try:
        if chosen.startswith("~"):
            raise FileNotFoundError("this user has no home directory")
        folder = Path(os.path.abspath(chosen))
        _check(folder)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise PermissionError(f"{folder} is open to other users: chmod 700 {folder}")
    except OSError as error:
        way = f"set {VARIABLE} to your own folder; other users must not be able to write to it or its parents"
        raise OSError(f"no folder is safe for compiled functions: {error}; {way}") from None
    from torch._inductor import codecache  # here: it takes seconds to import

    os.environ[VARIABLE], headers = str(folder), folder / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")  # torch: in the default
    return folder


def _check(folder: Path) -> None:
    """Create a folder and its parents; raise ``OSError`` unless only this user and root can change them."""
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            part.mkdir(0o700, exist_ok=True)  # another process may create it at the same time
        part.stat()  # raises at a loop of links
        info = part.lstat()
        if info.st_uid not in (os.geteuid(), os.stat("/").st_uid):  # in a container, root may have another uid
            raise PermissionError(f"{part} belongs to another user")
        if stat.S_ISLNK(info.st_mode):
            _check(Path(os.path.realpath(part.parent), os.readlink(part)))
        elif info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{part} can be written by other users")
