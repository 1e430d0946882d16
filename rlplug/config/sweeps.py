"""A sweep is checked before its first job starts."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from rlplug.config.composition import compose
from rlplug.config.hydra_errors import explain
from rlplug.config.session import session


def check_sweep(overrides: Sequence[str]) -> None:
    """Compose and validate every value of every swept key once, each beside the first values of the others.

    Ranges that a sweeper draws from (``interval``) are left to its jobs, and so are pairs of values that do not
    get along.

    Raises:
        ConfigError: a value is wrong.
    """
    with session() as loader:
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
            swept = [
                [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
                for override in parsed
                if override.is_discrete_sweep()
            ]
        except Exception as error:
            raise explain(error, overrides) from None
    fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    firsts = [values[0] for values in swept]
    compose([*fixed, *firsts])
    for i, values in enumerate(swept):
        for value in values[1:]:
            compose([*fixed, *firsts[:i], value, *firsts[i + 1 :]])
