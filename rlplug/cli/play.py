"""``play``: show greedy episodes of a checkpoint in a window, or as a page."""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlplug.cli import say, tell, without_json
from rlplug.cli.arguments import run_first
from rlplug.cli.meant import no_flag
from rlplug.registry import warn_broken
from rlplug.types import ConfigError

USAGE = """rlplug play <run folder or checkpoint> [--page [--json]] [key=value ...]

Shows greedy episodes in the run's environment, with the weights of the run's newest good checkpoint or of the given
one (as checkpoints/best), in a window. Escape, Q or closing the window ends it. --page writes them as a video in one
HTML page, which works offline, to videos/ of the run folder, and opens it in the browser; it needs no display. --json
prints the page's path as one JSON object.

  eval.episodes=3          how many episodes; as in the run, if not given; with --page one
  seed=7                   other episodes
  env.max_episode_steps=50, +env.kwargs.g=9.8
                           change the environment, as long as its spaces stay the same"""

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>:root {{ color-scheme: light dark }} body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
font: 1rem system-ui, sans-serif }} video {{ width: 100%; max-height: 85vh }}</style>
<h1>{title}</h1><video controls autoplay loop muted src="data:video/mp4;base64,{video}"></video></html>
"""
NO_WINDOW = "there is no display to open a window on ({}); --page shows the run in a browser, and `rlplug evaluate "
NO_WINDOW += "{} --record` writes a video"


def main(arguments: Sequence[str]) -> int:
    """Show one checkpoint.

    Raises:
        ConfigError: there is no checkpoint or no display, or the environment renders no images.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, as_json = without_json(arguments)
    words, with_page = [word for word in words if word != "--page"], "--page" in words
    if flags := [word for word in words if word.startswith("-")]:
        raise no_flag(flags[0], "see rlplug play --help")
    if as_json and not with_page:
        raise ConfigError("", "a window has no result for --json; add --page, or use rlplug evaluate --json")
    path, overrides = run_first("play", words)
    warn_broken()
    if with_page:
        page = _page(path, overrides)
        say(json.dumps({"page": str(page)}) if as_json else page)
        if sys.stdout.isatty():
            webbrowser.open(page.absolute().as_uri())
        return 0
    window = _Window(path)

    images, fps, _ = episodes(path, overrides)
    window.show(images, fps)
    return 0


def episodes(path: str | Path, overrides: Sequence[str], n: Callable[[Any], int] = lambda eval: eval.episodes) -> Any:
    """Return images ``[H, W, 3]`` uint8 of greedy episodes, how many a second shows, and the file for their video.

    Args:
        n: returns the number of episodes for the settings ``eval``.

    Raises:
        ConfigError: see ``results.evaluate``.
    """
    from rlplug.evaluation.evaluator import ALONE, pictures
    from rlplug.results.evaluate import stage  # here, because torch takes seconds to import

    checkpoint, _, core, algorithm, ctx, normalize, make = stage(path, overrides, tell)
    env = make(ALONE, True)
    name = f"evaluation_{checkpoint.steps:012d}_s{core.seed}.mp4"
    images = pictures(env, algorithm, ctx, n(core.eval), normalize)
    return images, env.traits.render_fps, checkpoint.path.parents[1] / "videos" / name


def video(path: str | Path, overrides: Sequence[str]) -> Path:
    """Write a video of ``eval.record`` greedy episodes, or one, to ``videos/`` of the run folder; return the file."""
    images, fps, file = episodes(path, overrides, lambda eval: max(eval.record, 1))

    from rlplug.tracking import write_video

    write_video(file, images, fps)
    return file


class _Window:
    """A window that shows images.

    Raises:
        ConfigError: there is no display, or pygame is not installed.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            import pygame
        except ImportError as error:
            raise ConfigError("", f"play needs pygame ({error}): pip install 'gymnasium[classic-control]'") from None
        self.pygame: Any = pygame
        self.path, reason = path, "neither DISPLAY nor WAYLAND_DISPLAY is set"
        if sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
            try:
                pygame.display.init()
                reason = "SDL_VIDEODRIVER=dummy" if pygame.display.get_driver() == "dummy" else ""
            except pygame.error as error:
                reason = str(error)
        if reason:
            raise ConfigError("", NO_WINDOW.format(reason, path))

    def show(self, images: Iterator[Any], fps: float) -> None:
        """Show images at their pace, until they end or the window is closed."""
        pygame, screen, clock = self.pygame, None, self.pygame.time.Clock()
        for image in images:
            size = image.shape[1::-1]
            if screen is None:
                scale = max(1, 480 // size[1])
                screen = pygame.display.set_mode((size[0] * scale, size[1] * scale))
                pygame.display.set_caption(f"rlplug play {self.path}")
            surface = pygame.image.frombuffer(image.tobytes(), size, "RGB")
            screen.blit(pygame.transform.scale(surface, screen.get_size()), (0, 0))
            pygame.display.flip()
            for event in pygame.event.get():
                keys = (pygame.K_ESCAPE, pygame.K_q)
                if event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key in keys):
                    return
            clock.tick(fps)


def _page(path: Path, overrides: Sequence[str]) -> Path:
    """Write a page with a video; return its path."""
    import html

    from rlplug.checkpointing import atomic
    from rlplug.tracking import write_video

    asked = any(word.startswith("eval.episodes=") for word in overrides)
    images, fps, file = episodes(path, overrides, lambda eval: eval.episodes if asked else 1)
    with tempfile.TemporaryDirectory() as folder:
        write_video(video := Path(folder) / "play.mp4", images, fps)
        shown = base64.b64encode(video.read_bytes()).decode()
    page = file.with_name("play.html")
    page.parent.mkdir(exist_ok=True)
    atomic.replace(page, PAGE.format(title=html.escape(f"rlplug play {path}"), video=shown).encode())
    return page
