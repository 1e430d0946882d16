"""Callbacks of the user, without a package: their hooks, episodes, metrics and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rlplug import script, tree
from rlplug.api import Run
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.contract.members import check_hooks
from rlplug.data.recorder import Episodes
from rlplug.envs.episode_metrics import OWN, numbers
from rlplug.envs.seeded import tell_once
from rlplug.functional.returns import by_episode
from rlplug.registry.discovery import unknown
from rlplug.registry.hookspecs import Events
from rlplug.types import Batch, ConfigError, RunError, Tree

HOOKS = [name for name in vars(Events) if name.startswith("rlplug_")]
STATE = "define state(), which returns plain data, and load(state)"


class UserCallbacks:
    """The callbacks of the setting ``callbacks``, on every rank.

    A callback with ``state()`` and ``load(state)`` saves its state itself. Otherwise its attributes are its state.

    Raises:
        ConfigError: one cannot be made, implements no hook, or has a state that a checkpoint cannot hold.
    """

    def __init__(self, nodes: Sequence[Any], num_envs: int) -> None:
        self._each = dict[str, Any]()
        self._episodes = _Episodes(num_envs, self)
        self._metrics = list[Mapping[str, float]]()  # of episodes, including those of jobs, since the last logged row
        for i, node in enumerate(nodes):
            key = f"callbacks[{i}]"
            made = script.make(node, key)
            if isinstance(made, type) or made is None:
                raise ConfigError(
                    key, f"{script.parts(node, key)[0]} made {made!r}; it should make an object with hooks"
                )
            check_hooks(type(made))
            if not any(hasattr(getattr(made, name, None), "rlplug_impl") for name in dir(type(made))):
                raise ConfigError(key, f"{type(made).__qualname__} implements no hook; {unknown('', HOOKS)}")
            _check_state(made, key)
            self._each[f"{i}:{type(made).__qualname__}"] = made

    def register(self, hooks: Any) -> list[Any]:
        """Register and return the callbacks. Segments are cut into episodes if one of them or a logger asks for it."""
        for made in self._each.values():
            hooks.register(made)
        if hooks.hook.rlplug_episode.get_hookimpls():
            hooks.register(self._episodes)
        return [*self._each.values()]

    def add(self, metrics: Iterable[Mapping[str, float] | None]) -> None:
        """Add the metrics of an episode that callbacks returned.

        Raises:
            RunError: one has a name of rlplug's own, or is not a number.
        """
        found = [numbers(one, "rlplug_episode of a callback") for one in metrics if one]
        if taken := next(filter(OWN.fullmatch, chain(*found)), None):
            raise RunError(f"rlplug_episode returned {taken!r}, which rlplug logs itself; use another name")
        self._metrics += found

    def add_job(self, batch: Batch) -> None:
        """Add the environment's own metrics of the episodes of a job; the collector reports those of segments."""
        self._metrics += filter(None, by_episode(batch))

    def drain(self) -> list[Mapping[str, float]]:
        """Return the metrics of the episodes that ended since the last call."""
        found, self._metrics = self._metrics, []
        return found

    def state(self) -> Tree:
        """Return the state of the callbacks, of open episodes, and the metrics that are not logged yet."""
        each = {name: _state(made) for name, made in self._each.items()}
        return {"each": each, "episodes": self._episodes.state(), "metrics": [dict(one) for one in self._metrics]}

    def load(self, state: Tree) -> None:
        """Restore ``state``; new callbacks keep their own state."""
        for name in self._each.keys() & state["each"].keys():
            made, saved = self._each[name], state["each"][name]
            if _has(made, "load"):
                made.load(saved)
            else:
                vars(made).update(saved)
        self._episodes.load(state["episodes"])
        self._metrics = list[Mapping[str, float]](map(tree.numbers, state["metrics"]))


class _Episodes(Episodes):
    """Calls ``rlplug_episode`` for every episode that ended."""

    def __init__(self, num_envs: int, callbacks: UserCallbacks) -> None:
        super().__init__(num_envs)
        self._callbacks = callbacks

    def take(self, run: Run, rows: Batch) -> None:
        parts = [rows] if "reward" in rows else [part for part in rows.values() if isinstance(part, dict)]
        rewards = [part["reward"].reshape(len(part["reward"]), -1) for part in parts]
        total = float(np.concatenate(rewards, 1)[:-1].sum(0, dtype=np.float64).mean())
        episode = {**rows, "return": total, "length": len(rows["valid"]) - 1}
        self._callbacks.add(run.hooks.hook.rlplug_episode(run=run, episode=episode))  # type: ignore[attr-defined]


def _has(made: Any, member: str) -> bool:
    return callable(getattr(made, member, None))


def _check_state(made: Any, key: str) -> None:
    """Check that a callback's state can be saved. Raises ``ConfigError``."""
    who = type(made).__qualname__
    if _has(made, "state") != _has(made, "load"):
        there, lacks = ("state", "load") if _has(made, "state") else ("load", "state")
        raise ConfigError(key, f"{who} has {there}() but no {lacks}(); {STATE}, or neither")
    parts = {"what state() returns": made.state()} if _has(made, "state") else vars_of(made)
    for name, value in parts.items():
        if not _plain(value):
            raise ConfigError(key, f"{who}: {name} ({type(value).__name__}) cannot be saved in a checkpoint; {STATE}")


def _state(made: Any) -> Tree:
    if _has(made, "state"):
        return made.state()
    parts = vars_of(made)
    for name in [name for name, value in parts.items() if not _plain(value)]:
        what = f"{type(made).__qualname__}.{name} ({type(parts.pop(name)).__name__})"
        tell_once(f"callbacks: {what} is not saved in checkpoints; {STATE}")
    return parts


def vars_of(made: Any) -> dict[str, Any]:
    """Return a copy of an object's attributes."""
    return dict(getattr(made, "__dict__", {}))


def _plain(value: Any) -> bool:
    try:
        copy_to_host(value)
    except TypeError:
        return False
    return True
