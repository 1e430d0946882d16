"""Adapters of environments to the vector environment interface, ``rlplug.api.VecEnv``."""

from rlplug.envs.env_list import EnvList
from rlplug.envs.making import Maker, find, make_list, make_native
from rlplug.envs.native import NativeVector
from rlplug.envs.simulated import simulated
from rlplug.envs.spaces import sample_tasks
from rlplug.envs.subprocess import Subprocess
from rlplug.envs.wrapping import Wrapping

__all__ = [
    "EnvList",
    "Maker",
    "NativeVector",
    "Subprocess",
    "Wrapping",
    "find",
    "make_list",
    "make_native",
    "sample_tasks",
    "simulated",
]
