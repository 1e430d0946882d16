"""Evaluations that actors play while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlplug.actors.actor import Examiner
from rlplug.actors.pool import Crew, Request
from rlplug.context import ResolvedRun
from rlplug.evaluation.evaluator import Played, shares_of
from rlplug.trainer.policy import Policy


class AsyncEval:
    """One at a time: the very episodes that ``Evaluator`` would play, shared out.

    Raises:
        ConfigError: the actors cannot be made.
    """

    def __init__(self, policy: Policy, resolved: ResolvedRun) -> None:
        actors = resolved.plan.actors
        assert actors is not None
        self.policy, self.env_steps = policy, 0
        """environment step of the policy that is being played, or was last"""
        self.playing, self._begun = False, 0
        shares = [share for share in shares_of(policy.config.eval.episodes, actors.evaluation) if len(share)]
        # what is lost would be missing in the mean
        cfg = replace(actors, num_aggregation_workers=0, on_failure="recreate")
        self.crew = Crew(cfg, shares, resolved, first=actors.count, kind=Examiner)

    def begin(self, env_steps: int) -> None:
        """Play the policy as it is now."""
        self.env_steps, self.playing, self._begun = env_steps, True, self._begun + 1
        weights = self.crew.put(self.policy.acting_weights())
        self.crew.ask(Request(env_steps, "greedy", self.policy.statistics(), self._begun, weights))

    def poll(self) -> Played | None:
        """What was played, once, when it is there."""
        if not self.playing or not self.crew.poll():
            return None
        self.playing = False
        pieces: list[tuple[Any, Any]] = list(self.crew.gather())  # of examiners: episodes
        return [episode for _, played in pieces for episode in played]

    def wait(self, stop: Callable[[], bool]) -> Played | None:
        """As ``poll``, once it is there, or ``stop`` says so."""
        while (played := self.poll()) is None and not stop():
            time.sleep(0.05)
        return played

    def close(self) -> None:
        self.crew.close()
