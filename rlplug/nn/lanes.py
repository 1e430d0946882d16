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

    Unused lanes repeat another one. The number of lanes does not depend on how many are used, so products and random
    draws have the same shape, and a lane has the same place in them, whatever the others hold: no bit of its results
    depends on them.

    Args:
        module: has ``act(step, carry, mode)``; see ``api.Algorithm.act``.
        weights: weights of every used lane, with the same keys of ``module.state_dict()``.
        places: the used lanes, in the order of ``weights``.
        count: number of lanes.
        inside: returns the context in which ``module`` acts.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[Weights],
        places: Sequence[int],
        count: int,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.module: Any = module
        self._inside = inside
        sources = [places.index(lane) if lane in places else 0 for lane in range(count)]
        self._weights = {f"module.{name}": torch.stack([weights[i][name] for i in sources]) for name in weights[0]}
        device = next(iter(self._weights.values())).device
        self._sources, self._places = (torch.tensor(index, device=device) for index in (sources, places))

    def forward(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act in one lane, inside ``act``."""
        return self.module.act(step, carry, mode)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on rows ``[lanes * rows, ...]``: those of the first used lane, of the second, and so on."""

        def one(weights: Weights, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
            return functional_call(self, weights, (step, carry, mode), tie_weights=False)

        laned = [tree.map(lambda x: x.unflatten(0, (len(self._places), -1))[self._sources], x) for x in (step, carry)]
        with self._inside():
            out, carry = vmap(one, randomness="different")(self._weights, *laned)
        return tree.map(self._rows, out), tree.map(self._rows, carry)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._places].flatten(0, 1)
