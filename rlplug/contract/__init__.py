"""What a component has to have, and what its methods take and return: a mistake is one error.

    rlplug_x.algo:A.update returned None; return Losses

Nothing of this runs in a hot loop. A class is looked at when a configuration selects it, a model and an optimizer when
they are made, an environment when its spaces are read, at its resets and at its first step (``members``). What acts is
watched while the first row is made, and what learns during the first update (``results``). Rows, samples and features
are looked at in the rooms of those that trade them: ``envs.rows``, ``buffer.samples``, ``nn.trial``.
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
    """A component called its context in a way that cannot be served; the message begins with the call."""

    def __init__(self, message: str) -> None:
        super().__init__("", message)


def named(who: Any, member: str = "") -> str:
    """Return ``rlplug_x.algo:A.update`` for a class, or an object of it, and a member of it."""
    cls = who if isinstance(who, type) else type(who)
    return ".".join(filter(None, (f"{cls.__module__}:{cls.__qualname__}", member)))


def mistake(who: Any, member: str, what: str) -> ConfigError:
    """Return the error that says what is wrong with a member; it names no key, as no setting is to blame."""
    return ConfigError("", f"{named(who, member)} {what}")


def refuse(who: Any, member: str, what: str | None) -> None:
    """Raise the error that says what is wrong with a member; None: nothing is."""
    if what:
        raise mistake(who, member, what)


@contextmanager
def explained(who: Any, member: str, given: Sequence[Any] = ()) -> Iterator[None]:
    """Raise ``ConfigError`` for what a call of a member raises because it uses a contract in another way.

    Args:
        given: what it is called with.
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
