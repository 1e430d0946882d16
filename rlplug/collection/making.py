"""Choice of what plays a shard."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rlplug.api import VecEnv
from rlplug.collection.next_step import NextStepCollector
from rlplug.collection.same_step import SameStepCollector
from rlplug.collection.shard import ShardCollector
from rlplug.types import ConfigError


def make_shard(env: VecEnv, *args: Any, **kwargs: Any) -> ShardCollector:
    """Build the collector for the environment's autoreset mode. Arguments: those of ``ShardCollector``."""
    if env.autoreset is AutoresetMode.NEXT_STEP:
        return NextStepCollector(env, *args, **kwargs)
    if env.spec.has_agents:
        said = "has agents, and resets within the step that ends an episode; environments with agents reset one later"
        raise ConfigError("env", f"{said} (AutoresetMode.NEXT_STEP)")
    return SameStepCollector(env, *args, **kwargs)
