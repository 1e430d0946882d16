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
from rlplug.envs.pictures import picture
from rlplug.functional.returns import ended

ALONE = EnvShard("eval", 1, range(1))


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
            yield picture(env)
            episodes -= int(ended(collector.collect(1, "greedy"))[0, 0])
