"""Overrides -> one resolved configuration, by Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlplug.config.run import RunConfig, parse
from rlplug.registry import warn_broken

if TYPE_CHECKING:
    from omegaconf import DictConfig


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a command line describes, validated.

    >>> compose(["algo=sac", "env=pendulum"]).algo.cfg.gamma
    0.99

    Raises:
        ConfigError: with one line for each mistake.
    """
    warn_broken()
    return parse(plain(composed(overrides)))


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """What Hydra makes of the overrides, its own node ``hydra`` included.

    Raises:
        ConfigError: Hydra refuses.
    """
    import hydra

    from rlplug.config.refusals import explain
    from rlplug.config.session import PRIMARY, session

    with session():
        try:
            return hydra.compose(PRIMARY, list(overrides), return_hydra_config=True)
        except Exception as error:
            raise explain(error, overrides) from None


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain dicts and lists: interpolations resolved, without Hydra's node.

    Raises:
        ConfigError: a value must still be given (``???``), or an interpolation leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlplug.config.refusals import explain

    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        return OmegaConf.to_container(job, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explain(error, ()) from None
