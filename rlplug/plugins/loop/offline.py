"""Learn from recorded episodes, and count updates."""

from __future__ import annotations

from typing import ClassVar

from rlplug.api import Algorithm, Context, Loop, Needs, Run
from rlplug.settings import option, settings
from rlplug.types import ConfigError, RunError, Unit


class Offline(Loop):
    """Reads a recording into the buffer, then updates; or reads on between updates, where the buffer holds a part.

    With ``stream`` the buffer is a window that moves over the recording, pass after pass:
    ``num_steps_sampled_before_learning_starts`` steps are read before the first update, and ``replay_ratio`` updates
    follow from every further step; null: one from every segment.
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
            said = "false reads once and then learns, and segments are learned from in order, as they come; take true"
            raise ConfigError("loop.stream", said)
        self.per_update = ctx.rollout_length * ctx.num_envs if ctx.replay_ratio is None else 1.0 / ctx.replay_ratio

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        if not needs.off_policy:
            return f"learns from what others did, and {algorithm.__name__} does not correct for that"
        return None

    def steps(self, updates: int, whole: int) -> float:
        """Return how many steps are read before update ``updates + 1``, of a recording of ``whole``."""
        return self.learning_starts + updates * self.per_update if self.stream else whole

    def run(self, run: Run) -> None:
        whole = run.collector.spec.steps or 0
        while not run.done:
            run.report()
            if run.progress.env_steps < self.steps(run.progress.updates, whole):
                run.collect()
            elif run.ready():
                run.update()
            elif self.stream:
                run.collect()
            else:
                raise RunError(f"the {whole} steps of the recording are too few for one sample")
