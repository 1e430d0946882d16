"""A component: a name that a config may select, and where its class lives."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["algo", "model", "buffer", "exploration", "env", "loop", "hardware", "logger"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Component:
    """One line of a plugin's manifest. Names only: making one imports nothing.

    Args:
        kind: what it is; one of ``KINDS``.
        name: what a config writes into ``name:``.
        target: ``"package.module:Class"``, imported when a config selects the component.

    Raises:
        ValueError: no such kind, or the target has another form.
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

    def load(self) -> type[Any]:
        """Import the class.

        Raises:
            ImportError, AttributeError: the plugin's module is broken or lacks the class.
        """
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)
