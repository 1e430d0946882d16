"""Options of buffers that store rows in a ring, and their checks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from rlplug.api import Context
from rlplug.buffer.images import lz4
from rlplug.settings import PositiveInt, UnitFloat, option, settings
from rlplug.types import ConfigError


@settings
class Storage:
    """Options of buffers that store rows in a ring."""

    capacity: PositiveInt = option("Rows kept, over all environments.")
    device: Literal["cpu", "pinned", "learner"] = option(
        "Device that stores the rows: cpu, pinned (asynchronous copies to the accelerator) or learner."
    )
    deduplicate: bool = option("Store a frame of several stacked observations once.")
    compress: Literal["lz4"] | None = option("lz4: compress uint8 images losslessly.")
    compressed_share: UnitFloat = option(
        "Memory for compressed images, as a fraction of their size; if short, the oldest rows are dropped."
    )


def check_first_sequence(ctx: Context) -> None:
    """Raise ``ConfigError`` if updates are due before every environment has filled a sequence.

    Such updates would wait, and then all of them would learn from the first few sequences.
    """
    first = ctx.needs.window.rows * ctx.num_envs
    if ctx.replay_ratio is not None and ctx.learning_starts < first:
        said = f"{ctx.learning_starts} steps of {ctx.num_envs} environments hold no sequence of {ctx.needs.window.rows}"
        said += f" rows, from which replay_ratio={ctx.replay_ratio:g} has to learn; use {first}"
        raise ConfigError("num_steps_sampled_before_learning_starts", said)


def check_compressible(cfg: Storage, ctx: Context) -> None:
    if cfg.device == "learner" and ctx.device.type != "cpu":
        raise ConfigError("buffer.compress", "images are compressed on the host; use buffer.device=cpu or pinned")
    lz4()
    if not any(_holds_images(group.obs) for group in ctx.spec.groups.values()):
        seen = "; ".join(str(group.obs) for group in ctx.spec.groups.values())
        raise ConfigError("buffer.compress", f"only uint8 images are compressed, but observations are {seen}; use null")


def _holds_images(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return any(_holds_images(inner) for inner in space.values())
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2
