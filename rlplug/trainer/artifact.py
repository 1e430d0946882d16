"""Machine code for a function of a batch: traced once, compiled ahead of time, and called without Python or dynamo.

What a small network spends is calls. ``torch.compile`` leaves some twenty Python frames around its kernels, which take
longer than the kernels; an artifact of AOTInductor is one call into C++ with a list of tensors.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.trainer.decompositions import table
from rlplug.types import Batch

Function = Callable[[Batch], Any]
Serves = Callable[[Sequence[Tensor]], bool]

_interprets = False


@contextmanager
def interpreted() -> Iterator[None]:
    """Run what is traced operation by operation: as artifacts do, without the time that the compiler takes."""
    global _interprets
    before, _interprets = _interprets, True
    try:
        yield
    finally:
        _interprets = before


class Artifact:
    """``function(batch)`` as machine code.

    Tensors that the function closes over (weights, schedules, the state of optimizers) are inputs: the artifact reads
    them, and moves them in place, wherever they are by then. Numbers that it draws from a generator are inputs, too,
    drawn before each call in the same order. Everything else that it reads is as it was when it was traced. What it
    returns may be nested in dicts, lists and tuples.

    Args:
        batch: an example; every later one has its keys, shapes and dtypes.
        varies: the first axis of every leaf may have another length, unless the function depends on it.

    Raises:
        Exception: of many kinds, where the function cannot be traced or compiled: it reads a number of a tensor, draws
            one without a generator, or how many rows it makes is known only when it runs.
    """

    def __init__(self, function: Function, batch: Batch, varies: bool = False) -> None:
        gradient = torch.is_grad_enabled()
        with (
            warnings.catch_warnings(action="ignore"),  # of the compiler's own code
            torch.inference_mode(False),
            torch.set_grad_enabled(gradient),
        ):
            graph, self._others, self._template, inputs, self._serves = _traced(function, batch, varies)
            self._run = _interpreter(graph) if _interprets else _compiled(graph, inputs)
        self._draws = [(i, draw) for i, draw in enumerate(self._others) if not isinstance(draw, Tensor)]
        self._skip = skip = int(varies)  # axes that may have another length
        self._served: dict[tuple[torch.Size, ...], bool] = {}  # whether it serves batches with such lengths
        self._like = tree.map(lambda x: (x.dtype, x.shape[skip:]), batch)

    def __call__(self, batch: Batch) -> Any:
        """Return what the function returns; None: the batch has other keys, shapes or dtypes than the example."""
        inputs = list[Tensor]()
        if not _matches(batch, self._like, self._skip, inputs):
            return None
        if self._skip:
            lengths = tuple([x.shape[:1] for x in inputs])
            if (serves := self._served.get(lengths)) is None:
                serves = self._served[lengths] = self._serves(inputs)
            if not serves:
                return None
        others = self._others
        if self._draws:
            others = others.copy()
            for i, draw in self._draws:
                others[i] = draw()
        return _with(self._template, inputs, iter(self._run(inputs + others)))


def _matches(batch: Any, like: Batch, skip: int, inputs: list[Tensor]) -> bool:
    """Return whether a batch has keys, dtypes and shapes of ``like``; add its leaves to ``inputs``, in that order."""
    if not isinstance(batch, dict) or batch.keys() != like.keys():
        return False
    for key, kind in like.items():
        x = batch[key]
        if isinstance(kind, dict):
            if not _matches(x, kind, skip, inputs):
                return False
        elif isinstance(x, dict) or (x.dtype, x.shape[skip:]) != kind:
            return False
        else:
            inputs.append(x.contiguous())
    return True


def _traced(function: Function, batch: Batch, varies: bool) -> tuple[Any, list[Any], Any, list[Any], Serves]:
    """Return a graph without side effects but on its inputs, and examples of these, without memory. Also return what
    follows the batch's leaves among the inputs, tensors or functions that draw one; what the function returned, without
    its tensors; and a function that says whether the graph serves other leaves: what it was traced with has left its
    mark where the function asks for a length, or pairs leaves of equal ones."""
    from torch._export.utils import _compiling_state_context  # here and below: what compiles takes seconds to import
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(shape_env=ShapeEnv())
    others: dict[int, tuple[Any, Any]] = {}  # by number: the fake, and the tensor or what draws it
    template: list[Any] = []

    def fake(x: Tensor, varies: bool = False) -> Any:
        axes = [DimDynamic.DYNAMIC if varies and axis == 0 else DimDynamic.STATIC for axis in range(x.ndim)]
        shapes: Any = StatelessSymbolicContext(dynamic_sizes=axes)
        with _disable_current_modes():
            return mode.from_tensor(x.detach(), symbolic_context=shapes)

    def drawn(draw: Callable[[], Tensor], generator: torch.Generator) -> Tensor:
        state = generator.get_state()
        with _disable_current_modes():
            example = draw()
        generator.set_state(state)
        others[id(draw)] = fake(example), draw
        return others[id(draw)][0]

    class Inputs(TorchDispatchMode):
        """Makes inputs of real tensors and of draws; torch would run what has real ones alone, and move them."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def read(x: Tensor) -> Tensor:
                if isinstance(x, FakeTensor):
                    return x
                if id(x) not in others:
                    others[id(x)] = fake(x), x
                return others[id(x)][0]

            kwargs = kwargs or {}
            if torch.Tag.nondeterministic_seeded in func.tags:
                if kwargs.get("generator") is None or any(isinstance(x, Tensor) for x in args):
                    raise ValueError(f"{func} draws numbers, but not from ctx")
                draw = getattr(torch, func.overloadpacket.__name__, func)  # which takes a quarter of the time
                return drawn(partial(draw, *args, **kwargs), kwargs["generator"])
            return func(*tree_map_only(Tensor, read, args), **tree_map_only(Tensor, read, kwargs))

    def flat(*leaves: Tensor) -> list[Tensor]:
        values, outputs = iter(leaves), list[Tensor]()
        with Inputs():
            returned = function(tree.map(lambda _: next(values), batch))
            # what it closes over and returns as it is becomes an input, too
            returned = tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else x.view_as(x), returned)
        template[:] = [_without(returned, leaves, outputs)]
        return outputs

    packed = torch.contiguous_format
    leaves = inputs = [fake(torch.empty_like(x, memory_format=packed), varies) for x in tree.leaves(batch)]
    with mode, _compiling_state_context():
        graph: Any = make_fx(flat)(*inputs)
        fakes = _lift(graph)
        inputs = leaves + fakes
        with torch.no_grad():
            on_cpu = all(x.device.type == "cpu" for x in inputs)
            graph = make_fx(functionalize(graph, remove="mutations"), table() if on_cpu else None)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    real = {id(fake): other for fake, other in others.values()}
    shapes: Any = mode.shape_env
    terms = shapes.produce_guards_expression(leaves, ignore_static=False) if varies else None

    def serves(leaves: Sequence[Tensor]) -> bool:
        like = [torch.empty_like(x, memory_format=packed, device="meta") for x in leaves]
        return terms is None or shapes.evaluate_guards_expression(terms, like)

    return graph, [real[id(fake)] for fake in fakes], template[0], inputs, serves


