"""Evaluation by Ray actors while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlplug.actors.actor import EvalActor
from rlplug.actors.handle import Request
from rlplug.actors.pool import ActorPool
from rlplug.context import ResolvedRun
from rlplug.evaluation.evaluator import Played, shares_of
from rlplug.trainer.policy import Policy


class AsyncEval:
    """Plays one evaluation at a time: the same episodes that ``Evaluator`` plays, shared out among actors.

    Raises:
        ConfigError: the actors cannot run as configured.
    """

    def __init__(self, policy: Policy, resolved: ResolvedRun) -> None:
        actors = resolved.plan.actors
        assert actors is not None
        self.policy = policy
        self.env_steps = 0
        """environment step of the policy in the current evaluation, or in the last one"""
        self.playing, self._version = False, 0
        shares = [share for share in shares_of(policy.config.eval.episodes, actors.evaluation) if len(share)]
        # the episodes of a lost actor would be missing from the mean
        cfg = replace(actors, num_aggregation_workers=0, on_failure="recreate")
        self.pool = ActorPool(cfg, shares, resolved, first=actors.count, kind=EvalActor)

    def begin(self, env_steps: int) -> None:
        """Begin to evaluate the current policy."""
        self.env_steps, self.playing, self._version = env_steps, True, self._version + 1
        weights = self.pool.put(self.policy.acting_weights())
        self.pool.request(Request(env_steps, "greedy", self.policy.statistics(), self._version, weights))

    def poll(self) -> Played | None:
        """Return the episodes, once, when all are finished; None before that."""
        if not self.playing or not self.pool.poll():
            return None
        self.playing = False
        parts: list[tuple[Any, Any]] = list(self.pool.gather())
        return [episode for _, episodes in parts for episode in episodes]

    def wait(self, stop: Callable[[], bool]) -> Played | None:
        """Return the episodes when all are finished; None if ``stop()`` comes first."""
        while (played := self.poll()) is None and not stop():
            time.sleep(0.05)
        return played

    def close(self) -> None:
        self.pool.close()
