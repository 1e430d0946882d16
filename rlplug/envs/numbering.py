"""Arguments of environments that contain their number in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

NUMBER = "{env_id}"


def numbered(make: Any, env_id: int) -> Any:
    """Return ``make`` with a number for every ``{env_id}`` in its ``kwargs``: an integer, or a part of a string."""
    kwargs = getattr(make, "kwargs", {})
    return replace(make, kwargs=_put(kwargs, env_id)) if contains_number(kwargs) else make


def contains_number(kwargs: Mapping[str, Any]) -> bool:
    """Return whether arguments differ from one environment to another."""
    return bool(_put(kwargs, 0) != dict(kwargs))


def _put(value: Any, env_id: int) -> Any:
    if isinstance(value, str):
        return env_id if value == NUMBER else value.replace(NUMBER, str(env_id))
    if isinstance(value, Mapping):
        return {key: _put(inner, env_id) for key, inner in value.items()}
    return [_put(inner, env_id) for inner in value] if isinstance(value, list) else value
