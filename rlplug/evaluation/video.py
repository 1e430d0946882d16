"""Videos of a policy: greedy episodes as animated GIFs."""

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

LONGEST = 1000  # frames of a video; later ones are dropped
ALONE = EnvShard("eval", 1, range(1))


def check_pictures(env: VecEnv) -> None:
    """Raise ``ConfigError`` if an environment does not render images; close it afterwards."""
    with closing(env):
        env.reset([0])
        _picture(env)


def record_video(
    env: VecEnv,
    path: Path,
    algorithm: Algorithm,
    ctx: RunContext,
    episodes: int,
    normalize: Callable[[Any], Any] | None,
    stop: Callable[[], bool],
) -> None:
    """Play greedy episodes in ``env``, write their frames to the GIF ``path``, and close ``env``.

    Nothing is written if ``stop()``, which is called at every frame, returns True.
    """
    from PIL import Image

    def shown(left: int) -> Iterator[Image.Image]:  # during encoding, which may take longer than playing
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
    """Render the first column of an environment, ``[H, W, 3]`` uint8."""
    try:
        shown = env.traits.render and env.traits.render()
    except NotImplementedError:  # it supports only other modes, such as human
        shown = None
    if shown is None:
        raise ConfigError("eval.record", "this environment cannot render rgb_array images; use 0")
    return np.asarray(shown, np.uint8)
