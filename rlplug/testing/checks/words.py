"""What the words of a command line choose for a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rlplug.registry import Kind
from rlplug.testing.checks.runs import Case
from rlplug.types import ConfigError


def first_case(tried: Sequence[Case], *overrides: str) -> Case:
    """Return the first run that can be built.

    Raises:
        AssertionError: none can; the message has the refusals.
    """
    refusals = list[str]()
    for case in tried:
        try:
            case.build(*overrides).close()
            return case
        except ConfigError as error:
            refusals.append(f"{case} {' '.join(overrides)}".strip() + f" ({error})")
    raise AssertionError(f"no algorithm that was tried makes a run with it: {'; '.join(refusals)}")


def changes_of(kind: Kind, words: Sequence[str]) -> dict[str, Any]:
    """Return the options that words such as ``buffer.capacity=100`` set of a kind's component."""
    found = (word.removeprefix(f"{kind}.").split("=", 1) for word in words if word.startswith(f"{kind}."))
    return {key: yaml.safe_load(value) for key, value in found}
