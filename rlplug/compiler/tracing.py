"""Tracing of a function of a batch to a graph of operations that takes all tensors as inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.compiler.compiled import Function, without
from rlplug.compiler.decompositions import table
from rlplug.types import Batch

Serves = Callable[..., bool]


def traced(function: Function, batch: Batch, varies: bool) -> tuple[Any, list[Any], Any, list[Any], Serves]:
    """Trace a function to a graph whose only side effects are in-place updates of its inputs.

    Return the graph; example inputs without memory; the inputs after the batch's leaves, which are tensors or functions
    that draw one; the structure of the result without tensors; and a function that returns whether the graph supports
    other leaves. It does not if the function read an axis length, or combined leaves of equal length."""
    from torch._export.utils import _compiling_state_context  # here and below, because compilers take seconds to import
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(shape_env=ShapeEnv())
    others: dict[int, tuple[Any, Any]] = {}  # by id: the fake tensor, and the tensor or the function that draws it
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
        """Turns real tensors and draws into inputs; torch would execute operations on real tensors only, in place."""

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
                    raise ValueError(f"{func} draws random numbers that do not come from ctx")
                draw = getattr(torch, func.overloadpacket.__name__, func)  # four times as fast
                return drawn(partial(draw, *args, **kwargs), kwargs["generator"])
            return func(*tree_map_only(Tensor, read, args), **tree_map_only(Tensor, read, kwargs))

    def flat(*leaves: Tensor) -> list[Tensor]:
        values, outputs = iter(leaves), list[Tensor]()
        with Inputs():
            returned = function(tree.map(lambda _: next(values), batch))
            # closed-over tensors that are returned unchanged become inputs, too
            returned = tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else x.view_as(x), returned)
        template[:] = [without(returned, leaves, outputs)]
        return outputs

    leaves = inputs = [fake(x.new_empty(x.shape), varies) for x in tree.leaves(batch)]
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

    @cache
    def serves(*lengths: torch.Size) -> bool:
        like = [torch.empty(*n, *x.shape[1:], device="meta") for n, x in zip(lengths, leaves, strict=True)]
        return terms is None or shapes.evaluate_guards_expression(terms, like)

    return graph, [real[id(fake)] for fake in fakes], template[0], inputs, serves


def _lift(graph: Any) -> list[Any]:
    """Turn the constant tensors of a graph into inputs, and return them without duplicates."""
    first = next(node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr"))  # these are removed
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
