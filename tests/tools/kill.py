"""Proves exact resume: kills a run at random moments, resumes it each time, and compares it with an undisturbed one.

    python -m tests.tools.kill algo=sac env=pendulum total_steps=5_000 checkpoint.every=350
    python -m tests.tools.kill --continuous 200 algo=sac env=pendulum total_steps=3_000 checkpoint.every=1

Every word after the options is one of a training run's command line, so any installed plugin can be tried. Both runs
are processes of their own, and SIGKILL is what ends them. Compared, bit for bit, are weights, optimizers, counters,
generators, environments, the buffer's rows, the metrics file and the evaluation. ``hardware=cpu`` and ``logger=[]``
hold where nothing else is said; on other hardware only what its kernels promise can be equal. Choose a
``checkpoint.every`` that is no multiple of ``log.every``, so that there is something under way at a checkpoint.

Exit code: 0 equal, 1 not equal, or a resume failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FOLDER
from rlplug.checkpointing.reading import Checkpoint, checkpoints
from rlplug.config import compose
from rlplug.testing.comparing import compare_runs
from rlplug.types import CheckpointError, ConfigError, RunError

USUAL = {"hardware": "cpu", "logger": "[]"}
MOMENTS = (0.05, 1.5)  # seconds after its start at which a process of `continuous` is killed
TRIES = 100  # to meet a checkpoint that is being written
LATEST = 0.95  # of the run: later than that it may have ended


_FORKS = multiprocessing.get_context("forkserver")


def warm_up(overrides: Sequence[str]) -> None:
    """Let warm processes have imported what this run needs; before the first of them is started."""
    config = compose(overrides)
    chosen = [config.algo, config.env, config.buffer, config.loop, config.hardware]
    chosen += [*config.models.values(), *config.exploration.values(), *config.logger.values()]
    components = {component.cls.__module__ for component in chosen}
    _FORKS.set_forkserver_preload(
        ["rlplug.cli.train", "rlplug.cli.resume", compare_runs.__module__, *sorted(components)]
    )


def _main(words: Sequence[str], log: Path) -> None:
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["rlplug", *words]
    runpy.run_module("rlplug", run_name="__main__", alter_sys=True)


@dataclass
class Kill:
    """One SIGKILL, and what it left.

    Args:
        after: seconds since the process was started.
        newest: name of the newest checkpoint that was there, whole; "" for none.
        left: what it interrupted: "writing" or "deleting" of a checkpoint, or "".
    """

    after: float
    newest: str
    left: str


@dataclass
class Report:
    """What ``disturbed`` and ``continuous`` did and found."""

    kills: list[Kill] = field(default_factory=list)
    compared: list[dict[str, tuple[int, list[str]]]] = field(default_factory=list)
    """a comparison, as ``comparing.compare_runs`` makes it, for each run that ended"""

    def left(self, what: str) -> int:
        return sum(kill.left == what for kill in self.kills)

    @property
    def differences(self) -> list[str]:
        return [f"{part}: {name}" for each in self.compared for part, (_, names) in each.items() for name in names]

    def __str__(self) -> str:
        lines = [
            f"{len(self.kills)} kills: {self.left('writing')} while a checkpoint was being written,"
            f" {self.left('deleting')} while one was being deleted",
            f"{'':<14}{'values':>10}{'different':>11}",
        ]
        for part in self.compared[0] if self.compared else ():
            counts, names = zip(*(each[part] for each in self.compared), strict=True)
            lines.append(f"{part:<14}{sum(counts):>10,}{sum(map(len, names)):>11,}")
        return "\n".join(lines)


class Process:
    """``python -m rlplug ...`` in a process of its own; what it says goes to ``<folder>.log``.

    Args:
        overrides: those of a new run in ``folder``; None: the run there is resumed.
        warm: forked from a process that has imported everything, instead of a new interpreter, which takes seconds.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] | None, warm: bool) -> None:
        self.folder, self.log = folder, folder.with_name(folder.name + ".log")
        words = ["resume", str(folder)] if overrides is None else [*overrides, f"hydra.run.dir={folder}"]
        self.started = time.monotonic()
        if warm:
            self._process = _FORKS.Process(target=_main, args=(words, self.log), daemon=True)
            self._process.start()
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen([sys.executable, "-m", "rlplug", *words], stdout=log, stderr=log)
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def code(self) -> int | None:
        """Exit code; None while it lives."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def ended(self) -> bool:
        """Has the run come to its end?

        Raises:
            RunError: it failed.
        """
        if self.code:
            raise RunError(f"{self.folder} ended with exit code {self.code}:\n{self.log.read_text()[-3000:]}")
        return self.code == 0

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Until something holds; False where the run came to its end before.

        Raises:
            RunError: it failed.
        """
        while not until():
            if self.ended():
                return False
            time.sleep(0.0005)
        return True

    def kill(self) -> Kill:
        """SIGKILL.

        Raises:
            RunError: what is left breaks a promise: a checkpoint that was there is gone, or one is not whole.
        """
        before = _newest(self.folder)
        self._process.kill()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()
        after = time.monotonic() - self.started
        newest = _newest(self.folder)
        if newest < before:
            raise RunError(f"{self.folder}: {before} was there before the kill and {newest or 'nothing'} after it")
        try:
            for path in checkpoints(self.folder):
                Checkpoint(path).verify()
        except CheckpointError as error:
            raise RunError(f"a kill left half a checkpoint under a final name: {error}") from None
        left = [name > newest for name in _partial(self.folder)]
        return Kill(after, newest, "writing" if any(left) else "deleting" if left else "")


