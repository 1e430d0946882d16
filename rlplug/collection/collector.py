"""Choice of the collector of the learner's process."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rlplug.api import VecEnv
from rlplug.collection.in_process import InProcessCollector
from rlplug.collection.next_step import NextStepCollector
from rlplug.collection.same_step import SameStepCollector


def make_collector(env: VecEnv, *args: Any, **kwargs: Any) -> InProcessCollector:
    """Build the collector for the environment's autoreset mode. Arguments: those of ``InProcessCollector``."""
    return (NextStepCollector if env.autoreset is AutoresetMode.NEXT_STEP else SameStepCollector)(env, *args, **kwargs)
