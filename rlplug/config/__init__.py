"""What a run is made of: composed by Hydra, checked and typed here."""

from rlplug.config.composition import compose, composed, plain
from rlplug.config.defaults import default_node, option_names
from rlplug.config.messages import show
from rlplug.config.run import Chosen, Core, Preprocess, RunConfig, choose, migrate, nested, parse, typed

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
