"""Named opponents of two-player games with a simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlplug.types import ConfigError

Best = Callable[[Any, Tensor], Tensor]
"""(states, legal moves ``[B, A]``) -> the best ones, ``[B, A]`` bool"""


def opponent_of(name: str, model: Any, actions: int) -> Best:
    """Return a named opponent: ``random``; ``one_ply``, which maximizes the immediate reward; ``minimax``.

    Args:
        model: the game's simulator.
        actions: number of moves.

    Raises:
        ConfigError: the game is not solved exactly.
    """
    if name == "one_ply":
        return partial(_one_ply, model, actions)
    solved = None
    if name == "minimax" and (solved := getattr(model, "minimax", lambda: None)()) is None:
        raise ConfigError("algo.opponents", "has minimax, which is exact for tiny games only; leave it out")
    return partial(_solved, solved)


def _solved(solved: Any, state: Any, legal: Tensor) -> Tensor:
    return legal if solved is None else solved.best(state)


def _one_ply(model: Any, actions: int, state: Any, legal: Tensor) -> Tensor:
    player = model.player(state).unsqueeze(1)
    joint = torch.arange(actions, device=legal.device).view(-1, 1, 1).expand(-1, len(legal), 2)
    paid = [model.step(state, action)["reward"].gather(1, player).squeeze(1) for action in joint]
    value = torch.where(legal, torch.stack(paid, -1), -torch.inf)
    return legal & (value == value.amax(-1, keepdim=True))
