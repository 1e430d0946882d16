"""Gymnasium's wrappers for an environment's options, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space, flatten, flatten_space
from gymnasium.wrappers import (
    AtariPreprocessing,
    FrameStackObservation,
    RepeatAction,
    StickyAction,
    TimeLimit,
    TransformObservation,
)

from rlplug.envs.checking import MisfitError
from rlplug.envs.fire import Fire
from rlplug.script import make, parts
from rlplug.types import ConfigError

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """Wraps a single environment, by the options of conf/env/gymnasium.yaml."""

    max_episode_steps: int | None = None
    mask_key: str | None = None
    info_keys: Sequence[str] = ()
    atari: bool = False
    frame_skip: int = 1
    sticky_actions: float | None = None
    fire: bool = False
    wrappers: Sequence[str | Mapping[str, Any]] = ()
    pixels: int | None = None
    drop: Sequence[str] = ()
    flatten: bool = False
    select: Sequence[int] | None = None
    frame_stack: int = 1

    def __call__(self, env: Env) -> Env:
        """Wrap an environment.

        Raises:
            ConfigError: it does not support an option.
        """
        if self.atari:
            if self.pixels is not None:
                raise ConfigError("env.pixels", "renders images, but env.atari=true already observes them; use null")
            # The emulator repeats and randomizes actions; episodes continue after lost lives (Machado et al. 2018).
            env = AtariPreprocessing(env, frame_skip=self.frame_skip)
            if self.frame_stack == 1:
                env = _stacked(env, 1)  # [1, 84, 84], like ALE's own vector
        else:
            if self.frame_skip > 1:
                env = RepeatAction(env, self.frame_skip)
            if self.sticky_actions:
                env = StickyAction(env, self.sticky_actions)
        if self.fire:
            env = Fire(env)
        for i, node in enumerate(self.wrappers):
            env = wrapped(env, node, f"env.wrappers[{i}]")
        if self.max_episode_steps is not None:
            env = TimeLimit(env, self.max_episode_steps)
        if has_mask(env.observation_space, self.mask_key):
            env = MaskToInfo(env, self.mask_key)
        if self.pixels is not None:
            env = Pixels(env, self.pixels)
        space, function = view(env.observation_space, self.drop, None)
        env = _transformed(env, space, function)
        if self.flatten:
            env = _flat(env)
        env = _transformed(env, *view(env.observation_space, (), self.select))
        return _stacked(env, self.frame_stack) if self.frame_stack > 1 else env

    def limit(self, registered: int | None) -> int | None:
        """Return the time limit in steps of the wrapped environment; None: no limit, or unknown."""
        skipped = None if registered is None else -(-registered // self.frame_skip)
        return self.max_episode_steps or skipped


def wrapped(env: Env, node: Any, key: str) -> Env:
    """Wrap an environment by a class of the user, with its arguments.

    Raises:
        ConfigError: there is no such class, or it makes no environment.
    """
    made = make(node, key, env)
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(key, f"{parts(node, key)[0]} returned {type(made).__name__}, which is no gymnasium.Env")
    return made


def has_mask(space: Space[Any], key: str | None) -> bool:
    """Return whether the observation contains the action mask."""
    return key is not None and isinstance(space, Dict) and key in space.spaces


class MaskToInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Moves the action mask from a Dict observation to ``info``."""

    def __init__(self, env: Env, key: str | None) -> None:
        super().__init__(env)
        self.key: Any = key
        self.observation_space, self._without = view(env.observation_space, [self.key], None)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        return self._without(obs), info | {self.key: obs[self.key]}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._without(obs), reward, terminated, truncated, info | {self.key: obs[self.key]}


