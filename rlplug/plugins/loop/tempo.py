"""Updates per environment step."""

from __future__ import annotations

from rlplug.api import Context
from rlplug.types import ConfigError

GIVEN_AWAY = ("rollout", "segments")
"""kinds of data whose samples are used a limited number of times"""


def updates_of(steps: int, per_step: float) -> int:
    """Return the whole updates for ``steps`` environment steps, tolerating rounding errors of the product."""
    return int(max(0, steps) * per_step * (1.0 + 1e-14))


def updates_per_step(ctx: Context) -> float:
    """Return ``replay_ratio``, or its default for null: one per sample if samples are limited, else one per round.

    Raises:
        ConfigError: ``replay_ratio`` exceeds the number of samples.
    """
    round_steps, segments = ctx.rollout_length * ctx.num_envs, ctx.needs.data == "segments"
    most = ctx.sample_uses / ctx.batch_size if segments else 1.0 / round_steps
    if ctx.replay_ratio is not None and ctx.needs.data in GIVEN_AWAY and ctx.replay_ratio > most:
        said = f"{ctx.replay_ratio} requests more updates than there are samples, {most:g} a step; use null"
        raise ConfigError("replay_ratio", said)
    return most if ctx.replay_ratio is None else ctx.replay_ratio
