"""MiniGrid missions as word indices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, MultiDiscrete
from gymnasium.wrappers import TransformObservation

from rlplug.envs.checking import MisfitError
from rlplug.envs.wrapping import Env, Wrapping, view
from rlplug.types import ConfigError

KEY = "mission"
BABYAI = (
    *("a", "after", "and", "ball", "behind", "blue", "box", "door", "front", "go", "green", "grey", "in", "key"),
    *("left", "next", "object", "of", "on", "open", "pick", "purple", "put", "red", "right", "the", "then", "to"),
    *("up", "yellow", "you", "your"),
)
"""All words of BabyAI, which its mission space does not list"""
BABYAI_LONGEST = 72
"""maximum words: put <object> next to <object> and ..., then put ... and ..., with 7 words per object"""


@dataclass(frozen=True, kw_only=True)
class MissionWrapping(Wrapping):
    """``Wrapping`` of MiniGrid and BabyAI environments.

    With ``mission``, observations have ``mission [L]``: the indices of its words, from 1, padded with 0. Indices depend
    only on the environment's mission space. False: remove the mission; None: remove it if it is always the same.
    """

    mission: bool | None = None

    def __call__(self, env: Env) -> Env:
        """Wrap an environment.

        Raises:
            ConfigError: also if ``mission`` is set, and the environment has no mission, or one without words.
        """
        space = env.observation_space
        if not isinstance(space, Dict) or KEY not in space.spaces:
            if self.mission:
                raise ConfigError("env.mission", f"is true, but the observation has no mission: it is {space}")
            return super().__call__(env)
        words, longest, varies = _language(space[KEY])
        if self.mission or (self.mission is None and varies):
            if not longest:
                raise ConfigError("env.mission", "is true, but the mission has no words; use false")
            tokens = MultiDiscrete([len(words) + 1] * longest)
            env = TransformObservation(env, _Tokens(words, longest), Dict({**space.spaces, KEY: tokens}))
        else:
            left, function = view(space, [KEY], None)
            env = TransformObservation(env, function, left)
        return super().__call__(env)


class _Tokens:
    """Replaces the mission of an observation by the indices of its words."""

    def __init__(self, words: tuple[str, ...], length: int) -> None:
        self.numbers, self.length = {word: i for i, word in enumerate(words, 1)}, length

    def __call__(self, obs: Any) -> dict[str, Any]:
        said, tokens = _words(obs[KEY]), np.zeros(self.length, np.int64)
        if unknown := [word for word in said if word not in self.numbers]:
            raise MisfitError(f"the mission {obs[KEY]!r} has the word {unknown[0]!r}, which its space does not contain")
        if len(said) > self.length:
            raise MisfitError(f"the mission {obs[KEY]!r} has {len(said)} words; its space has {self.length} at most")
        tokens[: len(said)] = [self.numbers[word] for word in said]
        return {**obs, KEY: tokens}


def _language(space: Any) -> tuple[tuple[str, ...], int, bool]:
    """Return the words of a mission space, the length of its longest mission, and whether there are several missions.

    Raises:
        ConfigError: it is not a mission space.
    """
    if type(space).__name__ == "BabyAIMissionSpace":
        return BABYAI, BABYAI_LONGEST, True
    if not hasattr(space, "mission_func"):
        raise ConfigError("env.id", f"its mission is not a MiniGrid sentence but {space}; use env=gymnasium")
    missions = {space.mission_func(*filling) for filling in product(*(space.ordered_placeholders or ()))}
    said = [_words(mission) for mission in missions]
    return tuple(sorted({word for words in said for word in words})), max(map(len, said)), len(missions) > 1


def _words(mission: str) -> list[str]:
    return re.findall(r"\w+", mission.lower())
