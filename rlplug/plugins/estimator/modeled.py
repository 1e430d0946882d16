"""Off-policy evaluation with a model of action values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlplug.api import Context, Estimator
from rlplug.functional.off_policy import doubly_robust
from rlplug.settings import option, settings
from rlplug.types import Batch, EnvSpec


class DirectMethod(Estimator):
    """Takes the model's value of the first state."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None: ...

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        return ("value",)

    def estimate(self, episodes: Batch, gamma: float) -> Tensor:
        return episodes["value"][0]


class DoublyRobust(Estimator):
    """Corrects the model by its importance-weighted errors; see ``functional.off_policy.doubly_robust``."""

    @settings
    class Config:
        weighted: bool = option("Divide by the sum of the weights instead of the number of episodes.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        return ("log_weight", "q", "value")

    def estimate(self, episodes: Batch, gamma: float) -> Tensor:
        reward, q, value, log_weight, valid = (episodes[key] for key in ("reward", "q", "value", "log_weight", "valid"))
        return doubly_robust(reward, q, value, log_weight, valid, gamma, weighted=self.cfg.weighted)
