"""Environments of which every episode has its own seed, so that it can be replayed."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.envs.checking import MisfitError, began, check_seeds, rules_broken, take_over
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.episode_metrics import EpisodeMetrics
from rlplug.envs.numbering import numbered
from rlplug.envs.spaces import equal
from rlplug.types import Batch, EnvSpec, EnvTraits, RunError, Tree

RETRIES = 3
"""maximum consecutive replacements of an environment that fails before its first step"""
MOST_RETRIES = 100
"""maximum replacements per column: a recurring fault is not fixed by a restart"""
LONGEST = 100_000
"""maximum stored actions of an episode; a longer one cannot be replayed"""


class SeededList:
    """``B`` environments whose episodes have seeds of their own, derived from the column's seed and their number.

    An episode depends neither on other columns nor on earlier episodes, so a column is restored by replaying the
    actions of its current episode.

    A subclass sets ``spec`` and ``_first``, the rows that ``reset`` returns, in arrays that ``reset`` and ``step``
    overwrite.

    Args:
        envs: the environments; the list owns and closes them.
        env_ids: the environments' global numbers, for messages and for ``remake``.
        seed_bits: 32, or 31 for environments that take signed 32-bit integers.
        remake: makes a replacement for an environment that raises or returns values outside its spaces; its column
            starts the next episode, and ``step`` marks it in ``restarted [B]``. None: the run stops.

    Raises:
        ConfigError: two of the environments are one object, or one belongs to another vector.
    """

    autoreset = AutoresetMode.NEXT_STEP
    spec: EnvSpec
    traits: EnvTraits
    _first: Batch

    def __init__(
        self,
        envs: Sequence[Any],
        env_ids: Sequence[int] | None = None,
        seed_bits: int = 32,
        remake: Callable[[], Any] | None = None,
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
        self._tasks: list[Tree] = [None] * n  # tasks of the columns' episodes, as given; None: the environment's own
        self._next: list[Tree] = [None] * n  # tasks of their next episodes
        self._metrics = EpisodeMetrics(n)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start episode 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
            RunError: an environment raises, or returns values outside its spaces.
        """
        check_seeds(seeds, self.num_envs)
        self._seeds = [int(seed) for seed in seeds]
        self._metrics.clear()
        self.assign(tasks)
        for i in range(self.num_envs):
            self._begin(i, 0)
        return dict(self._first)

    def assign(self, tasks: Tree) -> None:
        self._next = [None if tasks is None else tree.take(tasks, i) for i in range(self.num_envs)]

    def state(self) -> Tree | None:
        """Return each column's seed, episode and its actions ``[L, ...]``, all columns' observations, and metrics.

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
        return {
            "seeds": list(self._seeds),
            "episodes": list(self._episodes),
            "actions": [self._joined(log) for log in self._actions],
            "obs": tree.map(np.array, observed(self.spec, self._first)),
            METRICS: [own for _, own in self._metrics.ended if own],
        } | ({} if self.spec.tasks is None else {"tasks": _stored(self._tasks), "next_tasks": _stored(self._next)})

    def load(self, state: Tree) -> None:
        """Replay every column's current episode. Warns if an environment does not reproduce it."""
        self._seeds, nothing = list(state["seeds"]), [None] * self.num_envs
        self._next = _scalars(state.get("tasks", nothing))
        for i, (episode, actions) in enumerate(zip(state["episodes"], state["actions"], strict=True)):
            self._begin(i, episode)
            self._replay(i, actions)
        self._next = _scalars(state.get("next_tasks", nothing))
        # without those of episodes that end in the replay; the others are not assigned to columns any more
        self._metrics.ended = [(0, own) for own in state.get(METRICS, ())]
        if not equal(observed(self.spec, self._first), state["obs"]):
            warnings.warn(
                f"{self.envs[0]} is not deterministic: replaying equal seeds and actions gave a different"
                " observation, so the run does not continue exactly",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close all environments; an error in one is reported once and does not stop the others."""
        for env in self.envs:
            close(env)

    def _log(self, i: int, action: Any) -> None:
        """Store an action of column ``i`` to be replayed."""
        if len(self._actions[i]) < LONGEST:
            self._actions[i].append(action)

    def _joined(self, log: Sequence[Any]) -> Tree:
        """Return the actions of an episode, leaves ``[L, ...]``."""
        raise NotImplementedError

    def _replay(self, i: int, actions: Tree) -> None:
        """Execute actions, leaves ``[L, ...]``, in column ``i``."""
        raise NotImplementedError

    def _first_row(self, i: int, episode: int) -> None:
        """Begin an episode in column ``i``, and write its first row. Raises ``RunError``."""
        raise NotImplementedError

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
        self.envs[i] = numbered(self._remake, self.env_ids[i])()
        take_over(self.envs[i : i + 1])
        self._steps[i] = self.envs[i].step
        self._begin(i, self._episodes[i] + 1)

    def _reset(self, i: int, episode: int) -> tuple[Any, Mapping[str, Any]]:
        self._episodes[i], self._actions[i], self._tasks[i] = episode, [], self._next[i]
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


def _stored(tasks: Sequence[Tree]) -> list[Tree]:
    return [task if task is None else tree.map(np.asarray, task) for task in tasks]


def _scalars(tasks: Sequence[Tree]) -> list[Tree]:
    """Return stored tasks as ``assign`` had them: numbers as scalars of NumPy."""
    return [task if task is None else tree.map(lambda x: np.asarray(x)[()], task) for task in tasks]


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


def observed(spec: EnvSpec, rows: Batch) -> Tree:
    """Return the observations of rows, by group if there are several."""
    return {name: rows[name]["obs"] for name in spec.nested} or rows["obs"]


def first_of(spec: EnvSpec, rows: Batch) -> Batch:
    """Return the part of rows that ``reset`` returns: observations, extras and which agents are alive."""
    alive = ["alive"] * spec.has_agents
    keys = {name: ("obs", *alive, *spec.groups[name].extras) for name in spec.nested}
    parts = {name: {key: rows[name][key] for key in named} for name, named in keys.items()}
    return (parts or {key: rows[key] for key in ("obs", *alive)}) | {key: rows[key] for key in spec.extras}
