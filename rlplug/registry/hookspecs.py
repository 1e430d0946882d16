"""Every hook that a plugin may implement: the manifest's two, and the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from rlplug.registry.component import Component

if TYPE_CHECKING:
    from rlplug.api import Losses, Run
    from rlplug.types import Batch

hookspec = pluggy.HookspecMarker("rlplug")
hookimpl = pluggy.HookimplMarker("rlplug")


class Manifest:
    """Read when plugins are discovered. Implementations name things and import nothing heavy."""

    @hookspec
    def rlplug_components(self) -> list[Component]:  # type: ignore[empty-body]
        """The components that this distribution brings."""

    @hookspec
    def rlplug_conf(self) -> str:  # type: ignore[empty-body]
        """The importable package whose folder holds this distribution's YAML groups (``algo/``, ``env/`` ...)."""


class Events:
    """What happens in a run, on rank 0. Loggers and a user's callbacks implement the ones they want.

    A hook call costs a microsecond or two: they are made per collection, per update and rarer,
    never per environment step.
    """

    @hookspec
    def rlplug_started(self, run: Run) -> None:
        """Everything is built; nothing has been collected."""

    @hookspec
    def rlplug_collected(self, run: Run, segment: Batch) -> None:
        """A segment ``[T+1, B]`` arrived, and has been counted and stored."""

    @hookspec
    def rlplug_updated(self, run: Run, losses: Losses) -> None:
        """The learner made one step. The tensors may still live on the accelerator: do not read them here."""

    @hookspec
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        """One row of metrics, at every log interval and after every evaluation; ``step`` is in environment steps."""

    @hookspec
    def rlplug_evaluated(self, run: Run, metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""

    @hookspec
    def rlplug_checkpoint(self, run: Run, path: str) -> None:
        """A checkpoint was written and renamed to its final name."""

    @hookspec
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run is over, whatever the reason: ``summary["status"]`` says which."""
