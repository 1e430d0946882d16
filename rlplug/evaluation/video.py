"""Recording what a policy does: greedy episodes as animated pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.play import Stopped
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.functional.returns import ended
from rlplug.types import ConfigError

LONGEST = 1000  # pictures of a video; later ones are not shown
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
    stop: Callable[[], bool],
) -> None:
    """Play greedy episodes in ``env``, which is closed afterwards, and write their pictures to ``path``, a GIF.

    Once ``stop()``, which is asked at every picture, nothing is written.
    """
    from PIL import Image

    def shown(left: int) -> Iterator[Image.Image]:  # while they are encoded, which may take longer than to play
        collector = make_shard(env, algorithm, ctx, ALONE, [ctx.seed], {}, (), normalize, ())
        collector.reset()
        for _ in range(LONGEST):
            if stop():
                raise Stopped
            yield Image.fromarray(_picture(env))
            left -= int(ended(collector.collect(1, "greedy"))[0, 0])
            if not left:
                return

    path.parent.mkdir(exist_ok=True)
    partial, pictures = path.with_suffix(".partial"), shown(episodes)
    duration = round(1000 / env.traits.render_fps)
    with suppress(Stopped), closing(env):
        next(pictures).save(partial, "GIF", save_all=True, append_images=pictures, duration=duration, loop=0)
        partial.replace(path)
    partial.unlink(missing_ok=True)


def _picture(env: Any) -> np.ndarray:
    """Return what the first column of an environment looks like, ``[H, W, 3]`` uint8."""
    try:
        shown = env.traits.render and env.traits.render()
    except NotImplementedError:  # it has another mode only, such as human
        shown = None
    if shown is None:
        raise ConfigError("eval.record", "this environment shows no pictures of itself (rgb_array); 0 records none")
    return np.asarray(shown, np.uint8)
