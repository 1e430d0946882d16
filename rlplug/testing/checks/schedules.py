"""Check that scheduled options have the effect of a constant with the schedule's current value."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rlplug.config import parse
from rlplug.distributed.fabric import one_rank
from rlplug.run.build import build
from rlplug.testing.checks.explorations import accepts
from rlplug.testing.checks.ranks import ask, one_act, one_update
from rlplug.testing.checks.runs import Case, answers, differences, episodes, flat, require, some
from rlplug.types import ConfigError


def check_schedules(case: Case, exploration: str = "") -> None:
    """Check that an update, and acting, at a schedule's later value equal those with that constant value.

    Args:
        exploration: the module whose options are checked; empty: the algorithm's.
    """
    words = [f"exploration=[{exploration}]"] if exploration else []
    where, found = ("exploration", exploration) if exploration else ("algo", ""), case.build(*words)
    found.close()
    options = list(scheduled(found.config.raw, *where))
    if not options:
        return
    question = ask(case, *words)
    question["steps"] = max(question["steps"], 1)
    for key, first, later in options:
        moved = _answer(question, where, key, [[0, first], [1, later]])
        names = differences(_answer(question, where, key, later), moved)
        require(
            not names,
            f"a schedule of {key} that begins at {first:g} and has reached {later:g} is not {later:g} where it is used:"
            f" {some(names)} differ from those with the number. Keep the tensor of ctx.schedule(cfg.{key}), and read it"
            " where it is used: float(), .item() and arithmetic in __init__ fix its first value",
        )


def scheduled(raw: dict[str, Any], group: str, name: str) -> Iterator[tuple[str, float, float]]:
    """Yield the options that may be schedules, each with its value and another one."""
    for key, value in (raw[group][name] if name else raw[group]).items():
        if isinstance(value, list) and value and all(isinstance(p, list | tuple) and len(p) == 2 for p in value):
            value = value[0][1]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        later = 0.1 * value if value else 0.5
        with suppress(ConfigError):
            parse(_with(raw, (group, name), key, [[0, value], [1, later]]))
            yield key, value, later


def _with(raw: dict[str, Any], where: tuple[str, str], key: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    node = raw[where[0]][where[1]] if where[1] else raw[where[0]]
    node[key] = value
    return raw


def _answer(question: dict[str, Any], where: tuple[str, str], key: str, value: Any) -> Any:
    """Return the result of an update, and of acting in mode ``explore``."""
    changed = question | {"raw": _with(question["raw"], where, key, value)}
    updated = one_update(one_rank(), changed)
    if where[1]:
        return updated | one_act(one_rank(), changed)
    with closing(build(parse(changed["raw"]), Path())) as trainer:
        trainer.algorithm.load_state_dict(question["state"])
        trainer.ctx.schedules.refresh(question["steps"])
        acted = answers(trainer.algorithm, trainer.ctx, episodes(trainer, 4), "explore")
    return updated | {f"act.{name}": leaf for name, leaf in flat(acted).items()}


def check_exploration_schedules(tried: Sequence[Case], name: str) -> None:
    """Run ``check_schedules`` with the first algorithm that accepts the module."""
    for case in tried:
        if accepts(case, name):
            check_schedules(case, name)
            return
