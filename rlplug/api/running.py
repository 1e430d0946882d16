"""Contracts of loops and of the run that they drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlplug.api.data import Collector
from rlplug.api.learning import Algorithm, Learner
from rlplug.api.records import Job, Losses, Needs
from rlplug.types import Batch, Mode, NamedWeights, Progress, Unit

__all__ = ["Loop", "Preemption", "Run", "Tempo"]


class Run(Protocol):
    """The run, as loops and hooks see it."""

    config: Any  # the validated run configuration, ``rlplug.config.RunConfig``
    run_dir: Path
    progress: Progress
    loop: Loop
    steps: int  # progress in the unit of the loop
    logged: int  # rows of metrics so far; a resumed run continues after those of its checkpoint
    evaluated: tuple[int, int]  # finished and planned episodes of the last evaluation, which may be in progress
    clock: Any  # ``spent``: seconds by phase: collect, update, evaluate ...
    algorithm: Algorithm
    collector: Collector
    learner: Learner

    @property
    def done(self) -> bool: ...  # ``total_steps`` reached, no whole round left, or stop requested

    def report(self) -> None:
        """Log, evaluate and write a checkpoint, each if it is due.

        A loop calls it between rounds (between updates if it does not collect), equally often on every rank. The
        moments of normalized observations change here only: rollouts and jobs until the next call share them.

        Raises:
            RunError: a loss or gradient since the last call was not finite.
        """

    def collect(self, mode: Mode = "explore") -> None:
        """Collect, observe, count and store one round of segments; see ``Tempo.shards``."""

    def play(
        self, jobs: Sequence[Job], weights: NamedWeights | None = None, *, mine: bool = False, store: bool = False
    ) -> Iterator[tuple[Job, Batch]]:
        """Play jobs, yield them as they end, and count, observe and record their episodes. Ranks pass the same jobs.

        See ``Play``. The order in which jobs end is not reproducible. A loop stays exact if it takes all results, puts
        each in its place by ``job.number``, and updates afterwards; the run itself counts, observes and stores in the
        order of ``jobs``. Whole jobs are divided among the ranks. The episodes of the last call may exceed
        ``total_steps``. Gradient steps count every episode once: ``minibatches`` gives each rank its part of a batch
        that every rank has.

        Args:
            mine: each rank receives only the jobs that it played, as its part of the whole. By default, or if one rank
                collects for all, every rank receives all jobs.
            store: add the episodes to the buffer, each on the rank that played it, when all have ended.

        Raises:
            RunError: rollouts are in flight, a rank would receive no job, or the buffer has no windows or episodes.
            ConfigError, ValueError: a job names a task, weights or a submodule that does not exist.
        """
        ...

    def ready(self) -> bool: ...  # whether the buffer has enough rows for an update

    def update(self, batch: Batch | None = None) -> Losses:
        """Make one learner step on a sample of the buffer, or on ``batch``.

        Args:
            batch: raw rows as ``play`` returns them, or a dict of such batches; preprocessed like a sample.
        """
        ...


@dataclass(frozen=True)
class Tempo:
    """Which rollouts a loop requests, and how stale their weights may be."""

    shards: int | None = None
    """segments per rank and round, in order of completion, at most one per shard; None: one from every shard,
    concatenated to one segment"""
    in_flight: int = 1
    """outstanding rollouts per shard; above 1, shards collect during updates"""
    broadcast_interval: int = 1
    """rounds between two weight broadcasts"""
    max_weight_sync_delay: int | None = None
    """steps of a shard after which it receives new weights in any case"""
    max_staleness: int | None = None
    """maximum age of a segment's weights in updates; older segments are dropped; None: unlimited"""


class Preemption(Protocol):
    """Ends a rank's rollout early because other ranks have finished theirs (DD-PPO)."""

    def rollout(self, rows: int) -> AbstractContextManager[Callable[[], bool]]:
        """Yield a function that returns whether to stop before the next row; leaving the block finishes the rollout."""
        ...

    def drain(self) -> dict[str, float]: ...  # metrics of the rollouts since the last call


class Loop(Protocol):
    """Decides when to collect and when to update.

    It is stateless: its decisions depend on ``run.progress`` only, so a resumed run makes the same ones.
    """

    # unit of ``total_steps``, ``eval.every``, ``log.every``, ``checkpoint.every`` and schedules
    unit: ClassVar[Unit] = "env_steps"
    collects: ClassVar[bool] = True  # False: the buffer must have its own rows
    reads: ClassVar[bool] = False  # collects from a dataset, never from an environment
    plays: ClassVar[bool] = False  # only plays jobs, and never calls ``run.collect``
    gives_rows: ClassVar[bool] = True  # if it passes anything to ``run.update``, it is rows as ``play`` returns them
    one_pass: bool = False  # reads a dataset only once, so the buffer has to hold all of it
    tempo: Tempo = Tempo()
    preemption: Callable[[Any, int], Preemption] | None = None
    """makes the ``Preemption`` from a torch.distributed store shared by all ranks and the number of ranks; None:
    rollouts are never cut short"""

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        """Return why it cannot drive an algorithm, as text that follows the loop's name; None: it can."""

    def updates(self, env_steps: int) -> int:
        """Return the number of updates after ``env_steps`` environment steps, if these are the loop's unit."""
        ...

    def run(self, run: Run) -> None:
        """Drive ``run`` until it is done; call ``run.report()`` between rounds."""
