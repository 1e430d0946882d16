"""Collect whole episodes with the newest weights, and update: no episode is cut by the end of a rollout."""

from __future__ import annotations

from typing import ClassVar

from rlplug.api import Algorithm, Context, Job, Loop, Needs, Run
from rlplug.buffer.episodes import OF_EPISODE, side_by_side
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch

MOST = 2**20
"""maximum number of jobs of an update"""


class Episodes(Loop):
    """Plays episodes until they have as many steps as a rollout, ``rollout_fragment_length x num_envs``, or more.

    All are played with the newest weights, and none stays open. They are the columns of the batch that the algorithm
    learns from, ``[L+1, episodes]``, padded with ``valid=False``. The jobs of update ``u`` have the numbers from
    ``u * MOST`` on. On several ranks, each keeps the episodes that it played.
    """

    plays: ClassVar[bool] = True

    @settings
    class Config:
        jobs: PositiveInt = option("Jobs of a round, which ranks and actors share; at least one per rank.")
        episodes: PositiveInt = option("Episodes of a job, which are played together.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.least = cfg, ctx.rollout_length * ctx.num_envs

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        said = f"plays whole episodes for algorithms that learn from rollouts, but {algorithm.__name__} does not"
        return None if needs.data == "rollout" and not needs.raw else said

    def updates(self, env_steps: int) -> int:
        return 0  # an update follows its episodes, however many steps they have

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            played, before, rounds = dict[tuple[int, int], Batch](), run.progress.env_steps, 0
            while not rounds or run.progress.env_steps - before < self.least:
                first = run.progress.updates * MOST + rounds * self.cfg.jobs
                jobs = [Job(first + i, episodes=self.cfg.episodes) for i in range(self.cfg.jobs)]
                played |= {(job.number - first, rounds): batch for job, batch in run.play(jobs, mine=True)}
                rounds += 1
            rows = side_by_side([played[place] for place in sorted(played)])  # in order of ranks, which share rounds
            run.update({key: leaf for key, leaf in rows.items() if key not in OF_EPISODE})
