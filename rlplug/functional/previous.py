"""Keys of a row that are derived from the previous row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.types import Batch

BEGINS = "agent_is_first"
PREVIOUS = ("prev_action", "prev_reward", BEGINS)
"""keys that are derived from the previous row"""


def write_previous(part: Batch, valid: Any, index: Any, following: Any) -> None:
    """Write a group's action and reward of rows into ``PREVIOUS`` of the next rows: zeros after final rows."""
    acted = valid[index]
    if "alive" in part:
        acted = (acted.T & part["alive"][index].T).T
    if BEGINS in part:  # alive agents that did not act
        part[BEGINS][following] = part["alive"][following] & ~acted
    for key in ("prev_action", "prev_reward"):
        if key in part:
            values = part[key.removeprefix("prev_")][index]
            where = acted.reshape(*acted.shape, *(1 for _ in values.shape[acted.ndim :]))
            part[key][following] = (torch if isinstance(values, Tensor) else np).where(where, values, 0)
