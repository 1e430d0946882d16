"""The settings of off-policy estimates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings


def paths(value: Any) -> Any:
    """Return a list of paths; a single one may stand without it."""
    return [value] if isinstance(value, str) else value


Method = Literal["episode_is", "step_is", "episode_wis", "step_wis", "dm", "dr", "wdr"]


@settings
class Estimate:
    """Off-policy estimates: what the policy would return, judged by recorded episodes."""

    methods: Annotated[list[Method], Field(min_length=1)] = option(
        "(Weighted) importance sampling per episode or step, direct method, (weighted) doubly robust."
    )
    with_eval: bool | None = option(
        "Estimate with every evaluation of a run; null: where no environment can be played and the recording allows it."
    )
    path: Annotated[list[str], Field(min_length=1), BeforeValidator(paths)] | None = option(
        "Files, folders or patterns of the episodes that a run is judged by; null: those of data.path."
    )
    gamma: UnitFloat = option("Discount of the return that is estimated.")
    confidence: Annotated[float, Field(gt=0, lt=1)] = option("Level of the confidence intervals.")
    folds: PositiveInt = option("Models of dm and dr: each judges the episodes that it was not fitted to; 1: all.")
    iterations: PositiveInt = option("Fits of these models: the first quarter to returns, each other one to a backup.")
    updates: PositiveInt = option("Gradient steps of a fit.")
    batch_size: PositiveInt = option("Steps of episodes per gradient step.")
    lr: PositiveFloat = option("Adam's step size at the beginning; it falls to zero.")
    action_samples: PositiveInt = option("Actions per state that stand for a policy, unless actions are Discrete.")
