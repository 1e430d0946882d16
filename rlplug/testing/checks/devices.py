"""Conversion between CPU arrays and the tensors of environments on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.types import Batch, Group


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
        assert there == device, f"{'.'.join(path)} is on {there}; the environment declares {device}"
    return tree.map(lambda x: np.array(x.cpu() if isinstance(x, torch.Tensor) else x), rows)


def draw(env: VecEnv, row: Batch) -> Any:
    """Return random actions ``[B, ...]``, or ``[B, N, ...]`` of agents, that the ``action_mask`` of ``row`` allows.

    Several groups get a dict of them.
    """
    spec = env.spec
    found = {name: _draw(group, row[name] if spec.nested else row) for name, group in spec.groups.items()}
    return found if spec.nested else next(iter(found.values()))


def _draw(group: Group, part: Batch) -> np.ndarray:
    columns = len(next(tree.leaves(part)))
    space, shape = group.action, (columns, *([len(group.agents)] if group.agents else []))
    masks = np.full(np.prod(shape), None)
    if "action_mask" in part:
        cuts = np.cumsum(space.nvec)[:-1] if isinstance(space, MultiDiscrete) else None
        flat_masks = part["action_mask"].astype(np.int8).reshape(len(masks), -1)
        flat_masks[~flat_masks.any(1)] = 1  # of agents that are not alive
        masks = [mask if cuts is None else tuple(np.split(mask, cuts)) for mask in flat_masks]
    every = np.stack([space.sample() if mask is None else space.sample(mask=mask) for mask in masks])
    return every.reshape(*shape, *every.shape[1:])
