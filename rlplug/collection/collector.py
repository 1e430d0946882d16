"""Collection in the learner's process: environments and policy to streams of rows."""

from __future__ import annotations

from typing import Any

from rlplug.api import VecEnv
from rlplug.collection.next_step import InProcess
from rlplug.collection.same_step import Ragged


def collector(env: VecEnv, *args: Any, **kwargs: Any) -> InProcess:
    """The source that fits the environment's way of resetting. Arguments as of ``InProcess``."""
    return (InProcess if env.lockstep else Ragged)(env, *args, **kwargs)
