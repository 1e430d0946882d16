"""Single environments, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from rlplug import tree
from rlplug.envs.checking import MisfitError, described, flag, number, writer
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.extras import Extras
from rlplug.envs.goals import goals_of
from rlplug.envs.masks import find_masks, late
from rlplug.envs.seeded import SeededList, first_of
from rlplug.envs.spaces import allocate, columns, execute, inside_obs, single_agent
from rlplug.types import Batch, EnvSpec, EnvTraits, Group

NUMBER: Any = float, int, np.floating, np.integer
FLAG: Any = bool, np.bool_


def render_first(envs: Sequence[Any]) -> Any:
    """Return the image ``[H, W, 3]`` of the first of the environments."""
    return envs[0].render()  # a replaced environment is a new object


class EnvList(SeededList):
    """``B`` environments with equal spaces as one ``VecEnv``.

    Every episode has its own seed, derived from the column's seed and the episode's number: it depends neither on
    other columns nor on earlier episodes. So a column is restored by replaying the actions of its current episode.

    The arrays that ``reset`` and ``step`` return are overwritten by the next call.

    An environment has tasks if it has an attribute ``task_space``, a space. It plays the task of
    ``reset(options={"task": task})``; a reset without options returns the task that it chose in ``info["task"]``.

    Args:
        envs: the environments; the list owns and closes them.
        max_episode_steps: steps after which they truncate; None: never, or unknown.
        frame_stack: number of frames stacked in their observations.
        mask_key: key of action masks in ``info``; None: there are none.
        info_keys: keys of ``info`` that every row has as extras.
        check_bounds: collectors report once if an observation exceeds the bounds of its space.
        env_ids: the environments' global numbers, for messages.
        seed_bits: 32, or 31 for environments that take signed 32-bit integers.
        remake: makes a replacement for an environment that raises or returns values outside its spaces; its column
            starts the next episode, and ``step`` marks it in ``restarted [B]``. None: the run stops.

    Raises:
        ConfigError: two of the environments are one object, or one belongs to another vector; their spaces are not
        supported, or ``info`` lacks a requested key.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        max_episode_steps: int | None = None,
        *,
        frame_stack: int = 1,
        mask_key: str | None = None,
        info_keys: Sequence[str] = (),
        check_bounds: bool = True,
        env_ids: Sequence[int] | None = None,
        seed_bits: int = 32,
        remake: Callable[[], gymnasium.Env[Any, Any]] | None = None,
    ) -> None:
        super().__init__(envs, env_ids, seed_bits, remake)
        obs_space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self._mask_key = mask_key
        info = self._reset(0, 0)[1] if mask_key is not None or info_keys else {}
        self._masks, self._extras = find_masks(action_space, mask_key, info), Extras(info_keys, info)
        mask_size = self._masks.size if self._masks else None
        spec = single_agent(obs_space, action_space, max_episode_steps, frame_stack, mask_size)
        space = getattr(self.envs[0].unwrapped, "task_space", None)
        tasks = {} if space is None else {"task": inside_obs(space) if isinstance(space, Box) else space}
        self.spec = replace(spec, extras=spec.extras | self._extras.spaces | tasks)
        self._execute = execute(action_space)
        self.traits = EnvTraits(
            check_bounds=check_bounds,
            render=partial(render_first, self.envs) if self.envs[0].render_mode == "rgb_array" else None,
            render_fps=self.envs[0].metadata.get("render_fps", 30),
            goals=partial(goals_of, self.envs[0]),
            metrics=self._metrics.drain,
        )
        self.place(rows_of(self.spec, self.num_envs))

    def place(self, rows: Batch) -> None:
        """Write into these arrays, shaped like those of ``rows_of``, from the next ``reset`` on."""
        self._mask = rows.get("action_mask")
        self._first = first_of(self.spec, rows)
        self._obs, self._write = rows["obs"], writer(self.envs[0].observation_space, rows["obs"])
        self._reward, self._terminated, self._truncated = rows["reward"], rows["terminated"], rows["truncated"]
        self._restarted = rows["restarted"]

    def step(self, action: np.ndarray) -> Batch:
        """Step every column; a column whose row is final starts its next episode instead.

        Raises:
            RunError: as for ``reset``.
        """
        reward, terminated, truncated = self._reward, self._terminated, self._truncated
        self._restarted[:] = False
        own = columns(self._execute(action), self.num_envs)
        for i, (outside, inside) in enumerate(zip(own, action.copy(), strict=True)):
            if self._final[i]:
                self._begin(i, self._episodes[i] + 1)
                reward[i], terminated[i], truncated[i] = 0.0, False, False
                continue
            self._log(i, inside)
            try:
                row, gain, end, cut, info = self._steps[i](outside)
                reward[i] = gain if isinstance(gain, NUMBER) else number(gain)
                terminated[i] = end = end if isinstance(end, FLAG) else flag("terminated", end)
                truncated[i] = cut = cut if isinstance(cut, FLAG) else flag("truncated", cut)
                self._final[i] = final = end or cut
                if type(info) is not dict:
                    info = described("step", info)
                self._write(i, row)
                self._extras.write(self._first, i, info)
                if METRICS in info:
                    self._metrics.add(i, info[METRICS])
                if final:
                    self._metrics.end(i)
                if self._masks is not None:
                    self._allow(i, info, final, end)
                elif self._mask_key and self._mask_key in info:
                    raise late(self._mask_key)
                self._failures[i] = 0
            except (Exception, SystemExit) as error:
                self._replace(i, self._failure(i, "step", error), error)
                self._restarted[i], reward[i], terminated[i], truncated[i] = True, 0.0, False, False
        said = {"reward": reward, "terminated": terminated, "truncated": truncated}
        if self._remake is not None:
            said["restarted"] = self._restarted
        return self._first | said

    def _joined(self, log: Sequence[Any]) -> np.ndarray:
        space = self.spec.single_agent.action
        return np.array(log, space.dtype).reshape(len(log), *(space.shape or ()))

    def _replay(self, i: int, actions: np.ndarray) -> None:
        for inside, outside in zip(actions, columns(self._execute(actions), len(actions)), strict=True):
            self._log(i, inside)
            try:
                row, _, end, cut, info = self._steps[i](outside)
                if METRICS in info:
                    self._metrics.add(i, info[METRICS])
                self._write(i, row)
                self._final[i] = flag("terminated", end) or flag("truncated", cut)
            except (Exception, SystemExit) as error:
                raise self._failure(i, "step", error) from error
            if self._final[i]:
                break

    def _first_row(self, i: int, episode: int) -> None:
        row, info = self._reset(i, episode)
        self._metrics.begin(i)
        try:
            self._write(i, row)
            self._extras.write(self._first, i, info, begins=True)
            if self.spec.tasks is not None:
                if (task := self._tasks[i]) is None and (task := info.get("task")) is None:
                    raise MisfitError("reset() without options must return the task that it chose as info['task']")
                tree.put(self._first, i, {"task": task})
            if self._masks is not None:
                self._allow(i, info, False, False)
            elif self._mask_key and self._mask_key in info:
                raise late(self._mask_key)
        except MisfitError as error:
            raise self._failure(i, "reset", error) from error
        self._final[i] = False

    def _allow(self, i: int, info: Mapping[str, Any], final: bool, terminated: bool) -> None:
        assert self._masks is not None
        assert self._mask is not None
        self._mask[i] = self._masks.read(info, final, terminated)


def rows_of(spec: EnvSpec, n: int) -> Batch:
    """Allocate zero rows for ``n`` environments, with masks that allow everything."""
    rows: Batch = {"restarted": np.zeros(n, np.bool_)}
    for name, group in spec.groups.items():
        lead = lead_of(group, n)
        part: Batch = {"obs": allocate(group.obs, *lead), "reward": np.zeros(lead, np.float32)}
        flags = ("terminated", "truncated", *["alive"] * spec.has_agents)
        part |= {key: np.zeros(lead, np.bool_) for key in flags}
        if (mask := (group if spec.nested else spec).extras.get("action_mask")) is not None:
            part["action_mask"] = np.ones((*lead, *(mask.shape or ())), np.bool_)
        rows |= {name: part} if spec.nested else part
    return rows | {key: allocate(space, n) for key, space in spec.extras.items() if key != "action_mask"}


def lead_of(group: Group, n: int) -> tuple[int, ...]:
    """Return the leading axes of rows of a group in ``n`` environments: ``(n, N)`` with agents."""
    return (n, len(group.agents)) if group.agents else (n,)
