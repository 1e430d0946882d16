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
    on_device = env.traits.device is not None
    if on_device and env.spec.has_agents:
        raise ConfigError("env", "has agents and a device; environments with agents trade arrays of the host")
    if env.autoreset is AutoresetMode.NEXT_STEP:
        return NextStepCollector(env, *args, **kwargs)
    if env.spec.has_agents or on_device:
        whose = "a device" if on_device else "agents"
        said = f"has {whose}, and resets within the step that ends an episode"
        raise ConfigError("env", f"{said}; environments with {whose} reset one later (AutoresetMode.NEXT_STEP)")
    return SameStepCollector(env, *args, **kwargs)
