"""Collect, then update, in turn. On- and off-policy differ by buffer and tempo alone."""

from __future__ import annotations

from rlplug.api import Context, Run
from rlplug.settings import settings


class Alternate:
    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.learning_starts, self.replay_ratio = ctx.learning_starts, ctx.replay_ratio
        self.round_steps = ctx.rollout_length * ctx.num_envs

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            run.collect("explore" if run.progress.env_steps >= self.learning_starts else "random")
            if self.replay_ratio is None:
                if run.ready() and run.progress.env_steps > self.learning_starts:
                    run.update()
            else:
                while run.ready() and run.progress.updates < self.updates(run.progress.env_steps):
                    run.update()

    def updates(self, env_steps: int) -> int:
        """Counted from the beginning of the run, so that a fraction of an update is never lost."""
        per_step = 1.0 / self.round_steps if self.replay_ratio is None else self.replay_ratio
        return int(max(0, env_steps - self.learning_starts) * per_step)
