"""Collection in the learner's process: environments and policy to streams of rows."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rlplug.api import VecEnv
from rlplug.collection.next_step import NextStepCollector
from rlplug.collection.same_step import SameStepCollector


def make_collector(env: VecEnv, *args: Any, **kwargs: Any) -> NextStepCollector:
    """The source that fits the environment's way of resetting. Arguments as of ``NextStepCollector``."""
    return (NextStepCollector if env.autoreset is AutoresetMode.NEXT_STEP else SameStepCollector)(env, *args, **kwargs)
