"""Off-policy evaluation by importance weights, without a model: Precup et al. 2000."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlplug.api import Context, Estimator
from rlplug.functional.off_policy import importance_sampling, weighted_importance_sampling
from rlplug.settings import option, settings
from rlplug.types import Batch, EnvSpec


class ImportanceSampling(Estimator):
    """Weights rewards by the importance ratios of the actions; see ``functional.off_policy``."""

    @settings
    class Config:
        per_step: bool = option("Weight every reward by the actions before it; false: by those of the whole episode.")
        weighted: bool = option("Divide by the sum of the weights instead of the number of episodes.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg

    @classmethod
    def reads(cls, cfg: Any, spec: EnvSpec) -> tuple[str, ...]:
        return ("log_weight",)

    def estimate(self, episodes: Batch, gamma: float) -> Tensor:
        function = weighted_importance_sampling if self.cfg.weighted else importance_sampling
        reward, log_weight, valid = (episodes[key] for key in ("reward", "log_weight", "valid"))
        return function(reward, log_weight, valid, gamma, per_step=self.cfg.per_step)
