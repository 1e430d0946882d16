"""Recording what a policy does: greedy episodes as animated pictures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.collector import make_collector
from rlplug.context import EnvShard, RunContext
from rlplug.types import ConfigError

LONGEST = 1000
"""frames of a video; what comes behind is not shown"""
ALONE = EnvShard("eval", 1, range(1))


def picture(env: Any) -> np.ndarray:
    """What the first column of an environment looks like, ``[H, W, 3]`` uint8.

    Raises:
        ConfigError: it does not say.
    """
    shown = env.render() if hasattr(env, "render") else None
    if shown is None:
        raise ConfigError("eval.record", "this environment shows no pictures of itself; 0 records none")
    return np.asarray(shown, np.uint8)


def check_pictures(make: Callable[[], VecEnv]) -> None:
    """Make an environment that renders itself, and look at it.

    Raises:
        ConfigError: it does not.
    """
    with closing(make()) as env:
        env.reset([0])
        picture(env)


def frames(
    env: VecEnv, algorithm: Algorithm, ctx: RunContext, seed: int, episodes: int, normalize: Callable[[Any], Any] | None
) -> list[np.ndarray]:
    """Play greedy episodes, and return the picture ``[H, W, 3]`` of every row."""
    collector = make_collector(env, algorithm, ctx, ALONE, [seed], keys=(), normalize=normalize)
    collector.reset()
    shown: list[np.ndarray] = []
    while episodes and len(shown) < LONGEST:
        shown.append(picture(env))
        for segment in collector.collect(1, mode="greedy"):
            episodes -= int((segment["terminated"] | segment["truncated"])[0, 0])
    return shown


def record(
    make: Callable[[], VecEnv],
    path: Path,
    algorithm: Algorithm,
    ctx: RunContext,
    seed: int,
    episodes: int,
    normalize: Callable[[Any], Any] | None,
) -> None:
    """Play greedy episodes in an environment of their own, and write ``path``, a GIF."""
    from PIL import Image

    with closing(make()) as env:
        shown = frames(env, algorithm, ctx, seed, episodes, normalize)
        first, *others = [Image.fromarray(picture) for picture in shown]
        fps = getattr(env, "render_fps", 30)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    first.save(partial, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    partial.replace(path)
