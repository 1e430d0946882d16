"""A component: a name that a configuration can select, and where its class is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["algo", "model", "buffer", "exploration", "env", "loop", "hardware", "logger"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Component:
    """Declare one component in a plugin's manifest, without importing it.

    Args:
        kind: one of ``KINDS``.
        name: the value of ``name:`` in a configuration.
        target: ``"package.module:Class"``, imported when a configuration selects the component.

    Raises:
        ValueError: the kind is unknown, or the target is malformed.
    """

    kind: Kind
    name: str
    target: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"component {self.name!r}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        module, _, attribute = self.target.partition(":")
        if not module or not attribute.isidentifier():
            raise ValueError(f"{self.kind} {self.name!r}: target {self.target!r} is not 'package.module:Class'")
