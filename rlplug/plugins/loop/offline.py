"""Train on a dataset; steps are updates."""

from __future__ import annotations

from typing import ClassVar

from rlplug.api import Algorithm, Context, Loop, Needs, Run
from rlplug.settings import option, settings
from rlplug.types import ConfigError, RunError, Unit


class Offline(Loop):
    """Reads the whole dataset into the buffer, then updates; or, with ``stream``, reads between updates.

    With ``stream``, the buffer holds a moving window over repeated passes: ``num_steps_sampled_before_learning_starts``
    steps are read before the first update, and every further step gives ``replay_ratio`` updates; null: every segment
    gives one.
    """

    unit: ClassVar[Unit] = "updates"
    reads: ClassVar[bool] = True

    @settings
    class Config:
        stream: bool = option(
            "Read during training, for datasets larger than the buffer; false: one pass before the first update."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.stream, self.one_pass, self.learning_starts = cfg.stream, not cfg.stream, max(1, ctx.learning_starts)
        if ctx.needs.data == "segments" and not cfg.stream:
            said = "false reads the dataset before training, but segments are used in the order they arrive; use true"
            raise ConfigError("loop.stream", said)
        self.per_update = ctx.rollout_length * ctx.num_envs if ctx.replay_ratio is None else 1.0 / ctx.replay_ratio

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        if not needs.off_policy:
            return f"learns from other policies, but {algorithm.__name__} does not correct for that"
        return None

    def steps(self, updates: int, recorded: int) -> float:
        """Return the steps to read before update ``updates + 1``, of a dataset of ``recorded`` steps."""
        return self.learning_starts + updates * self.per_update if self.stream else recorded

    def run(self, run: Run) -> None:
        recorded = run.collector.spec.steps or 0
        while not run.done:
            run.report()
            if run.progress.env_steps - run.progress.refilled < self.steps(run.progress.updates, recorded):
                run.collect()
            elif run.ready():
                run.update()
            elif self.stream:
                run.collect()
            else:
                raise RunError(f"the {recorded} steps of the recording are too few for one sample")
