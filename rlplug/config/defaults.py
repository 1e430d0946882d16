"""What a component's own YAML says, before an algorithm or a command line changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplug.config.composition import composed
from rlplug.config.run import SEVERAL
from rlplug.registry import Kind


def default_node(kind: Kind, option: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The node of ``conf/<kind>/<option>.yaml``.

    Args:
        changes: keys to set; an option that must be given (``???``) stands for itself unless it is among them.

    Raises:
        ConfigError: there is no such option.
    """
    from omegaconf import OmegaConf, open_dict

    choice = f"{kind}=[{option}]" if kind in SEVERAL else f"{kind}={option}"
    config = composed([choice] if kind == "algo" else [choice, "~algo"])
    node = config[kind][option] if kind in SEVERAL else config[kind]
    with open_dict(node):
        for key, value in (changes or {}).items():
            node[key] = value
    OmegaConf.resolve(node)
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def option_names(kind: Kind) -> list[str]:
    """What a command line may choose for a kind: the YAML files of its group, of all plugins."""
    from rlplug.config.session import session

    with session() as loader:
        return loader.get_group_options(kind)
