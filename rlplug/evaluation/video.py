"""Recording what a policy does: greedy episodes as animated pictures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.making import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.functional.returns import ended
from rlplug.types import ConfigError

LONGEST = 1000  # frames of a video; later ones are not shown
ALONE = EnvShard("eval", 1, range(1))


def check_pictures(env: VecEnv) -> None:
    """Raise ``ConfigError`` if an environment, which is closed afterwards, shows no pictures of itself."""
    with closing(env):
        env.reset([0])
        _picture(env)


def record(
    env: VecEnv,
    path: Path,
    algorithm: Algorithm,
    ctx: RunContext,
    episodes: int,
    normalize: Callable[[Any], Any] | None,
) -> None:
    """Play greedy episodes in ``env``, which is closed afterwards, and write their pictures to ``path``, a GIF."""
    from PIL import Image

    with closing(env):
        collector = make_shard(env, algorithm, ctx, ALONE, [ctx.seed], keys=(), normalize=normalize)
        collector.reset()
        shown: list[np.ndarray] = []
        while episodes and len(shown) < LONGEST:
            shown.append(_picture(env))
            segment = collector.collect(1, "greedy")
            episodes -= int(ended(segment)[0, 0])
        first, *others = [Image.fromarray(picture) for picture in shown]
        fps = getattr(env, "render_fps", 30)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    first.save(partial, "GIF", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    partial.replace(path)


def _picture(env: Any) -> np.ndarray:
    """Return what the first column of an environment looks like, ``[H, W, 3]`` uint8."""
    shown = env.render() if hasattr(env, "render") else None
    if shown is None:
        raise ConfigError("eval.record", "this environment shows no pictures of itself; 0 records none")
    return np.asarray(shown, np.uint8)
