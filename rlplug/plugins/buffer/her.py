"""Hindsight experience replay, Andrychowicz et al. 2017 (arXiv:1707.01495)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug.api import Context
from rlplug.buffer import Storage
from rlplug.plugins.buffer.replay import Numbered, Replay
from rlplug.settings import NonNegativeInt, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
CHANGED = ("valid", "terminated", "truncated", "reward", DESIRED)
OPEN = np.iinfo(np.int64).max


class Located(Numbered):
    """A ring that stores where the episode of every row begins and ends.

    Attributes:
        begins: the first row of the episode, or the first one kept by a checkpoint, ``[R, B]``.
        ends: the row of its final observation; ``OPEN`` while it has not ended.
        opened: ``begins`` of the open row, ``[B]``.
    """

    begins: Any
    ends: Any
    opened: Any

    def allocate(self, like: Batch) -> None:
        super().allocate(like)
        self.begins = np.zeros((self.rows, self.columns), np.int64)
        self.ends = np.zeros((self.rows, self.columns), np.int64)
        self.opened = np.zeros(self.columns, np.int64)

    def locate(self, first: int) -> None:
        """Store the episode bounds of the closed rows from ``first`` on."""
        rows = np.arange(first, self.written)[:, None]
        last = self.leaf(("is_first",), rows[:, 0] + 1)  # [n, B]: the next row begins a new episode
        begins = np.maximum.accumulate(np.concatenate([self.opened[None], np.where(last, rows + 1, 0)]))
        ends = np.minimum.accumulate(np.where(last, rows, OPEN)[::-1])[::-1]
        places = rows[:, 0] % self.rows
        self.begins[places], self.ends[places] = begins[:-1], ends
        for column in np.flatnonzero(last.any(0)):  # set the end of earlier rows of these episodes
            earlier = np.arange(max(self.opened[column], self.written - self.rows + 1), first)
            self.ends[earlier % self.rows, column] = ends[0, column]
        self.opened = begins[-1].copy()


class HER(Replay):
    """A uniform replay that relabels ``k`` of ``k + 1`` windows with a goal that their episode achieved.

    The new goal is the achieved goal of one row of the window's episode, chosen by ``strategy`` (section 4.5): a random
    row after the window's transitions, the last row, or any row. An episode that has not ended contributes its rows so
    far. The environment's own ``compute_reward`` gives the rewards of all transitions for this goal, and
    ``compute_terminated`` tells which of them end the episode; no row after the first such transition is valid.

    Raises:
        ConfigError: the environment cannot compute rewards of other goals.
    """

    relabels: ClassVar[frozenset[str]] = frozenset({f"obs.{DESIRED}", "reward", "terminated", "truncated", "valid"})
    ring = Located

    @settings
    class Config(Storage):
        strategy: Literal["future", "final", "episode"] = option(
            "Which achieved goal of the same episode replaces the desired one: of a random row after the"
            " window, of the last row, or of any row."
        )
        k: NonNegativeInt = option("Relabeled windows for each window with its own goal.")

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        obs = spec.single_agent.obs
        parts: dict[str, Any] = dict(obs.spaces) if isinstance(obs, spaces.Dict) else {}
        if missing := [key for key in ("observation", ACHIEVED, DESIRED) if key not in parts]:
            said = f"her reads goals from a Dict observation, and the environment's lacks {', '.join(missing)}: it is"
            raise ConfigError("buffer", f"{said} {obs}; use buffer=replay, or an environment with goals")
        achieved, desired = parts[ACHIEVED], parts[DESIRED]
        if achieved.shape is None or (achieved.shape, achieved.dtype) != (desired.shape, desired.dtype):
            said = f"her replaces desired goals by achieved ones, but these are {achieved} and {desired}"
            raise ConfigError("buffer", f"{said}; both must be arrays of the same space; use buffer=replay")
        return ("obs",)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg, ctx)
        self.cfg, self.goals = cfg, ctx.goals()

    def added(self, ring: Any, first: int) -> None:
        super().added(ring, first)
        ring.locate(first)

    def relabel(self, batch: Batch, row: Any, column: Any) -> None:
        """Relabel the first ``m`` windows ``[n + 1, B]``; on average, ``m`` is ``B k / (k + 1)``."""
        share, which = self.cfg.k / (self.cfg.k + 1), self.ctx.rand(self.batch_size, host=True).double().numpy()
        m = int(self.batch_size * share + self.ctx.rand(1, rows=False, host=True).item())
        if not m:
            return
        leaves: dict[str, Tensor] = batch | batch["obs"]
        arrays = {
            key: leaves[key][:, :m].cpu().numpy() for key in (*CHANGED, ACHIEVED)
        }  # on the CPU: views of the same memory
        valid, terminated, truncated, reward, desired, achieved = arrays.values()
        own = np.logical_and.accumulate(valid[:-1])  # transitions of the window's first episode
        goal = self._goals(row[:m], column[:m], own.sum(0), which[:m])
        desired[:] = goal

        flat = [x[1:].reshape(-1, *goal.shape[1:]) for x in (achieved, desired)]
        np.copyto(reward[:-1], self.goals.reward(*flat).reshape(own.shape), where=own)
        ends = self.goals.terminated(*flat)
        if ends is not None:
            ends = own & ends.reshape(own.shape)
            truncated[:-1] |= own & terminated[:-1] & ~ends  # only the old goal ended it: it is truncated there
            np.copyto(terminated[:-1], ends, where=own)
            valid[1:] &= ~np.logical_or.accumulate(ends)
        if self.device.type != "cpu":
            for key in CHANGED:
                leaves[key][:, :m] = torch.from_numpy(arrays[key]).to(self.device)

    def _goals(self, row: Any, column: Any, length: Any, which: Any) -> Any:
        """Return new goals ``[m, ...]`` for windows with ``length [m]`` transitions of one episode."""
        goals, places, rings = list[Any](), list[Any](), self.rings
        ring: Any
        for ring, mine in rings.split(column):
            first, own = row[mine], column[mine] - ring.begin
            place = first % ring.rows, own
            end = np.minimum(ring.ends[place], ring.written)
            match self.cfg.strategy:
                case "future":
                    low = first + length[mine]
                case "final":
                    low = end
                case "episode":
                    low = np.maximum(ring.begins[place], ring.oldest)
            rows = low + (which[mine] * (end - low + 1)).astype(np.int64)
            goals.append(ring.leaf(("obs", ACHIEVED), rows, own))
            places.append(mine)
        return goals[0] if len(goals) == 1 else np.concatenate(goals)[np.argsort(np.concatenate(places))]

    def nbytes(self, row: Batch) -> int:
        return super().nbytes(row) + 8 * self.columns * (2 * self.rings.rows + 1)
