"""Simulators that exchange tensors on a device, such as those on Isaac, MuJoCo Warp or SAPIEN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, EnvTraits, VecEnv
from rlplug.envs.checking import check_seeds
from rlplug.envs.device_metrics import DeviceMetrics
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.spaces import inside_action, order_of, parts_of, single_agent
from rlplug.script import make
from rlplug.settings import option, settings
from rlplug.types import Batch, ConfigError, RunError, Tree

KEY = "env.entry_point"
MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
NEEDED = ("single_observation_space", "single_action_space", "metadata", "reset", "step")


class Tensors(VecEnv):
    """A batch of environments with ``gymnasium.vector.VectorEnv``'s interface, but tensors on the learner's device.

    ``entry_point(num_envs=..., device=..., **kwargs)`` makes it. It has ``single_observation_space``,
    ``single_action_space`` and ``metadata["autoreset_mode"]``; ``reset(seed=[...])`` returns observations and info, and
    ``step(action)`` observations, reward ``[B]``, terminated ``[B]`` and truncated ``[B]`` bool, and info.

    In the mode ``NEXT_STEP``, the step after the end of an episode ignores the action and begins the next one. In
    ``DISABLED``, ``reset(options={"reset_mask": mask})`` is called instead, with a bool tensor ``[B]``; it begins
    episodes in these columns, and returns the observations of all.

    If the ``info`` of ``reset`` has ``metrics``, a dict of tensors ``[B]``, those of its names in the ``info`` of steps
    are averaged over each episode and logged. NaN: a column has none in this step.

    Optional members: ``state()`` and ``load(state)``, a tree of tensors, so that a resumed run continues the episodes;
    ``max_episode_steps``, for information; ``independent = True`` if no column depends on another;
    ``traceable = True``, in the mode ``NEXT_STEP``, if ``step`` changes nothing but tensors in place, so that whole
    rollouts can be captured in a CUDA graph; ``close()``.

    Raises:
        ConfigError: the environment cannot be made, lacks a member, or resets within a step; or rendering is requested.
    """

    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        entry_point: str = option("module:function that makes the simulator for num_envs=... and device=....")
        kwargs: dict[str, Any] = option("Further arguments of the function.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "environments on a device cannot render; use 0")
        self.device, self.num_envs = ctx.device, len(ctx.env_ids)
        arguments = {**cfg.kwargs, "num_envs": self.num_envs, "device": self.device}
        self.env: Any = make({"entry_point": cfg.entry_point, "kwargs": arguments}, KEY)
        if missing := [name for name in NEEDED if not hasattr(self.env, name)]:
            raise ConfigError(KEY, f"{cfg.entry_point} returned {type(self.env).__name__} without {', '.join(missing)}")
        if (mode := self.env.metadata.get("autoreset_mode")) not in MODES:
            said = f"{cfg.entry_point} has metadata['autoreset_mode'] {mode!r}"
            raise ConfigError(KEY, f"{said}; should be AutoresetMode.NEXT_STEP, or DISABLED with a reset_mask")
        obs, action = self.env.single_observation_space, self.env.single_action_space
        self.spec = single_agent(obs, action, getattr(self.env, "max_episode_steps", None))
        self._metrics = DeviceMetrics()
        self._resets, self._obs, self._executed = mode is AutoresetMode.DISABLED, obs, executed(action, self.device)
        self.traits = EnvTraits(
            check_bounds=False,
            independent=bool(getattr(self.env, "independent", False)),
            device=self.device,
            traceable=not self._resets and bool(getattr(self.env, "traceable", False)),
            metrics=self._metrics.drain,
        )

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin an episode in every column.

        Raises:
            ValueError: there is not one seed per column.
            RunError: the observations are not tensors of the declared space on the device.
        """
        check_seeds(seeds, self.num_envs)
        obs, info = self.env.reset(seed=[int(seed) for seed in seeds])
        self._metrics.begin(self._measured(info))
        self._over = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return {"obs": self._read("observation", self._obs, obs)}

    def step(self, action: Tensor) -> Batch:
        """Step every column; a column whose row is final begins its next episode instead.

        Raises:
            RunError: as for ``reset``.
        """
        going = self._over.logical_not()
        obs, reward, terminated, truncated, info = self.env.step(self._executed(action))
        numbers = self._tensor("reward", reward, ()).float()
        ends = (self._tensor("terminated", terminated, ()).bool(), self._tensor("truncated", truncated, ()).bool())
        terminated, truncated = (x & going for x in ends)
        if self._resets and bool(self._over.any()):
            obs, _ = self.env.reset(options={"reset_mask": self._over.clone()})
        self._over.copy_(terminated | truncated)
        self._metrics.add(self._measured(info), going, self._over)
        said = {"reward": torch.where(going, numbers, 0.0), "terminated": terminated, "truncated": truncated}
        return {"obs": self._read("observation", self._obs, obs)} | said

    def _measured(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: self._tensor(f"metric {name!r}", x, ()) for name, x in info.get(METRICS, {}).items()}

    def _read(self, name: str, space: Space[Any], x: Any) -> Any:
        """Return an observation as described in ``envs.spaces``."""
        if isinstance(space, Dict):
            return {key: self._read(f"{name}[{key!r}]", sub, x[key]) for key, sub in space.spaces.items()}
        if isinstance(space, Tuple):
            return {str(i): self._read(f"{name}[{i}]", sub, x[i]) for i, sub in enumerate(space.spaces)}
        x = self._tensor(name, x, space.shape or ())
        if isinstance(space, Discrete | MultiDiscrete):
            return x.long() - torch.as_tensor(space.start, device=self.device)
        return x.float() if x.is_floating_point() else x

    def _tensor(self, name: str, x: Any, shape: tuple[int, ...]) -> Tensor:
        expected = (self.num_envs, *shape)
        if isinstance(x, Tensor) and x.shape == expected and x.device == self.device:
            return x
        found = f"{[*x.shape]} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise RunError(f"{KEY}: the {name} is {found}; expected a tensor {[*expected]} on {self.device}")

    def state(self) -> Tree | None:
        """Return the simulator's state, or None if it has none to save: a resumed run then begins new episodes."""
        if not (hasattr(self.env, "state") and hasattr(self.env, "load")):
            return None
        return {"env": tree.map(torch.clone, self.env.state()), "over": self._over.clone()} | self._metrics.state()

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this simulator.
        """
        tree.check_like(self.state(), state, "env", exact=True)
        own = tree.map(lambda x: x.to(self.device, copy=True), state)
        self.env.load(own["env"])
        self._metrics.load(state)
        self._over.copy_(own["over"])  # in place: a captured graph reads this memory

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def executed(space: Space[Any], device: torch.device) -> Callable[[Tensor], Any]:
    """Return a function from inside actions ``[B, ...]`` to the simulator's own, as ``envs.spaces.execute`` for arrays.

    Box actions are rescaled from [-1, 1] if they are bounded on both sides, and clipped to their bounds.
    """
    run, order = _executed(space, device), order_of(space)
    if order is None:
        return run
    index = torch.as_tensor(order, device=device)
    return lambda action: run(action[:, index])


def _executed(space: Space[Any], device: torch.device) -> Callable[[Tensor], Any]:
    """Return ``executed`` of actions whose parts are in the order of the space."""
    if isinstance(space, Dict | Tuple):
        each = [(key, _executed(sub, device), inside_action(sub).shape or ()) for key, sub in parts_of(space).items()]
        sizes = [math.prod(shape) for *_, shape in each]

        def apart(action: Tensor) -> Any:
            pieces = action.flatten(1).split(sizes, 1) if action.ndim > 1 else (action,)
            parts = {key: run(x.view(-1, *shape)) for (key, run, shape), x in zip(each, pieces, strict=True)}
            return parts if isinstance(space, Dict) else tuple(parts.values())

        return apart
    if isinstance(space, Box) and np.isfinite([space.low, space.high]).any():
        low, high = (torch.as_tensor(bound, dtype=torch.float32, device=device) for bound in (space.low, space.high))
        both = low.isfinite() & high.isfinite()
        scale, middle = torch.where(both, high / 2 - low / 2, 1.0), torch.where(both, high / 2 + low / 2, 0.0)
        return lambda action: torch.minimum(torch.maximum(action * scale + middle, low), high)
    if isinstance(space, Box):
        return lambda action: action
    start: Any = getattr(space, "start", 0)
    if np.any(start):
        offset = torch.as_tensor(start, device=device)
        return lambda action: action.long() + offset
    return lambda action: action.long()
