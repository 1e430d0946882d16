"""Ask for candidates, play an episode with each, and learn from the returns."""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

import torch

from rlplug import tree
from rlplug.api import Algorithm, Context, Job, Loop, Needs, Run
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch

MOST = 2**20
"""maximum number of candidates of an update; a multiple of the lanes of a round"""


class Asks(Protocol):
    """What this loop needs of an algorithm, in addition to ``candidate_weights``."""

    def ask(self) -> Batch:
        """Return candidates, leaves ``[P, ...]``, the same on every rank."""
        ...


class Population(Loop):
    """Plays the candidates that the algorithm asks for, and passes it their mean returns and lengths.

    A candidate is played by whichever rank or actor is free. Its results are stored at its own position, so an update
    does not depend on the number of ranks and actors. The jobs of update ``u`` have the numbers from ``u * MOST`` on.
    """

    plays: ClassVar[bool] = True
    gives_rows: ClassVar[bool] = False

    @settings
    class Config:
        episodes: PositiveInt = option("Episodes of each candidate, whose return is their mean.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.episodes, self.least = cfg.episodes, ctx.batch_size

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        return (
            None if hasattr(algorithm, "ask") else f"plays candidates, for which {algorithm.__name__} cannot be asked"
        )

    def updates(self, env_steps: int) -> int:
        return 0  # an update follows a generation, however many steps it has

    def run(self, run: Run) -> None:
        algorithm = cast(Asks, run.algorithm)
        while not run.done:
            run.report()
            parts, before, first = list[Batch](), run.progress.env_steps, run.progress.updates * MOST
            while not parts or run.progress.env_steps - before < self.least:
                candidates = algorithm.ask()
                parts.append(candidates | self.played(run, candidates, first))
                first += len(parts[-1]["return"])
            run.update(tree.cat(parts))

    def played(self, run: Run, candidates: Batch, first: int) -> Batch:
        """Return the mean ``return`` and ``length`` of every candidate, ``[P]``; jobs are numbered from ``first``."""
        size: int = len(next(tree.leaves(candidates)))
        each = [tree.take(candidates, i) for i in range(size)]
        jobs = [Job(first + i, candidate=x, episodes=self.episodes, mode="greedy", keys=()) for i, x in enumerate(each)]
        found = torch.empty(2, size, dtype=torch.float64)
        for job, episodes in run.play(jobs):
            found[:, job.number - first] = torch.stack([episodes[key].double().mean() for key in ("return", "length")])
        return {"return": found[0], "length": found[1]}
