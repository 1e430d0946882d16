"""MiniGrid and BabyAI environments."""

from __future__ import annotations

from rlplug.envs.mission import MissionWrapping
from rlplug.plugins.env import gymnasium
from rlplug.settings import option, settings


class MiniGrid(gymnasium.Gymnasium):
    """Like ``gymnasium``, with the mission as word indices, or without it. Raises the same errors."""

    @settings
    class Config(gymnasium.Config):
        mission: bool | None = option(
            "Include the mission as word indices; null: unless it is always the same sentence."
        )

    wrapping = MissionWrapping
