"""Tables of a component's options: type, default, range and doc line."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from rlplug.config.errors import show
from rlplug.settings import LARGEST, Nested, is_schedule

BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}


class Option(NamedTuple):
    """One row of a table of options, as text."""

    name: str
    type: str
    default: str
    range: str
    doc: str


def options(config: Any, defaults: Mapping[str, Any]) -> list[Option]:
    """Return the options of a component.

    Args:
        config: its ``Config``, a class decorated with ``rlplug.settings.settings``.
        defaults: its YAML node; an option missing there has no default.
    """
    rows: list[Option] = []
    for name, field in config.__pydantic_fields__.items():
        mark = next((mark for mark in field.metadata if isinstance(mark, Nested)), None)
        if mark is not None:
            inside = "null" if defaults.get(name, {}) is None else defaults.get(name, {}).get("name", "")
            kind = f"{mark.kind}s by name, or null" if mark.several else mark.kind
            rows.append(Option(name, kind, inside, "", field.description or ""))
            continue
        annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        default = show(defaults[name]).strip("'") if name in defaults else ""
        rows.append(Option(name, type_text(annotation), default, range_text(annotation), field.description or ""))
    return rows


def type_text(annotation: Any) -> str:
    """Format a type: ``float or schedule``, ``int or null``, ``'relu' or 'tanh'``, ``list[int]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join("schedule" if is_schedule(member) else type_text(member) for member in arguments)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " or ".join(map(show, arguments))
    if arguments:
        return f"{origin.__name__}[{', '.join(map(type_text, arguments))}]"
    return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def range_text(annotation: Any) -> str:
    """Format the range ``>= 0, <= 1`` of a value, of a schedule's values or of a list's items."""
    found: list[str] = []
    for member in get_args(annotation) if get_origin(annotation) is not Literal else ():
        if not is_schedule(member):
            found += [text for text in range_text(member).split(", ") if text]
    for bound in getattr(annotation, "__metadata__", ()):
        found += [f"{sign} {getattr(bound, name):g}" for name, sign in BOUNDS.items() if _bounds(bound, name)]
    return ", ".join(dict.fromkeys(found))


def _bounds(bound: Any, name: str) -> bool:
    return getattr(bound, name, None) not in (None, LARGEST)  # the implicit bound of integers
