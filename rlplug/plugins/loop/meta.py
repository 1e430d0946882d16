"""Play tasks before and after adapting to them, and learn from both."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Protocol, cast

from rlplug.api import Algorithm, Context, Loop, Needs, Play, Run
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch

MOST = 2**20
"""maximum number of jobs of an update"""


class Adapts(Protocol):
    """What this loop needs of an algorithm."""

    def rounds(self, play: Play, episodes: int, first: int) -> Batch | None:
        """Play the jobs of an update, ``episodes`` each, numbered from ``first``, and adapt between them.

        Every rank plays the same jobs, and may receive only some of them. Return what to learn from; None: a sample of
        the buffer, to which the episodes were added.
        """
        ...


class Meta(Loop):
    """Plays a few episodes of every task, lets the algorithm adapt to each, plays again, and updates.

    The jobs of update ``u`` have the numbers from ``u * MOST`` on. On several ranks, each keeps the tasks it played.
    """

    plays: ClassVar[bool] = True

    @settings
    class Config:
        episodes: PositiveInt = option("Episodes of every task, before and after each adaptation.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.episodes, self.store = cfg.episodes, ctx.needs.data in ("windows", "episodes")

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        return None if hasattr(algorithm, "rounds") else f"adapts to tasks, which {algorithm.__name__} does not"

    def updates(self, env_steps: int) -> int:
        return 0  # an update follows its rounds, however many steps these have

    def run(self, run: Run) -> None:
        algorithm = cast(Adapts, run.algorithm)
        play = partial(run.play, store=True) if self.store else partial(run.play, mine=True)
        while not run.done:
            run.report()
            played = algorithm.rounds(play, self.episodes, run.progress.updates * MOST)
            if played is not None or run.ready():
                run.update(played)
