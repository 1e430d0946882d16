"""Overrides -> one resolved configuration, by Hydra, which is imported when it is needed: a rank does without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplug.config.run import SEVERAL, RunConfig, parse
from rlplug.config.session import PRIMARY, session
from rlplug.registry import Kind, warn_broken

if TYPE_CHECKING:
    from omegaconf import DictConfig


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose and validate the run that a command line describes.

    >>> compose(["algo=sac", "env=pendulum"]).algo.cfg.gamma
    0.99

    Raises:
        ConfigError: with one line for each mistake.
    """
    warn_broken()
    return parse(plain(composed(overrides), overrides))


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the overrides with Hydra. The result includes its own node ``hydra``.

    Raises:
        ConfigError: Hydra refuses the overrides.
    """
    import hydra

    from rlplug.config.hydra_errors import explained

    with session(), explained(overrides):
        return hydra.compose(PRIMARY, list(overrides), return_hydra_config=True)


def plain(config: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a composed configuration as dicts and lists, with interpolations resolved and without Hydra's node.

    Settings that an experiment has for an exploration module or a logger are dropped if that component is not chosen,
    unless the ``overrides`` set them too, which is a mistake that ``parse`` reports.

    Raises:
        ConfigError: a value must still be given (``???``), or an interpolation cannot be resolved.
    """
    from omegaconf import OmegaConf

    from rlplug.config.hydra_errors import explained

    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    with explained():
        raw: Any = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
    for kind in SEVERAL:
        nodes = raw.get(kind) if isinstance(raw.get(kind), dict) else {}
        for name in [name for name, node in nodes.items() if isinstance(node, dict) and "name" not in node]:
            if not any(word.lstrip("+~").startswith((f"{kind}.{name}", f"{kind}={{")) for word in overrides):
                del nodes[name]
    return raw


def default_node(kind: Kind, option: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the node of ``conf/<kind>/<option>.yaml``, as it is before an algorithm or a command line changes it.

    Args:
        changes: keys to set; a value that must be given (``???``) remains ``"???"`` unless it is among them.

    Raises:
        ConfigError: there is no such option.
    """
    from omegaconf import OmegaConf, open_dict

    choice = f"{kind}=[{option}]" if kind in SEVERAL else f"{kind}={option}"
    config = composed([choice] if kind == "algo" else [choice, "~algo"])
    node = config[kind][option] if kind in SEVERAL else config[kind]
    with open_dict(node):
        node.update(changes or {})
    OmegaConf.resolve(node)
    return OmegaConf.to_container(node)  # type: ignore[return-value]
