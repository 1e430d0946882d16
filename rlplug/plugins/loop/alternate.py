"""Collect and update in turn. On- and off-policy runs differ only in buffer and update ratio."""

from __future__ import annotations

from functools import partial

from rlplug.api import Algorithm, Context, Loop, Needs, Run, Tempo
from rlplug.plugins.loop.preemption import Preemptor
from rlplug.plugins.loop.tempo import GIVEN_AWAY, updates_of, updates_per_step
from rlplug.settings import PositiveInt, UnitFloat, option, settings
from rlplug.types import ConfigError


class Alternate(Loop):
    @settings
    class Config:
        in_flight: PositiveInt = option(
            "Rounds requested at a time; above 1, actors collect during updates, with older weights."
        )
        broadcast_interval: PositiveInt = option("Rounds collected with the same weights.")
        max_weight_sync_delay: PositiveInt | None = option(
            "Maximum steps of an actor between two broadcasts; null: only broadcast_interval applies."
        )

        preemption_threshold: UnitFloat | None = option(
            "Fraction of the other ranks that have to finish to end this one's rollout; null: never."
        )
        min_rollout_fraction: UnitFloat = option("Fraction of its rollout that a rank collects in any case.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if cfg.preemption_threshold is not None:
            self.preemption = partial(Preemptor, threshold=cfg.preemption_threshold, least=cfg.min_rollout_fraction)
            if ctx.needs.data != "rollout" or cfg.in_flight > 1:
                whole = "an algorithm that learns from whole rollouts"
                needed = "loop.in_flight=1" if ctx.needs.data == "rollout" else whole
                raise ConfigError("loop.preemption_threshold", f"needs {needed}; use null")
        self.tempo = Tempo(None, cfg.in_flight, cfg.broadcast_interval, cfg.max_weight_sync_delay)
        self.learning_starts, self.replay_ratio = ctx.learning_starts, ctx.replay_ratio
        self.given_away, self.per_step = ctx.needs.data in GIVEN_AWAY, updates_per_step(ctx)

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        said = f"waits for all actors, but {algorithm.__name__} applies the gradients of each"
        return said if needs.gradients else None

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            run.collect("explore" if run.progress.env_steps >= self.learning_starts else "random")
            if run.progress.env_steps <= self.learning_starts:
                continue
            if self.replay_ratio is not None:
                due = self.updates(run.progress.env_steps - run.progress.refilled)
                while run.ready() and run.progress.updates < due:
                    run.update()
            elif self.given_away:
                while run.ready():
                    run.update()
            elif run.ready():
                run.update()

    def updates(self, env_steps: int) -> int:
        """Return the updates due since the start of the run, so that fractions of an update are never lost."""
        return updates_of(env_steps - self.learning_starts, self.per_step)
