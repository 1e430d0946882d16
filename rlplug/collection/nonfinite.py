"""Checks of collected data for numbers that are NaN, infinite or out of bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlplug import tree
from rlplug.envs.checking import Bounds
from rlplug.host import on_cpu
from rlplug.types import Batch, RunError, groups_of

CHECKED = ("obs", "reward")


def kind(value: float) -> str:
    """Describe a number that is not finite."""
    return "NaN" if math.isnan(value) else "infinite"


def check_segment(segment: Batch, env_steps: int, env_ids: Sequence[int]) -> None:
    """Raise an error at an observation or a reward that is NaN or infinite.

    ``on_nan=skip`` does not affect this. Skipping a gradient step leaves no trace, but the state of an environment
    that returns such a number cannot be trusted, and its rows would stay in the buffer, in recurrent states and in
    running statistics.

    Args:
        segment: ``[T+1, B]``; copied from a device to the host only if there is such a number.
        env_steps: environment steps of the run before the segment.
        env_ids: global indices of the segment's environments.

    Raises:
        RunError: names the key, the environment and the step of the first such number.
    """
    if not segment["valid"].is_cpu:
        floats = [x for x in tree.leaves(segment) if x.is_floating_point()]
        if math.isfinite(sum(x.sum() for x in floats)):
            return
        segment = on_cpu(segment)
    parts = [(group, key, part[key]) for group, part in groups_of(segment).items() for key in CHECKED if key in part]
    leaves = [(group, path, x.numpy()) for group, key, leaf in parts for path, x in tree.items(leaf, (key,))]
    found, valid = list[tuple[int, str]](), segment["valid"].numpy()
    for group, path, values in leaves:
        if values.dtype.kind == "f" and not math.isfinite(np.vdot(values, values)):
            bad = ~np.isfinite(values).reshape(*valid.shape, -1).all(-1)
            is_reward = path[0] == "reward"
            # also check observations without an action: returns bootstrap from final ones
            for t, b in np.argwhere(bad & valid if is_reward else bad)[:1]:
                step, what = env_steps + int(valid[: t + is_reward].sum()), kind(np.abs(values[t, b]).sum())
                place = f"environment {env_ids[b]} is {what} at environment step {step}"
                found.append((step, f"{'.'.join(path)} of {group and f'{group} in '}{place}"))
    if found:
        raise RunError(min(found)[1])


def check_bounds(
    segment: Batch, env_steps: int, env_ids: Sequence[int], bounds: Bounds | None, found: list[str], where: str = ""
) -> None:
    """If ``found`` is empty, add a description of the first observation outside the bounds of its space to it.

    It does not stop a run, because many environments exceed their declared bounds.

    Args:
        segment, env_steps, env_ids: as in ``check_segment``.
        bounds: bounds of the observations; None: do not check.
        where: end of the description.
    """
    if bounds is None or found or "obs" not in segment:
        return
    segment = on_cpu(segment)
    if (first := bounds.find(tree.map(torch.Tensor.numpy, segment["obs"]))) is not None:
        t, b, what = first
        step = env_steps + int(segment["valid"].numpy()[:t].sum())
        found.append(f"environment {env_ids[b]} at environment step {step}: {what}{where}")
