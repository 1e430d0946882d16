"""What a trained policy says of observations: values, distributions of actions, and Q-values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Algorithm
from rlplug.nn import Distribution
from rlplug.types import Batch, EnvSpec


class Insight:
    """Evaluates observations without acting. A recurrent state is read, and not changed.

    Every method takes one observation, or those of ``n`` environments, and the further arguments of ``act``.
    """

    algorithm: Algorithm
    spec: EnvSpec

    def _step_of(self, obs: Any, reward: Any, action_mask: Any, env_state: Any) -> tuple[Batch, int, Any]:
        """Return the row of observations as arrays, their number, and the index that selects the caller's results."""
        raise NotImplementedError

    def _look(self, step: Batch, columns: int, look: Callable[[Batch, Batch], Any]) -> Any:
        """Return ``look(row, carry)`` of tensors."""
        raise NotImplementedError

    def value(self, obs: Any, reward: Any = None, action_mask: Any = None, env_state: Any = None) -> Any:
        """Return the critic's estimate of the discounted return, a number or ``[n]``.

        Raises:
            ValueError: the algorithm has no critic of observations; or see ``act``.
        """
        self._check()
        step, columns, select = self._step_of(obs, reward, action_mask, env_state)

        def look(row: Batch, carry: Batch) -> Any:
            return self.algorithm.values(_stream(row, carry))[0]

        values = self._asked("values", lambda: self._look(step, columns, look))
        return values.cpu().numpy()[select]

    def distribution(
        self, obs: Any, reward: Any = None, action_mask: Any = None, env_state: Any = None
    ) -> Distribution:
        """Return the distribution of actions that ``act(mode="explore")`` samples, of one row or of ``[n]`` rows.

        It has ``mode()``, ``logp(action)``, ``entropy()`` and ``params``, as tensors. Bounded continuous actions are in
        [-1, 1], as inside rlplug.

        Raises:
            ValueError: the algorithm has no such distribution; or see ``act``.
        """
        self._check()
        step, columns, select = self._step_of(obs, reward, action_mask, env_state)

        def look(row: Batch, carry: Batch) -> Any:
            dist = self.algorithm.distribution(_stream(row, carry))
            return dist.rebuild(dist.params[0][select])

        return self._asked("distribution", lambda: self._look(step, columns, look))

    def q(self, obs: Any, reward: Any = None, action_mask: Any = None, env_state: Any = None) -> Any:
        """Return the value of every action, ``[A]`` or ``[n, A]``; masked actions have the smallest finite number.

        Raises:
            ValueError: the algorithm computes no values of all actions; or see ``act``.
        """
        self._check()
        step, columns, select = self._step_of(obs, reward, action_mask, env_state)
        out = self._look(step, columns, lambda row, carry: self.algorithm.act(row, carry, "greedy")[0])
        if "q" not in out:
            raise ValueError(f"{type(self.algorithm).__name__} computes no values of all actions; see value(obs)")
        return out["q"].cpu().numpy()[select]

    def _check(self) -> None:
        if self.spec.has_agents:
            raise ValueError("values and distributions are offered for policies of a single agent")

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except NotImplementedError:
            raise ValueError(f"{type(self.algorithm).__name__} offers no {what}") from None


def _stream(row: Batch, carry: Batch) -> Batch:
    """Return one row ``[B, ...]`` as a stream ``[1, B, ...]``."""
    valid = {"valid": torch.ones_like(row["is_first"])} | ({"carry": carry} if carry else {})
    return tree.map(lambda x: x[None], row | valid)


def select_of(n: int | None) -> Any:
    """Return the index that selects the results of ``n`` observations; None: of one observation without an axis."""
    return 0 if n is None else np.s_[:]


def has_density(cls: type[Algorithm]) -> bool:
    """Return whether an algorithm offers log-probabilities of actions."""
    return cls.logp is not Algorithm.logp or cls.distribution is not Algorithm.distribution