class Pixels(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Replaces the observation by the rendered image, reduced to ``[size, size, 3]`` uint8 by averages of its areas.

    Raises:
        ConfigError: the environment renders no images.
    """

    def __init__(self, env: Env, size: int) -> None:
        super().__init__(env)
        if env.render_mode != "rgb_array":
            said = (
                f"is {size}, which takes images of render_mode rgb_array, but this environment's is {env.render_mode}"
            )
            raise ConfigError("env.pixels", f"{said}; use null")
        self.size = size
        self.observation_space = Box(0, 255, (size, size, 3), np.uint8)

    def observation(self, observation: Any) -> np.ndarray:
        try:
            shown = np.array(self.env.render())
        except Exception as error:
            raise ConfigError(
                "env.pixels", f"rendering failed ({error}); MuJoCo needs MUJOCO_GL=egl, osmesa or glfw"
            ) from error
        return averaged(shown, self.size)


def averaged(image: np.ndarray, size: int) -> np.ndarray:
    """Return an image ``[H, W, C]`` uint8 as ``[size, size, C]``, the rounded means of its areas."""
    counts, total = np.ones((), np.uint32), image
    for axis in (0, 1):
        begin = np.arange(size) * image.shape[axis] // size
        total = np.add.reduceat(total, begin, axis, np.uint32)  # a larger size than the image's repeats its pixels
        lengths = np.diff(begin, append=image.shape[axis]).clip(1).astype(np.uint32)
        counts = np.multiply.outer(counts, lengths)
    return ((total + counts[..., None] // 2) // counts[..., None]).astype(np.uint8)


def view(
    space: Space[Any], drop: Sequence[str], select: Sequence[int] | None
) -> tuple[Space[Any], Callable[[Any], Any]]:
    """Return the reduced observation space, and the function that maps one observation or a batch to it.

    Args:
        drop: keys to remove from a Dict.
        select: elements of a vector to keep; None: all.

    Raises:
        ConfigError: the observation has no such keys or elements.
    """
    if drop:
        keys = list(space.spaces) if isinstance(space, Dict) else []
        if unknown := [key for key in drop if key not in keys]:
            has = f"the keys {', '.join(keys)}" if keys else f"no keys: it is {space}"
            raise ConfigError("env.drop", f"the observation has no {unknown[0]!r}; it has {has}")
        kept = [key for key in keys if key not in drop]
        if not kept:
            raise ConfigError("env.drop", f"no key of the observation is left; it has {', '.join(keys)}")
        if select is None:
            return Dict({key: space[key] for key in kept}), partial(_kept, kept)  # type: ignore[index]
    if select is not None:
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ConfigError("env.select", f"selects elements of a vector, but the observation is {space}")
        if not select or max(select) >= space.shape[0]:
            raise ConfigError("env.select", f"is {[*select]}; give indices below {space.shape[0]}")
        index = np.array(select)
        low, high = space.low[index], space.high[index]
        return Box(low, high, dtype=space.dtype.type), lambda obs: np.asarray(obs)[..., index]  # type: ignore[arg-type]
    return space, _same


def _kept(keys: Sequence[str], obs: Any) -> dict[str, Any]:
    for key in keys:
        if key not in obs:
            raise MisfitError(f"the observation lacks {key!r}, which its space has")
    return {key: obs[key] for key in keys}


def _same(obs: Any) -> Any:
    return obs


def _transformed(env: Env, space: Space[Any], function: Callable[[Any], Any]) -> Env:
    return env if function is _same else TransformObservation(env, function, space)


def flat_box(space: Space[Any]) -> Box | None:
    """Return the space of the vectors that Gymnasium's ``flatten`` returns; None: it cannot flatten ``space``."""
    try:
        flat = flatten_space(space)
    except NotImplementedError:
        return None
    return flat if isinstance(flat, Box) else None


def _flat(env: Env) -> Env:
    """Flatten the observation to one float vector."""
    space = env.observation_space
    if (flat := flat_box(space)) is None:
        raise ConfigError("env.flatten", f"the observation space {space} cannot be flattened to a vector")
    low, high = flat.low.astype(np.float32), flat.high.astype(np.float32)
    return TransformObservation(env, lambda obs: np.asarray(flatten(space, obs), np.float32), Box(low, high))


def _stacked(env: Env, size: int) -> Env:
    """Stack the last ``size`` images as ``[size, H, W]``, or ``[size * C, H, W]`` with colors."""
    space = env.observation_space
    if not isinstance(space, Box) or len(space.shape) not in (2, 3):
        what = "a vector" if isinstance(space, Box) and len(space.shape) == 1 else f"{space}"
        raise ConfigError("env.frame_stack", f"is {size}, but only images are stacked, and the observation is {what}")
    if len(space.shape) == 3 and space.shape[-1] < space.shape[0]:
        first = Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=space.dtype.type)  # type: ignore[arg-type]
        env = TransformObservation(env, lambda obs: np.moveaxis(obs, -1, 0), first)
    env = FrameStackObservation(env, size, padding_type="zero")
    if len(space.shape) == 2:
        return env
    stack: Any = env.observation_space
    shape = (-1, *stack.shape[2:])
    merged = Box(stack.low.reshape(shape), stack.high.reshape(shape), dtype=stack.dtype.type)
    return TransformObservation(env, lambda obs: obs.reshape(shape), merged)
