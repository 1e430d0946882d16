"""Train on the first segments that are ready, without waiting for slow actors."""

from __future__ import annotations

from rlplug.api import Algorithm, Context, Loop, Needs, Run, Tempo
from rlplug.plugins.loop.tempo import GIVEN_AWAY, updates_of, updates_per_step
from rlplug.settings import NonNegativeInt, PositiveInt, option, settings
from rlplug.types import ConfigError


class Async(Loop):
    """Takes a few segments, then makes the updates that they allow, while actors continue to collect.

    With ``replay_ratio`` null, every complete sample of a queue gives an update, and a replay gives an update for every
    ``num_envs x rollout_fragment_length`` steps. A number is updates per environment step, as in every loop.
    """

    @settings
    class Config:
        shards: PositiveInt = option("Segments per round: the first that are ready, of any actor.")
        in_flight: PositiveInt = option(
            "Rollouts requested from an actor at a time; above 1, it collects during updates."
        )
        broadcast_interval: PositiveInt = option("Rounds collected with the same weights.")
        max_weight_sync_delay: PositiveInt | None = option(
            "Maximum steps of an actor between two broadcasts; null: only broadcast_interval applies."
        )
        max_staleness: NonNegativeInt | None = option(
            "Maximum age of a segment's weights on arrival, in updates; older ones are dropped; null: unlimited."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        weights = cfg.broadcast_interval, cfg.max_weight_sync_delay, cfg.max_staleness
        self.tempo = Tempo(cfg.shards, cfg.in_flight, *weights)
        self.learning_starts, self.replay_ratio = ctx.learning_starts, ctx.replay_ratio
        self.given_away, self.per_step = ctx.needs.data in GIVEN_AWAY, updates_per_step(ctx)
        if cfg.max_staleness is not None and not self.given_away:
            said = "drops segments, so that windows of a replay would span gaps; use null"
            raise ConfigError("loop.max_staleness", said)
        # Little's law: the mean age for any number of actors
        rounds = cfg.in_flight - 1 + (cfg.broadcast_interval - 1) // 2
        least = self.updates(self.learning_starts + rounds * ctx.rollout_length * ctx.num_envs)
        if cfg.max_staleness is not None and cfg.max_staleness < least:
            why = f"in_flight={cfg.in_flight} and broadcast_interval={cfg.broadcast_interval}"
            said = f"{cfg.max_staleness} cannot be met: with {why} the average age of segments that arrive is {least}"
            raise ConfigError("loop.max_staleness", f"{said}; use {least} or more")

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        if not needs.off_policy and not needs.gradients:
            return f"collects with older weights, but {algorithm.__name__} does not correct for that"
        return None

    def updates(self, env_steps: int) -> int:
        """Return the updates due since the start of the run, as if the buffer dropped nothing."""
        return updates_of(env_steps - self.learning_starts, self.per_step)

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            run.collect("explore" if run.progress.env_steps >= self.learning_starts else "random")
            if run.progress.env_steps <= self.learning_starts:
                continue
            while run.ready() and self._due(run):
                run.update()

    def _due(self, run: Run) -> bool:
        if self.replay_ratio is None and self.given_away:
            return True
        return run.progress.updates < self.updates(run.progress.env_steps - run.progress.refilled)
