"""Overrides -> one resolved configuration, by Hydra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplug.config.run import SEVERAL, RunConfig, parse
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
    return parse(plain(composed(overrides), overrides))


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """What Hydra makes of the overrides, its own node ``hydra`` included.

    Raises:
        ConfigError: Hydra refuses.
    """
    import hydra

    from rlplug.config.hydra_errors import explain
    from rlplug.config.session import PRIMARY, session

    with session():
        try:
            return hydra.compose(PRIMARY, list(overrides), return_hydra_config=True)
        except Exception as error:
            raise explain(error, overrides) from None


def plain(config: DictConfig, overrides: Sequence[str] | None = None) -> dict[str, Any]:
    """A composed configuration as plain dicts and lists: interpolations resolved, without Hydra's node.

    Args:
        overrides: of which it was composed; None: it was resolved before.

    Raises:
        ConfigError: a value must still be given (``???``), or an interpolation leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlplug.config.hydra_errors import explain

    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    if overrides is not None:
        _drop_unchosen(job, overrides)
    try:
        return OmegaConf.to_container(job, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise explain(error, ()) from None


def _drop_unchosen(job: DictConfig, overrides: Sequence[str]) -> None:
    """Take out what an experiment set of an exploration module or a logger that is not chosen after all."""
    from omegaconf import open_dict

    for kind in SEVERAL:
        nodes: Any = job.get(kind)
        for name in [name for name, node in (nodes or {}).items() if isinstance(node, Mapping) and "name" not in node]:
            if not any(word.lstrip("+~").startswith(f"{kind}.{name}") for word in overrides):
                with open_dict(nodes):
                    del nodes[name]
