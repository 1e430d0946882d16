"""Every hook that a plugin can implement: the manifest's two, and the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from rlplug.registry.component import Component

if TYPE_CHECKING:
    from rlplug.api import Losses, Run, Segment

hookspec = pluggy.HookspecMarker("rlplug")
hookimpl = pluggy.HookimplMarker("rlplug")


class Manifest:
    """Called when plugins are discovered. Implementations name things and import nothing heavy."""

    @hookspec(firstresult=True)
    def rlplug_components(self) -> list[Component]:  # type: ignore[empty-body]
        """Return the components of this distribution."""

    @hookspec(firstresult=True)
    def rlplug_conf(self) -> str:  # type: ignore[empty-body]
        """Return the importable package whose folder holds this distribution's YAML groups, ``algo/``, ``env/`` ...."""


class Events:
    """Called on rank 0 during a run: per collection, per update or more rarely, never per environment step."""

    @hookspec
    def rlplug_started(self, run: Run) -> None:
        """Everything is built; nothing has been collected."""

    @hookspec
    def rlplug_collected(self, run: Run, segment: Segment) -> None:
        """A segment has been collected, counted and stored."""

    @hookspec
    def rlplug_updated(self, run: Run, losses: Losses) -> None:
        """The learner made one step. The tensors may still be on the accelerator: do not read them here."""

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
        """The run is over; ``summary["status"]`` gives the reason."""
