"""Conversion between CPU arrays and the tensors of environments on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.types import Batch


def action_for(env: VecEnv, action: Any) -> Any:
    """Convert an action of arrays to tensors if the environment has a device."""
    device = env.traits.device
    return action if device is None else tree.map(lambda x: torch.from_numpy(x).to(device), action)


def rows_of(env: VecEnv, rows: Batch) -> Batch:
    """Copy an environment's rows to arrays.

    Raises:
        AssertionError: the environment has a device, and the rows are not on it.
    """
    device = env.traits.device
    for path, leaf in tree.items(rows) if device is not None else ():
        there = getattr(leaf, "device", "the host")
        assert there == device, f"{'.'.join(path)} is on {there}; the environment says that it is on {device}"
    return tree.map(lambda x: np.array(x.cpu() if isinstance(x, torch.Tensor) else x), rows)
