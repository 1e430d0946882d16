"""Collect, then update, in turn. On- and off-policy differ by buffer and tempo alone."""

from __future__ import annotations

from rlplug.api import Context, Run
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, option, settings


class Alternate:
    @settings
    class Config:
        rollout_fragment_length: PositiveInt = option("Environment steps per environment in one round of collection.")
        train_batch_size: PositiveInt = option("Samples per update from a replay; a rollout is drained whole.")
        replay_ratio: PositiveFloat | None = option("Updates per environment step; null: one update a round.")
        num_steps_sampled_before_learning_starts: NonNegativeInt = option(
            "Environment steps with random actions before the first update."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg
        self.rollout_length, self.batch_size = cfg.rollout_fragment_length, cfg.train_batch_size
        self.round_steps = self.rollout_length * ctx.num_envs

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            warm = run.progress.env_steps >= self.cfg.num_steps_sampled_before_learning_starts
            run.collect("explore" if warm else "random")
            if self.cfg.replay_ratio is None:
                if run.ready() and self._learning(run.progress.env_steps) > 0:
                    run.update()
            else:
                while run.ready() and run.progress.updates < self.updates(run.progress.env_steps):
                    run.update()

    def _learning(self, env_steps: int) -> int:
        return max(0, env_steps - self.cfg.num_steps_sampled_before_learning_starts)

    def updates(self, env_steps: int) -> int:
        """Counted from the beginning of the run, so that a fraction of an update is never lost."""
        per_step = 1.0 / self.round_steps if self.cfg.replay_ratio is None else self.cfg.replay_ratio
        return int(self._learning(env_steps) * per_step)
