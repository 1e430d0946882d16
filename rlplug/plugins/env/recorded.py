"""The spaces of a dataset, for training without its environment."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode

from rlplug.api import Context, EnvTraits, VecEnv
from rlplug.data.recording import files_of, open_file
from rlplug.data.source import Reading
from rlplug.settings import option, settings
from rlplug.types import ConfigError, EnvSpec, RunError

WAY = "python -m rlplug estimate <run> estimates its policy's return from recorded episodes"
UNPLAYABLE = f"env=recorded has only recorded episodes and cannot be played; {WAY}"


class Recorded(VecEnv):
    """An environment with the spaces of a dataset; it cannot be stepped, so there are no evaluation episodes.

    Raises:
        ConfigError: there is no file, or it was written by another library and has no spaces.
    """

    traits = EnvTraits(playable=False)
    autoreset = AutoresetMode.NEXT_STEP

    @settings
    class Config:
        path: str = option("Files, a folder or a pattern, written by rlplug.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        reading = Reading(damaged="skip", unfinished="skip", key="env.path")
        source = open_file(files_of(cfg.path, reading.key)[0], reading)
        if source.spec is None:
            raise ConfigError(
                "env.path", f"{source.path} does not declare its spaces; choose its environment with env="
            )
        self.spec: EnvSpec = source.spec

    def reset(self, seeds: Any, tasks: Any = None) -> Any:
        raise RunError(UNPLAYABLE)

    def step(self, action: Any) -> Any:
        raise RunError(UNPLAYABLE)

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
