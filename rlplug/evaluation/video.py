"""Pictures of a policy: greedy episodes, drawn by their environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.play import Stopped
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.functional.returns import ended
from rlplug.tracking import ffmpeg
from rlplug.types import ConfigError

ALONE = EnvShard("eval", 1, range(1))


def check_pictures(env: VecEnv) -> None:
    """Close an environment; raise ``ConfigError`` if it renders no images, or videos cannot be written."""
    with closing(env):
        env.reset([0])
        _picture(env)
    ffmpeg()


def pictures(
    env: VecEnv,
    algorithm: Algorithm,
    ctx: RunContext,
    episodes: int,
    normalize: Callable[[Any], Any] | None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[np.ndarray]:
    """Play greedy episodes in ``env``, yield an image ``[H, W, 3]`` uint8 before every step, and close ``env``.

    Raises:
        Stopped: ``stop()``, which is called before every image, returned True.
    """
    with closing(env):
        collector = make_shard(env, algorithm, ctx, ALONE, [ctx.seed], {}, (), normalize, ())
        collector.reset()
        while episodes:
            if stop():
                raise Stopped
            yield _picture(env)
            episodes -= int(ended(collector.collect(1, "greedy"))[0, 0])


def _picture(env: Any) -> np.ndarray:
    """Render the first column of an environment, ``[H, W, 3]`` uint8."""
    try:
        shown = env.traits.render and env.traits.render()
    except NotImplementedError:  # it supports only other modes, such as human
        shown = None
    if shown is None:
        raise ConfigError("eval.record", "this environment cannot render rgb_array images; use 0")
    return np.ascontiguousarray(shown, np.uint8)
