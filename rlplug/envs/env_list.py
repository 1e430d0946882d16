"""Single environments, stepped one after the other in this process."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.envs.checking import (
    MisfitError,
    began,
    check_seeds,
    described,
    flag,
    number,
    rules_broken,
    take_over,
    writer,
)
from rlplug.envs.extras import Extras
from rlplug.envs.goals import goals_of
from rlplug.envs.masks import find_masks, late
from rlplug.envs.spaces import allocate, equal, execute, inside_obs, single_agent
from rlplug.types import Batch, EnvSpec, EnvTraits, RunError, Tree

RETRIES = 3
"""maximum consecutive replacements of an environment that fails before its first step"""
MOST_RETRIES = 100
"""maximum replacements per column: a recurring fault is not fixed by a restart"""
TASKS = ("task", "next_task")
"""keys of the state: tasks of the columns' current and next episodes"""
NUMBER, FLAG = (float, int, np.floating, np.integer), (bool, np.bool_)
LONGEST = 100_000
"""maximum stored actions of an episode; a longer one cannot be replayed"""


def _render(envs: Sequence[gymnasium.Env[Any, Any]]) -> Any:
    return envs[0].render()  # a replaced environment is a new object


class EnvList:
    """``B`` environments with equal spaces as one ``VecEnv``.

    Every episode has its own seed, derived from the column's seed and the episode's number: it depends neither on
    other columns nor on earlier episodes. So a column is restored by replaying the actions of its current episode.

    The arrays that ``reset`` and ``step`` return are overwritten by the next call.

    An environment has tasks if it has an attribute ``task_space``, a space. It plays that of
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

    autoreset = AutoresetMode.NEXT_STEP

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
        take_over(envs)
        self.envs, self._remake = list(envs), remake
        self.num_envs = n = len(self.envs)
        self.env_ids = list(range(n) if env_ids is None else env_ids)
        self._seeds, self._episodes, self._seed_bits = [0] * n, [0] * n, seed_bits
        self._actions: list[list[Any]] = [[] for _ in range(n)]
        self._final, self._warned = [False] * n, False
        self._failures = [0] * n  # since the last step
        self._replaced = [0] * n  # replacements so far
        self._steps = [env.step for env in self.envs]
        obs_space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self._mask_key = mask_key
        info = self._reset(0, 0)[1] if mask_key is not None or info_keys else {}
        self._masks, self._extras = find_masks(action_space, mask_key, info), Extras(info_keys, info)
        mask_size = self._masks.size if self._masks else None
        spec = single_agent(obs_space, action_space, max_episode_steps, frame_stack, mask_size)
        space = getattr(self.envs[0].unwrapped, "task_space", None)
        tasks = {} if space is None else {"task": inside_obs(space) if isinstance(space, Box) else space}
        self.spec = replace(spec, extras=spec.extras | self._extras.spaces | tasks)
        self._current: list[Tree] = [None] * n  # tasks of the columns' episodes, as given; None: the environment's own
        self._next: list[Tree] = [None] * n  # those of their next episodes
        self._execute = execute(action_space)
        self.traits = EnvTraits(
            check_bounds=check_bounds,
            render=partial(_render, self.envs) if self.envs[0].render_mode == "rgb_array" else None,
            render_fps=self.envs[0].metadata.get("render_fps", 30),
            goals=partial(goals_of, self.envs[0]),
        )
        self.place(rows_of(self.spec, n))

    def place(self, rows: Batch) -> None:
        """Write into these arrays, shaped like those of ``rows_of``, from the next ``reset`` on."""
        self._mask = rows.get("action_mask")
        self._first = {key: rows[key] for key in ("obs", *self.spec.extras)}
        self._obs, self._write = rows["obs"], writer(self.envs[0].observation_space, rows["obs"])
        self._reward, self._terminated, self._truncated = rows["reward"], rows["terminated"], rows["truncated"]
        self._restarted = rows["restarted"]

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start episode 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
            RunError: an environment raises, or returns values outside its spaces.
        """
        check_seeds(seeds, self.num_envs)
        self._seeds = [int(seed) for seed in seeds]
        self.assign(tasks)
        for i in range(self.num_envs):
            self._begin(i, 0)
        return dict(self._first)

    def assign(self, tasks: Tree) -> None:
        self._next = [None if tasks is None else tree.take(tasks, i) for i in range(self.num_envs)]

    def step(self, action: np.ndarray) -> Batch:
        """Step every column; a column whose row is final starts its next episode instead.

        Raises:
            RunError: as for ``reset``.
        """
        reward, terminated, truncated = self._reward, self._terminated, self._truncated
        self._restarted[:] = False
        for i, (outside, inside) in enumerate(zip(self._execute(action), action.copy(), strict=True)):
            if self._final[i]:
                self._begin(i, self._episodes[i] + 1)
                reward[i], terminated[i], truncated[i] = 0.0, False, False
                continue
            if len(self._actions[i]) < LONGEST:
                self._actions[i].append(inside)
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

    def state(self) -> Tree | None:
        """Return each column's seed, episode and its actions ``[L, ...]``, and all columns' rows.

        Returns None, with a warning the first time, while an episode is too long to be replayed.
        """
        if any(len(log) >= LONGEST for log in self._actions):
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"an episode of {LONGEST} steps or more is not replayed: a run resumed from here begins new"
                    " episodes and does not continue exactly",
                    stacklevel=2,
                )
            return None
        space = self.spec.single_agent.action
        return {
            "seeds": list(self._seeds),
            "episodes": list(self._episodes),
            "actions": [np.array(log, space.dtype).reshape(len(log), *(space.shape or ())) for log in self._actions],
            "obs": tree.map(np.array, self._obs),
        } | self._tasks()

    def _tasks(self) -> Tree:
        """Return the tasks of the columns' current and next episodes, if there are tasks."""
        given = dict(zip(TASKS, (self._current, self._next), strict=True)) if self.spec.tasks is not None else {}
        return {key: [x if x is None else tree.map(np.asarray, x) for x in tasks] for key, tasks in given.items()}

    def load(self, state: Tree) -> None:
        """Replay every column's current episode. Warns if an environment does not reproduce it."""
        self._seeds, nothing = list(state["seeds"]), [None] * self.num_envs
        # numbers are scalars of NumPy, as after ``assign``
        given = ([x if x is None else tree.map(lambda x: x[()], x) for x in state.get(key, nothing)] for key in TASKS)
        self._next, later = given
        for i, (episode, actions) in enumerate(zip(state["episodes"], state["actions"], strict=True)):
            self._begin(i, episode)
            for inside, outside in zip(actions, self._execute(actions), strict=True):
                self._actions[i].append(inside)
                try:
                    row, _, end, cut, _ = self._steps[i](outside)
                    self._write(i, row)
                    self._final[i] = flag("terminated", end) or flag("truncated", cut)
                except (Exception, SystemExit) as error:
                    raise self._failure(i, "step", error) from error
                if self._final[i]:
                    break
        self._next = later
        if not equal(self._obs, state["obs"]):
            warnings.warn(
                f"{self.envs[0]} is not deterministic: replaying equal seeds and actions gave a different"
                " observation, so the run does not continue exactly",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close all environments; an error in one is reported once and does not stop the others."""
        for env in self.envs:
            close(env)

    def _begin(self, i: int, episode: int) -> None:
        try:
            self._first_row(i, episode)
        except RunError as error:
            self._replace(i, error, error.__cause__)

    def _replace(self, i: int, failure: RunError, cause: BaseException | None) -> None:
        """Replace a failed environment, and start its next episode.

        Raises:
            RunError: ``failure``, if replacements are off or exhausted.
        """
        self._failures[i] += 1
        self._replaced[i] += 1
        if self._remake is None or self._failures[i] > RETRIES:
            raise failure from cause
        if self._replaced[i] > MOST_RETRIES:
            raise RunError(f"{failure}\n{self._where(i)} was replaced {MOST_RETRIES} times already") from cause
        last = str(failure).strip().splitlines()[-1]
        print(f"rlplug: {self._where(i)} failed, and is replaced: {last}", file=sys.stderr, flush=True)
        with suppress(Exception, SystemExit):  # it is broken
            self.envs[i].close()
        self.envs[i] = self._remake()
        take_over(self.envs[i : i + 1])
        self._steps[i] = self.envs[i].step
        self._begin(i, self._episodes[i] + 1)

    def _first_row(self, i: int, episode: int) -> None:
        row, info = self._reset(i, episode)
        try:
            self._write(i, row)
            self._extras.write(self._first, i, info, begins=True)
            if self.spec.tasks is not None:
                self._write_task(i, info)
            if self._masks is not None:
                self._allow(i, info, False, False)
            elif self._mask_key and self._mask_key in info:
                raise late(self._mask_key)
        except MisfitError as error:
            raise self._failure(i, "reset", error) from error
        self._final[i] = False

    def _write_task(self, i: int, info: Mapping[str, Any]) -> None:
        """Write the task of a column's new episode; that of the environment's own is in ``info``."""
        if (task := self._current[i]) is None and (task := info.get("task")) is None:
            raise MisfitError("reset() without a task returned no 'task' in info, which names that of the episode")
        tree.put(self._first["task"], i, task)

    def _reset(self, i: int, episode: int) -> tuple[Any, Mapping[str, Any]]:
        self._episodes[i], self._actions[i], self._current[i] = episode, [], self._next[i]
        options = {} if self._next[i] is None else {"options": {"task": self._next[i]}}
        try:
            return began(self.envs[i].reset(seed=self._seed(i), **options))
        except (Exception, SystemExit) as error:
            raise self._failure(i, "reset", error) from error

    def _seed(self, i: int) -> int:
        """Return the seed of the column's current episode, in ``[0, 2**seed_bits)``."""
        drawn = np.random.SeedSequence([self._seeds[i], self._episodes[i]]).generate_state(1)[0]
        return int(drawn) >> (32 - self._seed_bits)

    def _needs_31_bits(self, i: int) -> bool:
        """Return whether an environment that failed to reset accepts a seed of 31 bits."""
        if self._seed(i) < 2**31:
            return False
        with suppress(Exception, SystemExit):
            self.envs[i].reset(seed=self._seed(i) >> 1)
            return True
        return False

    def _allow(self, i: int, info: Mapping[str, Any], final: bool, terminated: bool) -> None:
        assert self._masks is not None
        assert self._mask is not None
        self._mask[i] = self._masks.read(info, final, terminated)

    def _where(self, i: int) -> str:
        return (
            f"environment {self.env_ids[i]} (episode {self._episodes[i]}, seed {self._seed(i)},"
            f" step {len(self._actions[i])})"
        )

    def _failure(self, i: int, where: str, error: Exception | SystemExit) -> RunError:
        if said := str(error) if isinstance(error, MisfitError) else rules_broken(where, error):
            return RunError(f"{self._where(i)}: {said}")
        if where == "reset" and self._needs_31_bits(i):
            way = "it accepts 31 bits: set env.seed_bits=31"
            return RunError(f"{self._where(i)} rejects this seed ({type(error).__name__}: {error}); {way}")
        inside = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's own frame
        lines = traceback.format_exception(type(error), error, inside)
        return RunError(f"{self._where(i)} raised in {where}():\n{''.join(lines).rstrip()}")


def close(env: Any) -> None:
    """Close an environment or a vector; report an error once."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        tell_once(f"an environment raised in close(), which is ignored: {type(error).__name__}: {error}")


@cache
def tell_once(line: str) -> None:
    """Print a line once per process."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)


def rows_of(spec: EnvSpec, n: int) -> Batch:
    """Allocate zero rows for ``n`` environments."""
    rows: Batch = {
        "obs": allocate(spec.single_agent.obs, n),
        "reward": np.zeros(n, np.float32),
        "terminated": np.zeros(n, np.bool_),
        "truncated": np.zeros(n, np.bool_),
        "restarted": np.zeros(n, np.bool_),
    }
    for key, space in spec.extras.items():
        mask = key == "action_mask"
        rows[key] = np.ones((n, *(space.shape or ())), np.bool_) if mask else allocate(space, n)
    return rows
