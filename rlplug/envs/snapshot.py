"""Snapshots of a vector environment's state from its attributes, if they can be read exactly."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv, VectorWrapper

from rlplug.types import Tree

_CONSTANT = (Space, EnvSpec, Enum, type, ModuleType, FunctionType, BuiltinFunctionType)
"""Attributes that are not state: the constructor sets them."""
_PLAIN = (bool, int, float, str, bytes, type(None), np.generic)


class _UnreadableError(Exception):
    """An attribute that may hold state is not a number, array or generator."""


def snapshot(env: VectorEnv[Any, Any, Any]) -> Tree | None:
    """Return the attributes of ``env`` and its wrappers, outermost first, as a list of dicts.

    A generator becomes the dict ``bit_generator.state``. Returns None if an attribute cannot be read exactly: an
    object of another kind, or two attributes that share memory, which a copy would separate.
    """
    layers = [_attributes(layer) for layer in _layers(env)]
    leaves = list(_leaves(layers))
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    generators = {id(leaf) for leaf in leaves if not isinstance(leaf, np.ndarray)}
    if len(arrays) + len(generators) < len(leaves):
        return None
    if any(np.may_share_memory(a, b) for k, a in enumerate(arrays) for b in arrays[:k]):
        return None
    try:
        return _read(layers)
    except _UnreadableError:
        return None


def restore(env: VectorEnv[Any, Any, Any], state: Tree) -> None:
    """Set the attributes of ``env``, made by the same constructor call, from a snapshot."""
    for layer, saved in zip(_layers(env), state, strict=True):
        if methods := [name for name in saved if callable(getattr(type(layer), name, None))]:
            raise ValueError(f"{methods[0]!r} is not the state of an environment")
        vars(layer).update(_write(saved))


def _layers(env: VectorEnv[Any, Any, Any]) -> Iterator[VectorEnv[Any, Any, Any]]:
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env
    yield env


def _attributes(layer: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    inner = layer.env if isinstance(layer, VectorWrapper) else None
    return {k: v for k, v in vars(layer).items() if not isinstance(v, _CONSTANT) and (inner is None or v is not inner)}


def _read(value: Any) -> Tree:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if type(value) is dict:
        return {key: _read(part) for key, part in value.items()}
    if type(value) is list:
        return [_read(part) for part in value]
    if type(value) is tuple:
        return tuple(_read(part) for part in value)
    if isinstance(value, _PLAIN):
        return value
    raise _UnreadableError


def _write(saved: Tree) -> Any:
    if isinstance(saved, np.ndarray):
        return saved.copy()
    if type(saved) is dict and isinstance(saved.get("bit_generator"), str):
        kind: Any = getattr(np.random, saved["bit_generator"], None)
        if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
            raise ValueError(f"{saved['bit_generator']!r} is not a generator")
        bits = kind()
        bits.state = saved
        return np.random.Generator(bits)
    if type(saved) is dict:
        return {key: _write(part) for key, part in saved.items()}
    if type(saved) is list:
        return [_write(part) for part in saved]
    if type(saved) is tuple:
        return tuple(_write(part) for part in saved)
    return saved


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the arrays and generators of a tree."""
    if isinstance(value, np.ndarray | np.random.Generator):
        yield value
    elif type(value) in (dict, list, tuple):
        for part in value.values() if type(value) is dict else value:
            yield from _leaves(part)
