"""Turning any environment into one kind of vector environment, ``rlplug.api.VecEnv``."""

from rlplug.envs.env_list import EnvList
from rlplug.envs.making import find, make_list, make_native
from rlplug.envs.native import NativeVector

__all__ = ["EnvList", "NativeVector", "find", "make_list", "make_native"]
