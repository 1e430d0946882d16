"""Simulators that exchange tensors, for ``env=tensors env.entry_point=rlplug.testing.simulators:Points``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug.envs.on_device import first_counter, uniform


class Points:
    """Points on a line that have to reach 1, by steps of up to 0.5, within ``max_episode_steps`` steps.

    An episode begins between -1 and 0, where depends on the column's seed and the number of the episode. A step costs
    0.1; reaching the goal pays 1.

    Args:
        autoreset: ``NextStep``, or ``Disabled``, in which ``reset`` takes a ``reset_mask``.
    """

    independent = traceable = True

    def __init__(
        self, num_envs: int, device: torch.device, autoreset: str = "NextStep", max_episode_steps: int = 12
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset)}
        self.single_observation_space = Box(-np.inf, np.inf, (1,), np.float64)
        self.single_action_space = Box(-0.25, 0.5, (1,), np.float32)
        self.num_envs, self.device, self.max_episode_steps = num_envs, device, max_episode_steps

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin episode 0 of every column, or the next one of the columns in ``options["reset_mask"] [B]``."""
        if seed is not None:
            self._counter, none = first_counter(seed, self.device), torch.zeros(self.num_envs, device=self.device)
            self._place, self._steps, self._over = none.double(), none.long(), none.bool()
        every = torch.ones_like(self._over)
        self._begin(every if options is None else options["reset_mask"])
        return self._place[:, None].clone(), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Move every point, or begin an episode where the last one has ended."""
        waits, automatic = self._over.clone(), self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        self._place.add_(action[:, 0])
        self._steps.add_(1)
        if automatic:
            self._begin(waits)
        there, late = self._place >= 1.0, self._steps >= self.max_episode_steps
        self._over.copy_(there | late)
        return self._place[:, None].clone(), there * 1.0 - 0.1, there, late & ~there, {}

    def _begin(self, where: Tensor) -> None:
        self._place.copy_(torch.where(where, uniform(self._counter + 1) - 1.0, self._place))
        self._counter.add_(where.long())
        self._steps.mul_(~where)
        self._over.mul_(~where)

    def state(self) -> dict[str, Tensor]:
        """Return all that determines the next steps."""
        return {"counter": self._counter, "place": self._place, "steps": self._steps, "over": self._over}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, x in state.items():
            getattr(self, f"_{name}").copy_(x)
