"""The configuration of a run, composed by Hydra, then validated and typed."""

import importlib
from typing import TYPE_CHECKING, Any

from rlplug.config.errors import show
from rlplug.config.schema import Chosen, Core, Eval, Preprocess, RunConfig, choose, migrate, nested, parse, typed

if TYPE_CHECKING:
    from rlplug.config.composition import compose, composed, default_node, option_names, plain, tuned, validated


def __getattr__(name: str) -> Any:
    """Import Hydra lazily, because ranks do not need it."""
    if name in ("compose", "composed", "default_node", "option_names", "plain", "tuned", "validated"):
        return getattr(importlib.import_module("rlplug.config.composition"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
