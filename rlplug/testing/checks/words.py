"""Select the cases of a check by command line overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rlplug import registry
from rlplug.config import typed
from rlplug.registry import Kind
from rlplug.registry.discovery import until_refresh
from rlplug.testing.checks import envs
from rlplug.testing.checks.runs import Case, node_of, option_of, require
from rlplug.types import ConfigError

ENVS = ("cartpole", "pendulum")
"""test environments of algorithms that accept them and whose manifest names no others"""


@until_refresh
def accepted(algorithm: str, option: str | None = None) -> list[str]:
    """Return the environments that an algorithm accepts, of those that its manifest names, else of ``ENVS``.

    Args:
        option: the YAML file with its options, which may accept others; None: its own.

    Raises:
        AssertionError: there is none.
    """
    cls = registry.load("algo", algorithm)
    node = {key: x for key, x in node_of("algo", option or option_of("algo", algorithm)).items() if key != "name"}
    cfg, found, refusals = typed(cls.Config, node, "algo"), [], []
    named = [word[4:] for word in registry.tried_with("algo", algorithm) if word.startswith("env=")]
    for env_option in [*named, *(() if named and not option else ENVS)]:
        name = node_of("env", env_option)["name"]
        env = envs.make(name, env_option)
        env.close()
        try:
            cls.needs(cfg, env.spec)
            found.append(env_option)
        except ConfigError as error:
            refusals.append(f"{env_option} ({error})")
    require(found, f"it accepts none of {'; '.join(refusals)}: call check_algorithm({algorithm!r}, env=...)")
    return found


def first_case(tried: Sequence[Case], *overrides: str) -> Case:
    """Return the first case that can be built.

    Raises:
        AssertionError: there is none; the message has the refusals.
    """
    refusals = list[str]()
    for case in tried:
        try:
            case.build(*overrides).close()
            return case
        except ConfigError as error:
            refusals.append(f"{case} {' '.join(overrides)}".strip() + f" ({error})")
    raise AssertionError(f"no algorithm that was tried runs with it: {'; '.join(refusals)}")


def changes_of(kind: Kind, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a kind's component that overrides such as ``buffer.capacity=100`` set."""
    found = (word.removeprefix(f"{kind}.").split("=", 1) for word in words if word.startswith(f"{kind}."))
    return {key: yaml.safe_load(value) for key, value in found}
