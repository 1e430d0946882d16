"""Checks of components against their contracts: members, arguments and results. A violation is one error.

    rlplug_x.algo:A.update returned None; return Losses

No check runs in a hot loop. A class is checked when a configuration selects it, a model and an optimizer when they are
built, an environment when its spaces are read, at resets and at its first step (``members``). Acting is checked on the
first row, and learning in the first update (``results``). Rows, samples and features are checked in ``envs.rows``,
``buffer.samples`` and ``nn.trial``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlplug.api import Job, Losses, Needs, Optim, Segment
from rlplug.plan import Plan
from rlplug.registry.discovery import unknown
from rlplug.types import KEYS, ConfigError, EnvSpec, Group

RECORDS = {cls.__name__: cls for cls in (Needs, Losses, Optim, Plan, Job, Segment, EnvSpec, Group)}


class MisuseError(ConfigError):
    """Invalid call of a context by a component; the message begins with the call."""

    def __init__(self, message: str) -> None:
        super().__init__("", message)


def named(who: Any, member: str = "") -> str:
    """Return ``rlplug_x.algo:A.update`` for a class or instance and its member."""
    cls = who if isinstance(who, type) else type(who)
    return ".".join(filter(None, (f"{cls.__module__}:{cls.__qualname__}", member)))


def mistake(who: Any, member: str, what: str) -> ConfigError:
    """Return the error about a member; it has no key, because no setting is at fault."""
    return ConfigError("", f"{named(who, member)} {what}")


def refuse(who: Any, member: str, what: str | None) -> None:
    """Raise the error ``what`` about a member, unless it is None."""
    if what:
        raise mistake(who, member, what)


@contextmanager
def explained(who: Any, member: str, given: Sequence[Any] = ()) -> Iterator[None]:
    """Convert exceptions of a member's call that result from misuse of a contract to ``ConfigError``.

    Args:
        given: arguments of the call.
    """
    try:
        yield
    except MisuseError as error:
        raise mistake(who, member, f"uses {error.message}") from error
    except TypeError as error:
        found = re.match(r"(\w+)\.__init__\(\) (?:.*unexpected keyword argument '(\w+)')?", said := str(error))
        if found is None or (cls := RECORDS.get(found[1])) is None:
            raise
        if key := found[2]:
            said = f"{found[1]}({key}=...); {unknown(key, cls.__dataclass_fields__)}"
        raise mistake(who, member, f"calls {said}") from error
    except KeyError as error:
        key, rows = str(*error.args[:1]), [x for x in given if isinstance(x, dict)]
        if key not in KEYS or not rows or any(key in row for row in rows):
            raise
        said = f"reads {key!r}, which its rows lack; name it in needs, or let prepare compute it"
        raise mistake(who, member, said) from error
