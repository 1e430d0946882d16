"""Adapters of environments to the vector environment interface, ``rlplug.api.VecEnv``."""

from typing import TYPE_CHECKING, Any

from rlplug.envs.env_list import EnvList
from rlplug.envs.episode_metrics import EpisodeMetrics
from rlplug.envs.making import Maker, find, make_list, make_native
from rlplug.envs.native import NativeVector
from rlplug.envs.previous import PreviousInputs
from rlplug.envs.spaces import sample_tasks
from rlplug.envs.subprocess import Subprocess
from rlplug.envs.wrapping import Wrapping

if TYPE_CHECKING:
    from rlplug.envs.device_metrics import DeviceMetrics
    from rlplug.envs.simulation import simulated

__all__ = [
    "DeviceMetrics",
    "EnvList",
    "EpisodeMetrics",
    "Maker",
    "NativeVector",
    "PreviousInputs",
    "Subprocess",
    "Wrapping",
    "find",
    "make_list",
    "make_native",
    "sample_tasks",
    "simulated",
]


def __getattr__(name: str) -> Any:
    # these import torch, which worker processes do without
    if name == "simulated":
        from rlplug.envs.simulation import simulated

        return simulated
    if name == "DeviceMetrics":
        from rlplug.envs.device_metrics import DeviceMetrics

        return DeviceMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
