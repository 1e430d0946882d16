"""Acting with different weights for different rows, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap  # type: ignore[attr-defined]

from rlplug import tree
from rlplug.types import Batch, Mode, Weights


class Lanes(nn.Module):
    """Calls ``module.act`` for lanes of equally many rows, each with its own weights, as ``torch.func.vmap`` does.

    Unused lanes repeat a used one. The number of lanes does not depend on how many are used, so products and random
    draws have the same shape, and a lane has the same place in them, whatever the other lanes hold: its results do not
    depend on the other lanes in any bit.

    Args:
        module: has ``act(step, carry, mode)``; see ``api.Algorithm.act``.
        weights: weights of every used lane, with the same keys of ``module.state_dict()``.
        places: the used lanes, in the order of ``weights``.
        count: number of lanes.
        inside: returns the context in which ``module`` acts.
        programs: traced operations, which the ``Lanes`` of a module share.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[Weights],
        places: Sequence[int],
        count: int,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        programs: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__()
        self.module: Any = module
        self._inside, self._programs = inside, {} if programs is None else programs
        sources = [places.index(lane) if lane in places else 0 for lane in range(count)]
        self._weights = {f"module.{name}": torch.stack([weights[i][name] for i in sources]) for name in weights[0]}
        device = next(iter(self._weights.values())).device
        self._sources, self._places = (torch.tensor(index, device=device) for index in (sources, places))
        self._used, self._in_order = len(places), sources == [*places]  # in order: all lanes are used

    def forward(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act in one lane, inside ``act``."""
        return self.module.act(step, carry, mode)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on rows ``[lanes * rows, ...]``: those of the first used lane, of the second, and so on."""
        given: Batch = {"weights": self._weights} | tree.map(self._lanes, {"step": step, "carry": carry})
        found = self._traced(given) if mode == "greedy" else self._acting(given, mode)
        return tree.map(self._rows, found["out"]), tree.map(self._rows, found["carry"])

    def _acting(self, given: Batch, mode: Mode) -> Batch:
        """Act in all lanes: leaves ``[lanes, rows, ...]``, weights ``[lanes, ...]``."""

        def one(given: Batch) -> Batch:
            args = (given["step"], given["carry"], mode)
            out, carry = functional_call(self, given["weights"], args, tie_weights=False)
            return {"out": out, "carry": carry}

        with self._inside():
            return vmap(one, randomness="different")(given)

    def _traced(self, given: Batch) -> Batch:
        """Act greedily by the operations of ``_acting`` without the overhead of ``vmap``, 6/7 of its time.

        They are traced once for all ``Lanes`` of a module: weights are inputs, and greedy rows draw nothing.
        """
        leaves = [*tree.leaves(given)]
        key = (*given["step"], *(x.shape for x in leaves))
        if key not in self._programs:
            from torch.fx.experimental.proxy_tensor import make_fx

            like: Batch = {}

            def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
                values = iter(leaves)
                like.update(self._acting(tree.map(lambda _: next(values), given), "greedy"))
                return [*tree.leaves(like)]

            program = without_identities(make_fx(flat)(*leaves))
            self._programs[key] = program.forward, tree.map(lambda _: None, like)
        forward, like = self._programs[key]
        values = iter(forward(*leaves))
        return tree.map(lambda _: next(values), like)

    def _lanes(self, x: torch.Tensor) -> torch.Tensor:
        lanes = x.unflatten(0, (self._used, -1))
        return lanes if self._in_order else lanes.index_select(0, self._sources)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self._in_order else x.index_select(0, self._places)).flatten(0, 1)


def without_identities(program: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Drop views of a traced program that have the shape of what they view; ``vmap`` adds many."""
    views = {torch.ops.aten.view.default, torch.ops.aten.expand.default}
    for node in program.graph.nodes:
        if node.target in views and node.meta["tensor_meta"].shape == node.args[0].meta["tensor_meta"].shape:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.recompile()
    return program
