"""Check rows and actions against the spaces. Each function returns a description of the error, or None.

The description follows the name of the source: ``.step returned no truncated; return it for ...``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch import Tensor

from rlplug import tree
from rlplug.envs.checking import limits_of
from rlplug.envs.spaces import allocate, in_words
from rlplug.spaces import Hybrid
from rlplug.types import KEYS, Batch, EnvSpec, Group

ENDS = ("terminated", "truncated")
PER_ROW = frozenset(key for key, (shape, *_) in KEYS.items() if shape == "[T+1, B]")
"""keys with one number per row"""


def spec_misfit(spec: EnvSpec) -> str | None:
    """Check the spaces that an environment declares."""
    if not isinstance(spec, EnvSpec):
        return f"is {tree.what(spec)}; it must be an EnvSpec"
    if not isinstance(spec.groups, dict) or not spec.groups:
        return f"is EnvSpec of {tree.what(spec.groups)}; write EnvSpec({{'agent': Group(obs, action)}})"
    for name, group in spec.groups.items():
        if not isinstance(group, Group):
            return f"has {tree.what(group)} for {name!r}; write EnvSpec({{{name!r}: Group(obs, action)}})"
        for what, space in (("obs", group.obs), ("action", group.action)):
            if not isinstance(space, Space):
                return f"has {tree.what(space)} for {what} of {name!r}; use a space of gymnasium.spaces"
        if not isinstance(group.agents, tuple):
            return f"has {tree.what(group.agents)} for the agents of {name!r}; use a tuple of names"
    groups = spec.groups.values()
    for name, space in (pair for of in (spec, *groups) for pair in of.extras.items()):
        if not isinstance(space, Space):
            return f"has {tree.what(space)} for the extra {name!r}; use a space of gymnasium.spaces"
    return None


def rows_misfit(spec: EnvSpec, member: str, rows: Any, n: int) -> str | None:
    """Check the rows that ``reset`` or ``step`` of ``n`` environments returned."""
    results = ("reward", *ENDS) if member == "step" else ()
    if not isinstance(rows, dict):
        return f"returned {tree.what(rows)}; return a dict of {', '.join(('obs', *results))}"
    for name, group in spec.groups.items():
        part = rows.get(name) if spec.nested else rows
        if not isinstance(part, dict):
            return f"returned no {name!r}; return a dict for every group of agents"
        lead = (n, *agents(group))
        extras = group.extras if spec.nested else spec.extras
        missing = [key for key in ("obs", *results, *["alive"] * spec.has_agents, *group.extras) if key not in part]
        if missing:
            return f"returned no {', '.join(missing)}; return it for every environment, {[*lead]}"
        if "action_mask" in part and "action_mask" not in extras:  # algorithms without masks would not be refused
            where = f"Group({name!r})" if spec.nested else "EnvSpec"
            return f"returned action_mask; name its space in the extras of the spec's {where}"
        wanted = {"obs": allocate(group.obs, 1)} | {key: np.zeros(1, np.bool_) for key in ENDS if key in results}
        wanted |= {"reward": np.zeros(1, np.float32)} if results else {}
        for key, like in wanted.items():
            if why := _leaves_misfit(key, part[key], like, lead):
                return why
    return None


def _leaves_misfit(key: str, given: Any, like: Any, lead: tuple[int, ...]) -> str | None:
    """Compare an array, or a dict of them, with one row of the expected shape and dtype."""
    if isinstance(like, dict):
        if not isinstance(given, dict) or given.keys() != like.keys():
            got = f"the keys {', '.join(map(repr, given))}" if isinstance(given, dict) else tree.what(given)
            return f"returned {key} with {got}; its space has {', '.join(map(repr, like))}"
        every = (_leaves_misfit(f"{key}[{name!r}]", given[name], inner, lead) for name, inner in like.items())
        return next(filter(None, every), None)
    whose = "its space declares" if key.startswith("obs") else "return"
    shape = (*lead, *like.shape[1:])
    if tuple(getattr(given, "shape", ())) != shape:
        got = f"of shape {[*given.shape]}" if hasattr(given, "shape") else f"as {tree.what(given)}"
        return f"returned {key} {got}; {whose} {[*shape]}"
    if key != "reward" and (dtype := str(given.dtype).removeprefix("torch.")) != str(like.dtype):
        return f"returned {key} of {dtype}; {whose} {like.dtype}"
    return None


def actions_misfit(spec: EnvSpec, out: Batch, n: int) -> str | None:
    """Check the policy's output for a row of ``n`` environments."""
    for name, group in spec.groups.items():
        part, space = out.get(name) if spec.nested else out, group.action
        action = part.get("action") if isinstance(part, dict) else None
        if part is None or not isinstance(action, Tensor):
            return f"returned no action{f' of {name}' * bool(spec.nested)}; return it as a tensor under that key"
        lead = (n, *agents(group))
        if action.shape != (shape := (*lead, *(space.shape or ()))):
            return f"returned actions of shape {[*action.shape]}; return {[*shape]}"
        if action.is_floating_point() != isinstance(space, Box | Hybrid):
            right = "float32" if isinstance(space, Box | Hybrid) else "int64"
            return f"returned actions of {str(action.dtype)[6:]} for {in_words(space)}; return {right}"
        if not isinstance(space, Box):
            first, choices = (space.size, space.discrete) if isinstance(space, Hybrid) else (0, space)
            least, most = (np.broadcast_to(limit, choices.shape or ()) for limit in limits_of(choices) or (0, 0))
            beyond = (values := action.cpu().numpy()[..., first:] if first else action.cpu().numpy()) < least
            beyond |= (values > most) | (values % 1 != 0)
            if beyond.any():
                return f"returned the action {values[beyond][0]}, which is not in {in_words(space)}"
        if why := numbers_misfit(part, torch.empty(lead)):
            return why
    return None


def numbers_misfit(rows: Mapping[str, Any], like: Any) -> str | None:
    """Check for a trailing axis of size 1 on keys with one number per row or agent: it would broadcast later.

    Args:
        like: has the axes of these numbers, ``[..., B]`` or ``[..., B, N]``; None: unknown.
    """
    for key in PER_ROW & rows.keys() if isinstance(like, Tensor) else ():
        x = rows[key]
        if isinstance(x, Tensor) and x.ndim == like.ndim + 1 and x.shape[-1] == 1:
            return f"returned {key} of shape {[*x.shape]}; a row has one number: {key}.squeeze(-1)"
    return None


def agents(group: Group) -> tuple[int, ...]:
    """Return the agent axis of a group; a single agent has none."""
    return (len(group.agents),) if group.agents else ()
