"""Component configs in one line, for tests."""

from __future__ import annotations

from typing import Any

from rlplug.types import ConfigError


def config(of: str, **changes: Any) -> Any:
    """Return a component's typed ``Config`` from its YAML file: ``config("algo/ppo", gamma=0.9)``.

    Args:
        of: ``<kind>/<option>``, the YAML file below ``conf/``.
        changes: options to set.

    Raises:
        ConfigError: there is no such file, a change is invalid, or a required option (``???``) is missing.
    """
    from rlplug.config import choose, default_node  # here: see ``context``

    kind, _, option = of.partition("/")
    node = default_node(kind, option, changes)  # type: ignore[arg-type]
    for key, value in node.items():
        if value == "???":
            raise ConfigError(f"{kind}.{key}", f"must be given: config({of!r}, {key}=...)")
    return choose(kind, kind, node).cfg  # type: ignore[arg-type]
