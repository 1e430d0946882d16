"""What loggers share: their registration, rows that a tracker lacks, and commit, video and best weights of a run.

Also the writing of videos.
"""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import psutil
import torch

from rlplug.api import Run
from rlplug.types import ConfigError, RunError

_driven = itertools.count()  # counts the runs of this process
GIT_S = 20  # timeout of git in seconds
# errors of the disk or of existing files
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EISDIR, errno.ENOTDIR)


class Rows:
    """Chooses the metrics that a tracker lacks, so that it has each of them once per step.

    A resumed run logs the steps after its checkpoint again, and most trackers cannot delete rows. A killed process may
    not have sent its last rows, and a tracker may be new to a resumed run; ``metrics.csv`` has these rows.

    Args:
        last: highest step of each metric that the tracker has.
    """

    def __init__(self, last: Mapping[str, int] | None = None) -> None:
        self._last = dict(last or {})

    def new(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the metrics that the tracker lacks at a step; they count as sent from now on."""
        found = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        self._last |= dict.fromkeys(found, step)
        return found

    def missing(self, run: Run) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield step and metrics of each row before the checkpoint of a resumed run that the tracker lacks."""
        if not run.logged:
            return
        with (run.run_dir / "metrics.csv").open(newline="") as file:
            for row in islice(csv.DictReader(file), run.logged):
                step = int(row.pop("step"))
                if found := self.new({name: float(value) for name, value in row.items() if value}, step):
                    yield step, found


def manifest(run: Run) -> dict[str, Any]:
    """Return the run's ``manifest.json``; ``run`` in it is the identity that a resumed run keeps."""
    return json.loads((run.run_dir / "manifest.json").read_bytes())


def checkout() -> dict[str, Any] | None:
    """Return the commit of the working directory's checkout and whether it has changes; None outside of one.

    The configuration of an untrusted repository can execute programs, as monitor, filters or hooks. Therefore git
    looks for changes through a folder without configuration that links to the same objects and index.
    """

    def ask(*words: str, **variables: str) -> str:
        given = {"env": {**os.environ, **variables}, "capture_output": True, "text": True, "timeout": GIT_S}
        return subprocess.run(["git", "-c", "core.fsmonitor=", *words], check=True, **given).stdout  # type: ignore[call-overload]

    paths = [word for name in ("objects", "index", "info/exclude") for word in ("--git-path", name)]
    try:
        commit, *found = ask("rev-parse", "HEAD", *paths).splitlines()
        objects, index, exclude = map(os.path.abspath, found)
        top = next(str(folder) for folder in (Path.cwd(), *Path.cwd().parents) if (folder / ".git").exists())
        with tempfile.TemporaryDirectory() as own:
            for name in ("refs", "info"):
                Path(own, name).mkdir()
            Path(own, "HEAD").write_text(commit, encoding="ascii")
            Path(own, "info", "exclude").symlink_to(exclude)
            places = {"GIT_DIR": own, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index}
            words = ("status", "--porcelain", "--ignore-submodules=dirty")
            changed = ask(*words, GIT_OPTIONAL_LOCKS="0", **places)
    except (OSError, ValueError, subprocess.SubprocessError, StopIteration):
        return None
    return {"commit": commit, "changed": bool(changed.strip())}


def commit(run: Run) -> str | None:
    """Return the Git commit of the folder in which the run was started; None outside of a repository."""
    git = manifest(run)["git"]
    return git and git["commit"]


def video(run: Run) -> Path | None:
    """Return the video of the evaluation that has just ended; None: none was recorded."""
    path = run.run_dir / "videos" / f"step_{run.steps:012d}.mp4"
    return path if path.is_file() else None


def write_video(path: Path, shown: Iterator[np.ndarray], fps: float) -> None:
    """Write images to the MP4 file ``path`` one by one; nothing is left if they end with an error.

    Raises:
        RunError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, first = path.with_suffix(".partial"), next(shown)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-r", f"{fps}", "-s", "{1}x{0}".format(*first.shape), "-i", "-"]
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # as players expect
    command = [ffmpeg(), "-y", "-loglevel", "error", *raw, *even, "-f", "mp4", str(partial)]
    try:
        with Popen(command, stdin=PIPE, stderr=PIPE, process_group=0) as process:  # Ctrl-C is for this process only
            with suppress(BrokenPipeError):
                for picture in chain([first], shown):
                    process.stdin.write(np.ascontiguousarray(picture))  # type: ignore[union-attr]
            _, said = process.communicate()
        if process.returncode:
            raise RunError(f"{path} cannot be written: {said.decode(errors='replace').strip().splitlines()[-1]}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def ffmpeg() -> str:
    """Return the path of ffmpeg. Raises ``ConfigError`` if it is not installed."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError as error:
        raise ConfigError("eval.record", f"videos need imageio-ffmpeg ({error}): pip install 'rlplug[video]'") from None
    return get_ffmpeg_exe()


def best(run: Run) -> list[Path]:
    """Return the files of the best checkpoint that ``rlplug.load`` needs; empty without a best checkpoint."""
    folder = run.run_dir / "checkpoints" / "best"
    return [folder.resolve() / name for name in ("manifest.json", "weights.pt")] if folder.exists() else []


class AtOnce(KeyboardInterrupt):
    """A second Ctrl-C, which ends the run before the end of the round."""


def register(trainer: Any) -> None:
    """Register the configured loggers, on rank 0, and callbacks for events."""
    hooks, chosen = trainer.hooks, trainer.config.logger if trainer.ctx.rank == 0 else {}
    every = [(key, one.build(trainer.ctx)) for key, one in chosen.items()]
    for _, logger in every:
        hooks.register(logger)
    for key, logger in (*every, *(("", one) for one in trainer.reports.user.register(hooks))):
        for event in hooks.get_hookcallers(logger) or ():
            for impl in event.get_hookimpls():
                if impl.plugin is logger and not (impl.wrapper or impl.hookwrapper):
                    guarded = _guarded(impl.function, event.name, key, logger, trainer)
                    impl.function = guarded  # type: ignore[misc]


def _guarded(function: Callable[..., Any], event: str, key: str, logger: Any, trainer: Any) -> Callable[..., Any]:
    """Wrap ``function`` to drop its logger with one line when it fails. A callback, without ``key``, ends the run.

    ``KeyboardInterrupt`` or ``RunError`` from a logger ends the run after the round, with a checkpoint, as Ctrl-C does.
    A second Ctrl-C or a full disk ends it immediately.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (KeyboardInterrupt, RunError) as error:
            if isinstance(error, AtOnce) or event == "rlplug_ended":
                raise
            first = error if isinstance(error, RunError) else None
            trainer.agreement.request_stop(trainer.agreement.asked or signal.SIGINT, first)
        except ConfigError:
            raise
        except Exception as error:
            if not key or (isinstance(error, OSError) and error.errno in DISK):
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            said = f"failed in {event} at step {trainer.steps:,}, and is disabled: {what}"
            print(f"rlplug: logger.{key} {said} ({at.filename}:{at.lineno})", file=sys.stderr, flush=True)
            trainer.hooks.unregister(logger)

    return call


class SystemUsage:
    """Load of the machine and of this process, for ``log.system``."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent()  # the next call returns the mean since this one
        self._process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return the load since the last call, and the memory now, in percent of the machine and in MB."""
        found = {"cpu_percent": psutil.cpu_percent(), "ram_percent": psutil.virtual_memory().percent}
        found |= {"process_cpu_percent": self._process.cpu_percent()}
        found |= {"process_ram_mb": self._process.memory_info().rss / 2**20}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["gpu_ram_percent"] = 100 * (1 - free / total)
            with suppress(Exception):  # needs NVIDIA's management library
                found["gpu_percent"] = torch.cuda.utilization()
        return {f"system/{name}": float(value) for name, value in found.items()}


def process_age() -> float:
    """Return the age of this process in seconds; 0 unless this is the first run of a command line."""
    if next(_driven) or "rlplug" not in Path(sys.argv[0]).parts[-2:]:
        return 0.0
    created = psutil.Process().create_time()
    if sys.platform == "linux":  # start times count from boot, which psutil knows to a second only
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (created - psutil.boot_time())
    return time.time() - created
