"""The configuration of a run: composed by Hydra, checked and typed here."""

from rlplug.config.composition import compose, composed, default_node, plain
from rlplug.config.messages import show
from rlplug.config.run import Chosen, Core, Preprocess, RunConfig, choose, migrate, nested, parse, typed
from rlplug.config.session import option_names

__all__ = [
    "Chosen",
    "Core",
    "Preprocess",
    "RunConfig",
    "choose",
    "compose",
    "composed",
    "default_node",
    "migrate",
    "nested",
    "option_names",
    "parse",
    "plain",
    "show",
    "typed",
]
