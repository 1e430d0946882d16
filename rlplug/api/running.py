"""Contracts of what drives a run: loops, and the run that they drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlplug.api.data import Collector
from rlplug.api.learning import Algorithm, Learner
from rlplug.api.records import Job, Losses, Needs
from rlplug.types import Batch, Mode, Progress, Unit, Weights


class Run(Protocol):
    """What a loop drives, and what the hooks of a run see."""

    config: Any  # the validated run configuration, ``rlplug.config.RunConfig``
    run_dir: Path
    progress: Progress
    loop: Loop
    steps: int  # how far it is, in the unit of its loop
    logged: int  # rows of metrics so far; a continued run goes on behind those of its checkpoint
    algorithm: Algorithm
    collector: Collector
    learner: Learner

    @property
    def done(self) -> bool: ...  # it has its ``total_steps``, or cannot make a whole round more, or was asked to stop

    def report(self) -> None:
        """Log, evaluate and write a checkpoint, each where it is due.

        A loop calls it between rounds, equally often on every rank; where it collects nothing, between updates.

        Raises:
            RunError: a gradient step since the last call was not made of finite numbers.
        """

    def collect(self, mode: Mode = "explore") -> None:
        """Collect one round of segments: observed, counted, stored; see ``Tempo.shards``."""

    def play(
        self, jobs: Sequence[Job], weights: Mapping[str, Weights] | None = None, *, mine: bool = False
    ) -> Iterator[tuple[Job, Batch]]:
        """Play jobs: counted, observed and recorded, not stored. Every rank orders the same ones.

        See ``Play``. The ranks share the jobs out; all have been played when this returns. ``total_steps`` may be
        exceeded by the episodes of the last call. Gradient steps count every episode once: of a batch that every rank
        has, ``minibatches`` gives each rank a part.

        Args:
            mine: every rank receives the jobs that it played, in the order of ``jobs``, and their episodes are its
                part of the whole; where one rank collects for all, and by default, every rank receives all of them.

        Raises:
            RunError: rollouts are in flight, or a rank would have no job to keep.
        """
        ...

    def ready(self) -> bool: ...  # whether the buffer has enough for an update

    def update(self, batch: Batch | None = None) -> Losses:
        """Make one learner step, from one sample of the buffer or from ``batch``.

        Args:
            batch: raw rows, as ``play`` gives them, or batches of them by name: they are preprocessed as a sample is.
        """
        ...


@dataclass(frozen=True)
class Tempo:
    """Which rollouts a loop orders, and how old the weights may be that play them."""

    shards: int | None = None
    """segments of each rank in a round, those that are ready first, at most one of every shard; None: one of every
    shard, side by side as one"""
    in_flight: int = 1
    """rollouts of a shard that are ordered at a time; above 1 it plays on during updates"""
    broadcast_interval: int = 1
    """rounds that are played with the same weights"""
    max_weight_sync_delay: int | None = None
    """steps of a shard after which the weights are changed in any case"""
    max_staleness: int | None = None
    """updates; a segment that arrives with older weights is not stored; None: any age"""


@dataclass(frozen=True)
class Preemption:
    """When a rank ends its rollout early, as other ranks have finished theirs."""

    threshold: float
    """share of the other ranks that have finished"""
    min_fraction: float
    """of its rollout that a rank plays in any case"""


class Loop(Protocol):
    """The regime: who collects, and when to update.

    It keeps no state: all that it decides follows from ``run.progress``, so that a continued run goes on in step.
    """

    # what ``total_steps``, ``eval.every``, ``log.every``, ``checkpoint.every`` and schedules count
    unit: ClassVar[Unit] = "env_steps"
    collects: ClassVar[bool] = True  # False: its buffer has to have rows of its own
    reads: ClassVar[bool] = False  # what it collects comes from a recording, and cannot come from an environment
    one_pass: bool = False  # of a recording it reads no more than that, and the buffer has to hold it
    tempo: Tempo = Tempo()
    preemption: Preemption | None = None  # None: every rollout is whole

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        """Return why it cannot drive an algorithm, in words that go on from its name; None: it can."""

    def updates(self, env_steps: int) -> int:
        """Return how many updates will have been made after so many environment steps, which are its unit."""
        ...

    def run(self, run: Run) -> None:
        """Drive ``run`` until it is done; call ``run.report()`` between rounds."""
