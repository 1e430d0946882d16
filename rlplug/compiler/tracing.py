"""Tracing: a function of a batch becomes a graph of operations whose every tensor is an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.compiler.compiled import Function, without
from rlplug.compiler.decompositions import table
from rlplug.types import Batch

Serves = Callable[[Sequence[Tensor]], bool]


def traced(function: Function, batch: Batch, varies: bool) -> tuple[Any, list[Any], Any, list[Any], Serves]:
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
        template[:] = [without(returned, leaves, outputs)]
        return outputs

    packed = torch.contiguous_format
    leaves = inputs = [fake(torch.empty_like(x, memory_format=packed), varies) for x in tree.leaves(batch)]
    with mode, _compiling_state_context():
        graph: Any = make_fx(flat)(*inputs)
        fakes = _lift(graph)
        inputs = leaves + fakes
        with torch.no_grad():
            graph = make_fx(functionalize(graph, remove="mutations"), table())(*inputs)
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
