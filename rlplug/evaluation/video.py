"""Pictures of a policy: greedy episodes, drawn by their environment, and MP4 files of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.play import Stopped
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.functional.returns import ended
from rlplug.types import ConfigError, RunError

ALONE = EnvShard("eval", 1, range(1))


def check_pictures(env: VecEnv) -> None:
    """Close an environment; raise ``ConfigError`` if it renders no images, or videos cannot be written."""
    with closing(env):
        env.reset([0])
        _picture(env)
    _ffmpeg()


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


def record(path: Path, shown: Iterator[np.ndarray], fps: float) -> None:
    """Write images to the MP4 file ``path`` one by one; nothing is left if they end with ``Stopped``.

    Raises:
        RunError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, first = path.with_suffix(".partial"), next(shown)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-r", f"{fps}", "-s", "{1}x{0}".format(*first.shape), "-i", "-"]
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # as players expect
    command = [_ffmpeg(), "-y", "-loglevel", "error", *raw, *even, "-f", "mp4", str(partial)]
    try:
        with Popen(command, stdin=PIPE, stderr=PIPE, process_group=0) as ffmpeg:  # Ctrl-C is for this process only
            with suppress(BrokenPipeError):
                for picture in chain([first], shown):
                    ffmpeg.stdin.write(picture)  # type: ignore[union-attr]
            _, said = ffmpeg.communicate()
        if ffmpeg.returncode:
            raise RunError(f"{path} cannot be written: {said.decode(errors='replace').strip().splitlines()[-1]}")
        partial.replace(path)
    except Stopped:
        pass
    finally:
        partial.unlink(missing_ok=True)


def _ffmpeg() -> str:
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError as error:
        raise ConfigError("eval.record", f"videos need imageio-ffmpeg ({error}): pip install 'rlplug[video]'") from None
    return get_ffmpeg_exe()


def _picture(env: Any) -> np.ndarray:
    """Render the first column of an environment, ``[H, W, 3]`` uint8."""
    try:
        shown = env.traits.render and env.traits.render()
    except NotImplementedError:  # it supports only other modes, such as human
        shown = None
    if shown is None:
        raise ConfigError("eval.record", "this environment cannot render rgb_array images; use 0")
    return np.ascontiguousarray(shown, np.uint8)
