"""The configuration of a run: composed by Hydra, checked and typed here."""

import importlib
from typing import TYPE_CHECKING, Any

from rlplug.config.errors import show
from rlplug.config.schema import Chosen, Core, Eval, Preprocess, RunConfig, choose, migrate, nested, parse, typed

if TYPE_CHECKING:
    from rlplug.config.composition import compose, composed, default_node, option_names, plain, tuned, validated


def __getattr__(name: str) -> Any:
    """Import Hydra when it is needed first: a rank does without it."""
    if name in ("compose", "composed", "default_node", "option_names", "plain", "tuned", "validated"):
        return getattr(importlib.import_module("rlplug.config.composition"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
