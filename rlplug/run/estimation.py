"""Off-policy estimates of the policy that a run trains, on the schedule of its evaluations."""

from __future__ import annotations

import sys

from rlplug.context import ResolvedRun
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.estimation.estimator import Estimator
from rlplug.trainer.policy import Policy
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, Tree


class Estimation:
    """Makes estimates on the first rank, whose weights are those of all; there are none where it has no estimator."""

    def __init__(self, estimator: Estimator | None, every: int) -> None:
        self.estimator, self.every = estimator, every
        self.latest: dict[str, float] = {}
        self._due_after = 0

    def due(self, trainer: Trainer) -> bool:
        return self.estimator is not None and bool(self.every) and trainer.steps >= self._due_after + self.every

    def run(self, trainer: Trainer) -> dict[str, float]:
        """Estimate with the weights of now."""
        assert self.estimator is not None
        with trainer.clock.phase("estimate"):
            self.latest = self.estimator.estimate(trainer.steps)
        if self.every:
            self._due_after = trainer.steps // self.every * self.every
        return self.latest

    def state(self) -> Tree:
        return {"latest": self.latest, "due_after": self._due_after}

    def load(self, state: Tree) -> None:
        self.latest, self._due_after = state["latest"], state["due_after"]


def estimator_of(resolved: ResolvedRun, policy: Policy) -> Estimator | None:
    """Open the episodes that a run is judged by; None: it is not, or on another rank.

    Raises:
        ConfigError: estimates were asked for, and cannot be made.
    """
    config, cfg = resolved.config, resolved.config.estimate
    playable = config.env.cls.traits.playable
    if policy.ctx.rank or cfg.with_eval is False or (cfg.with_eval is None and playable):
        return None
    if (paths := cfg.path or config.data.path) is None:
        raise ConfigError("estimate.with_eval", "true needs recorded episodes to judge by: estimate.path=<folder>")
    key = "estimate.path" if cfg.path else "data.path"
    try:
        recording = Recording(paths, reading := Reading.by(config.data, resolved.spec, key))
        for note in reading.notes if cfg.path else ():  # of data.path they are told already
            print(f"rlplug: {note}", file=sys.stderr, flush=True)
        return Estimator(cfg, recording, policy.algorithm, policy.ctx, policy.normalize)
    except ConfigError as error:
        if cfg.with_eval:
            raise
        print(f"rlplug: nothing judges this run, which has no environment: {error}", file=sys.stderr, flush=True)
        return None
