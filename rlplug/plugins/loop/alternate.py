"""Collect, then update, in turn. On- and off-policy differ by buffer and tempo alone."""

from __future__ import annotations

from rlplug.api import Context, Run
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, option, settings


class Alternate:
    @settings
    class Config:
        rollout_fragment_length: PositiveInt = option("Environment steps per environment in one round of collection.")
        train_batch_size: PositiveInt = option("Samples per update from a replay; a rollout is drained whole.")
        replay_ratio: PositiveFloat | None = option(
            "Updates per environment step; null: one update for each drained rollout."
        )
        num_steps_sampled_before_learning_starts: NonNegativeInt = option(
            "Environment steps with random actions before the first update."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg
        self.rows, self.batch_size = cfg.rollout_fragment_length, cfg.train_batch_size
        self.round_steps = self.rows * ctx.num_envs

    def run(self, run: Run) -> None:
        while not run.done:
            warm = run.progress.env_steps >= self.cfg.num_steps_sampled_before_learning_starts
            run.collect("explore" if warm else "random")
            while self._owes(run) and run.ready():
                run.update()

    def _owes(self, run: Run) -> bool:
        return self.cfg.replay_ratio is None or run.progress.updates < self.updates(run.progress.env_steps)

    def updates(self, env_steps: int) -> int:
        """Counted from the beginning of the run, so that a fraction of an update is never lost."""
        if self.cfg.replay_ratio is None:
            return env_steps // self.round_steps
        return max(0, int((env_steps - self.cfg.num_steps_sampled_before_learning_starts) * self.cfg.replay_ratio))
