"""Any environment that is registered with Gymnasium."""

from __future__ import annotations

from typing import Any, Literal

from rlplug.api import Context, VecEnv
from rlplug.envs.making import find, has_native, make_list, make_native
from rlplug.settings import PositiveInt, option, settings


@settings
class Config:
    id: str = option("Registered id, or module:id to import the module that registers it.")
    kwargs: dict[str, Any] = option("Arguments of the environment's constructor.")
    vectorization: Literal["auto", "native", "list"] = option(
        "native: the vector that the environment brings; list: single environments in a loop, every episode with a"
        " seed of its own; auto: native where there is one."
    )
    max_episode_steps: PositiveInt | None = option("Steps after which an episode is truncated; null: as registered.")


class Gymnasium:
    """Makes an ``EnvList`` or a ``NativeVector`` of one environment for each of ``ctx.env_ids``.

    Raises:
        ConfigError: no such environment, or it cannot be made.
    """

    Config = Config

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:  # type: ignore[misc]
        spec = find(cfg.id)
        native = cfg.vectorization == "native" or (cfg.vectorization == "auto" and has_native(spec))
        return (make_native if native else make_list)(spec, len(ctx.env_ids), cfg.kwargs, cfg.max_episode_steps)
