"""Environments of MiniGrid and BabyAI."""

from __future__ import annotations

from rlplug.envs.mission import MissionWrapping
from rlplug.plugins.env import gymnasium
from rlplug.settings import option, settings


class MiniGrid(gymnasium.Gymnasium):
    """As ``gymnasium``, with the mission as numbers, or without it. Raises the same."""

    @settings
    class Config(gymnasium.Config):
        mission: bool | None = option(
            "Numbers of the mission's words in the observation; false: it is left out; null: where it is always the"
            " same."
        )

    wrapping = MissionWrapping