def undisturbed(overrides: Sequence[str], folder: Path, warm: bool = False) -> float:
    """Make the run that others are compared with.

    Returns:
        Seconds of it, without the start of the process.

    Raises:
        RunError: it failed.
    """
    process = Process(folder, overrides, warm)
    process.wait((folder / "manifest.json").exists)
    began = time.monotonic()
    process.wait()
    return time.monotonic() - began


def disturbed(
    overrides: Sequence[str],
    like: Path,
    folder: Path,
    seconds: float,
    kills: int = 5,
    while_writing: int = 2,
    seed: int = 0,
    warm: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Make a run in ``folder``, killed and resumed again and again, and compare it with the one in ``like``.

    Args:
        seconds: that an undisturbed run takes; the kills are spread over them at random.
        while_writing: so many of ``kills`` strike while a checkpoint is being written. A kill that misses the
            writing is a kill too, and another one is tried.
        tell: is given a line for each kill.

    Raises:
        RunError: a resume failed, or the run is too short to be killed so often.
    """
    draw = random.Random(seed)
    for _ in range(5):
        report = _disturb(overrides, folder, seconds, _plan(draw, kills, while_writing), warm, tell)
        if report is not None:
            report.compared.append(compare_runs(like, folder))
            return report
        tell("the run ended before its last kill; once again, with earlier kills")
        seconds *= 0.7
        shutil.rmtree(folder)
    raise RunError(f"{folder} ended before it could be killed {kills} times: raise total_steps")


def _plan(draw: random.Random, kills: int, while_writing: int) -> list[tuple[float, bool]]:
    """Shares of the run, in order, and which of them are to meet a checkpoint that is being written."""
    moments = sorted(draw.uniform(0.0, LATEST) for _ in range(kills))
    writing = draw.sample(range(kills), while_writing)
    return [(moment, i in writing) for i, moment in enumerate(moments)]


def _disturb(
    overrides: Sequence[str],
    folder: Path,
    seconds: float,
    plan: Sequence[tuple[float, bool]],
    warm: bool,
    tell: Callable[[str], None],
) -> Report | None:
    """None: the run ended too early."""
    report = Report()
    process = Process(folder, overrides, warm)
    seen = _manifest(folder)
    for moment, writing in plan:
        for _ in range(TRIES):
            if not process.wait(lambda: _manifest(folder) != seen):  # noqa: B023
                return None
            made = _share(folder)
            end = time.monotonic() + max(moment - made, 0.0) * seconds
            if not process.wait(lambda: time.monotonic() >= end):  # noqa: B023
                return None
            if writing and not process.wait(lambda: any(name > _newest(folder) for name in _partial(folder))):
                return None
            seen = _manifest(folder)
            kill = process.kill()
            report.kills.append(kill)
            what = f", {kill.left} a checkpoint" if kill.left else ""
            tell(f"kill {len(report.kills)} after {kill.after:.2f} s{what}; newest: {kill.newest or 'none yet'}")
            process = Process(folder, None, warm)
            if not writing or kill.left == "writing":
                break
        else:
            raise RunError(f"{folder}: {TRIES} kills, and none met a checkpoint that was being written")
    process.wait()
    return report


def continuous(
    overrides: Sequence[str],
    like: Path,
    folder: Path,
    kills: int = 200,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Kill processes 0.05 to 1.5 seconds after their start, while starting, resuming, training or writing.

    A run that comes to its end is compared with the one in
    ``like``, and the next one begins.

    Raises:
        RunError: a resume failed, or a kill left something that is not whole.
    """
    draw, report = random.Random(seed), Report()
    process: Process | None = None
    while len(report.kills) < kills or process is not None:
        if process is None:
            process = Process(folder, overrides, warm=True)
            process.wait((folder / "manifest.json").exists)
        end = process.started + draw.uniform(*MOMENTS)
        killing = len(report.kills) < kills
        if killing and process.wait(lambda: time.monotonic() >= end):  # noqa: B023
            report.kills.append(process.kill())
            if len(report.kills) % 20 == 0:
                tell(f"kill {len(report.kills)}; newest: {report.kills[-1].newest or 'none yet'}")
            process = Process(folder, None, warm=True)
        else:
            process.wait()
            report.compared.append(compare_runs(like, folder))
            tell(f"a run ended after {len(report.kills)} kills: {len(report.differences)} differences")
            if report.differences:
                break
            process = None
            if len(report.kills) < kills:
                shutil.rmtree(folder)
    return report


def _newest(run: Path) -> str:
    return next((path.name for path in checkpoints(run)), "")


def _partial(run: Path) -> list[str]:
    """Names of the checkpoints that are being written or deleted."""
    try:
        with os.scandir(run / FOLDER) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    return [name.removesuffix(PARTIAL) for name in names if name.startswith("step_") and name.endswith(PARTIAL)]


def _manifest(run: Path) -> tuple[int, int] | None:
    """Changes when a run begins and when it is resumed."""
    try:
        status = (run / "manifest.json").stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _share(run: Path) -> float:
    """How much of the run was made when the living process began."""
    resumed = json.loads((run / "manifest.json").read_text())["resumed"]
    config = (run / "config.yaml").read_text()
    total = next(line for line in config.splitlines() if line.startswith("total_steps:"))
    return resumed[-1]["env_steps"] / int(total.split()[1]) if resumed else 0.0


def with_usual(overrides: Sequence[str]) -> list[str]:
    """A command line with ``hardware=cpu`` and ``logger=[]``, unless it says otherwise."""
    said = {override.partition("=")[0] for override in overrides}
    return [*(f"{key}={value}" for key, value in USUAL.items() if key not in said), *overrides]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.kill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="at random moments, over the whole run (default: 5)")
    parser.add_argument(
        "--while-writing", type=int, default=2, help="of them, while a checkpoint is being written (default: 2)"
    )
    parser.add_argument(
        "--continuous", type=int, metavar="KILLS", help="instead: so many, each 0.05 to 1.5 s after a process started"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--folder", type=Path, help="for the two run folders (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the folders; they are kept, too, when runs differ")
    parser.add_argument("--warm", action="store_true", help="fork a warm process instead of starting interpreters")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="the run's settings, as for training")
    given = parser.parse_intermixed_args(arguments)
    if not 0 <= given.while_writing <= given.kills:
        parser.error("--while-writing is some of --kills")

    def tell(line: str) -> None:
        print(f"kill: {line}", file=sys.stderr, flush=True)

    base = Path(tempfile.mkdtemp(prefix="rlplug-kill-")) if given.folder is None else given.folder
    try:
        report = _prove(given, base, tell)
    except ConfigError as error:
        tell(str(error))
        return 2
    except RunError as error:
        tell(f"{error}\nthe folders are kept: {base}")
        return 1
    print(report)
    for name in report.differences[:20]:
        print(f"differs: {name}")
    if given.keep or report.differences:
        print(f"the folders are kept: {base}")
    else:
        for name in ("undisturbed", "disturbed"):
            shutil.rmtree(base / name)
            (base / f"{name}.log").unlink()
        if given.folder is None:
            base.rmdir()
    return 1 if report.differences else 0


def _prove(given: argparse.Namespace, base: Path, tell: Callable[[str], None]) -> Report:
    overrides = with_usual(given.overrides)
    warm_up(overrides)
    base.mkdir(parents=True, exist_ok=True)
    a, b = base.absolute() / "undisturbed", base.absolute() / "disturbed"
    warm = given.warm or given.continuous is not None
    for folder in (a, b):
        if folder.exists():
            raise ConfigError("--folder", f"{folder} is there already; choose another folder")
    seconds = undisturbed(overrides, a, warm)
    tell(f"the undisturbed run took {seconds:.1f} s")
    if given.continuous is not None:
        return continuous(overrides, a, b, given.continuous, given.seed, tell)
    return disturbed(overrides, a, b, seconds, given.kills, given.while_writing, given.seed, warm, tell)


if __name__ == "__main__":
    sys.exit(main())
