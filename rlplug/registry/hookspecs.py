"""Declarations of plugins: components, and hooks to implement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import pluggy

if TYPE_CHECKING:
    from rlplug.api import Job, Losses, Run, Segment
    from rlplug.types import Batch

Kind = Literal["algo", "model", "buffer", "exploration", "env", "loop", "hardware", "logger", "curriculum", "estimator"]
KINDS: tuple[Kind, ...] = get_args(Kind)

hookspec = pluggy.HookspecMarker("rlplug")
hookimpl = pluggy.HookimplMarker("rlplug")


@dataclass(frozen=True)
class Component:
    """Declares a component that a configuration can select by name, without importing it.

    Args:
        kind: one of ``KINDS``.
        name: the value of ``name:`` in a configuration.
        target: ``"package.module:Class"``, imported when a configuration selects the component.
        tried_with: overrides with which the conformance kit tests it: the algorithm, environment, buffer or loop that
            it needs, and settings for a short run.

    Raises:
        ValueError: the kind is unknown, or the target is malformed.
    """

    kind: Kind
    name: str
    target: str
    tried_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        words = (self.kind, self.name, self.target, *self.tried_with) if type(self.tried_with) is tuple else (None,)
        if not all(type(word) is str for word in words):
            raise TypeError(f"component {self.name!r:.50}: kind, name, target and the tuple tried_with must be strings")
        if self.kind not in KINDS:
            raise ValueError(f"component {self.name!r}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if not re.fullmatch(r"[\w.+-]{1,100}", self.name):
            raise ValueError(f"{self.kind} {self.name!r:.50}: a name has letters, digits and _ . + - only")
        module, _, attribute = self.target.partition(":")
        if not module or not attribute.isidentifier():
            raise ValueError(f"{self.kind} {self.name!r}: target {self.target!r} is not 'package.module:Class'")


class Manifest:
    """Hooks called at discovery. Implementations must not import heavy modules."""

    @hookspec(firstresult=True)
    def rlplug_components(self) -> list[Component]:  # type: ignore[empty-body]
        """Return the components of this distribution."""

    @hookspec(firstresult=True)
    def rlplug_conf(self) -> str:  # type: ignore[empty-body]
        """Return the importable package with this distribution's YAML groups, such as ``algo/`` and ``env/``."""


class Events:
    """Hooks called on rank 0 during a run: per collection, per update or less often, never per environment step."""

    @hookspec
    def rlplug_started(self, run: Run) -> None:
        """Handle the start of a run, when all parts are built and nothing has been collected."""

    @hookspec
    def rlplug_collected(self, run: Run, segment: Segment) -> None:
        """Handle a collected, counted and stored segment."""

    @hookspec
    def rlplug_episode(self, run: Run, episode: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Handle a finished episode, arrays ``[L+1, ...]``, its ``return`` and ``length``; may return metrics of it."""

    @hookspec
    def rlplug_played(self, run: Run, job: Job, batch: Batch) -> None:
        """Handle the episodes of a job that this rank played and counted; ``batch`` is as ``Run.play`` returns it."""

    @hookspec
    def rlplug_updated(self, run: Run, losses: Losses) -> None:
        """Handle a learner step. Do not read the tensors here, because they may be on the accelerator."""

    @hookspec
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        """Handle a row of metrics, at every log interval and after every evaluation; ``step`` is ``run.steps``."""

    @hookspec
    def rlplug_evaluated(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Handle the end of an evaluation."""

    @hookspec
    def rlplug_checkpoint(self, run: Run, path: str) -> None:
        """Handle a checkpoint, written and renamed to its final name."""

    @hookspec
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Handle the end of a run; ``summary["status"]`` is the reason."""
