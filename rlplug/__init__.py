"""Reinforcement learning in which everything is a plugin and a run is one line.

The names below are the public API. They are imported on first use: ``import rlplug`` imports no torch.
Options of a component are declared with ``rlplug.settings``, tensors travel by the table in ``rlplug.types``.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from rlplug.api import (
        Algorithm,
        Buffer,
        Context,
        Curriculum,
        Estimator,
        Exploration,
        Hardware,
        Job,
        Learner,
        Loop,
        Losses,
        Model,
        Needs,
        Optim,
        Plan,
        RowLog,
        Run,
        Segment,
        Tempo,
        Trainable,
        VecEnv,
        Window,
    )
    from rlplug.config import RunConfig, compose
    from rlplug.registry import Component, hookimpl
    from rlplug.session import Result, Session, evaluate, load, resume, train
    from rlplug.types import Batch, ConfigError, EnvSpec, EnvTraits, Group, RunError

__all__ = [
    "Algorithm",
    "Batch",
    "Buffer",
    "Component",
    "ConfigError",
    "Context",
    "Curriculum",
    "EnvSpec",
    "EnvTraits",
    "Estimator",
    "Exploration",
    "Group",
    "Hardware",
    "Job",
    "Learner",
    "Loop",
    "Losses",
    "Model",
    "Needs",
    "Optim",
    "Plan",
    "Result",
    "RowLog",
    "Run",
    "RunConfig",
    "RunError",
    "Segment",
    "Session",
    "Tempo",
    "Trainable",
    "VecEnv",
    "Window",
    "__version__",
    "compose",
    "evaluate",
    "hookimpl",
    "load",
    "resume",
    "train",
]

_HOMES = {
    "rlplug.types": ("Batch", "ConfigError", "EnvSpec", "EnvTraits", "Group", "RunError"),
    "rlplug.registry": ("Component", "hookimpl"),
    "rlplug.config": ("RunConfig", "compose"),
    "rlplug.session": ("Result", "Session", "evaluate", "load", "resume", "train"),
}
"""where a public name lives; the others are of ``rlplug.api``"""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("rlplug")
    if name not in __all__:
        raise AttributeError(f"module 'rlplug' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "rlplug.api")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