def _lift(graph: Any) -> list[Any]:
    """Make inputs of the tensors that a graph holds, and return them, each once."""
    first = next(node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr"))  # those go
    inputs: dict[int, tuple[Any, Any]] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        held = getattr(graph, node.target)
        if id(held) not in inputs:
            with graph.graph.inserting_before(first):
                inputs[id(held)] = graph.graph.placeholder(f"closed_over_{len(inputs)}"), held
        node.replace_all_uses_with(inputs[id(held)][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [held for _, held in inputs.values()]


def _interpreter(graph: Any) -> Callable[[list[Tensor]], list[Tensor]]:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return graph(*inputs)

    return run


def _compiled(graph: Any, inputs: list[Any]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Compile a graph, unless the same one lies in the compiler's cache, and load it."""
    from torch._inductor import aot_compile
    from torch._inductor.codecache import cache_dir
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = {"cpp.enable_floating_point_contract_flag": "fast"}  # a * b + c is one instruction
    debug = os.getenv("TORCHINDUCTOR_DEBUG_COMPILE")
    flags = (options, torch.__version__, str(pick_vec_isa()), torch.get_num_threads(), debug)
    flags += (torch.are_deterministic_algorithms_enabled(),)
    shapes = [(x.dtype, x.device, [*map(str, x.shape)], [*map(str, x.stride())]) for x in inputs]
    key = hashlib.sha256(f"{graph.code}{shapes}{flags}".encode()).hexdigest()
    known = Path(cache_dir()) / "rlplug" / key
    if not known.exists() or not Path(known.read_text()).exists():
        said = "rlplug: compiling for some ten seconds; later runs take it from the compiler's cache"
        print(said, file=sys.stderr, flush=True)
        known.parent.mkdir(parents=True, exist_ok=True)
        made = str(aot_compile(graph, tuple(inputs), options=options))
        (own := known.with_suffix(f".{os.getpid()}")).write_text(made)
        own.replace(known)
    runners: Any = torch._C._aoti  # pyright: ignore[reportAttributeAccessIssue]
    on_cpu = inputs[0].device.type == "cpu"
    runner = runners.AOTIModelContainerRunnerCpu if on_cpu else runners.AOTIModelContainerRunnerCuda
    return runner(known.read_text(), 1).run


def _without(value: Any, inputs: Sequence[Tensor], outputs: list[Tensor]) -> Any:
    """Return ``value`` with ``...`` for every tensor, which is added to ``outputs``, and a slice for an input."""
    if isinstance(value, Tensor):
        for i, x in enumerate(inputs):
            if x is value:
                return slice(i)
        outputs.append(value)
        return ...
    if isinstance(value, dict):
        return {key: _without(part, inputs, outputs) for key, part in value.items()}
    return [_without(part, inputs, outputs) for part in value] if isinstance(value, list | tuple) else value


def _with(value: Any, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> Any:
    """Return ``value`` with the next of ``outputs`` in place of every ``...``, and inputs where they were."""
    if value is ...:
        return next(outputs)
    if isinstance(value, dict):  # most of what it holds are tensors
        return {key: next(outputs) if x is ... else _with(x, inputs, outputs) for key, x in value.items()}
    if isinstance(value, list):
        return [_with(part, inputs, outputs) for part in value]
    return inputs[value.stop] if isinstance(value, slice) else value
