"""Images that environments render."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from rlplug.api import VecEnv
from rlplug.tracking import ffmpeg
from rlplug.types import ConfigError


def check_pictures(env: VecEnv) -> None:
    """Close an environment; raise ``ConfigError`` if it renders no images, or videos cannot be written."""
    with closing(env):
        env.reset([0])
        picture(env)
    ffmpeg()


def picture(env: Any) -> np.ndarray:
    """Render the first column of an environment, ``[H, W, 3]`` uint8.

    Raises:
        ConfigError: it renders no images.
    """
    try:
        shown = env.traits.render and env.traits.render()
    except NotImplementedError:  # it supports only other modes, such as human
        shown = None
    if shown is None:
        raise ConfigError("eval.record", "this environment cannot render rgb_array images; use 0")
    return np.ascontiguousarray(shown, np.uint8)
