"""Check exact resume: kill a run at random moments, resume it each time, and compare it with an undisturbed run.

    python -m tests.tools.kill algo=sac env=pendulum total_steps=5_000 checkpoint.every=350
    python -m tests.tools.kill --continuous 200 algo=sac env=pendulum total_steps=3_000 checkpoint.every=1

The words after the options are the command line of a training run, so any installed plugin can be tried. Every run is a
process of its own, which SIGKILL ends. Compared, bit for bit, are weights, optimizers, counters, generators,
environments, the buffer's rows, the metrics file and the evaluation. ``hardware=cpu`` and ``logger.only=[]`` are the
defaults; on other hardware runs are only as equal as its kernels are deterministic. Choose a ``checkpoint.every`` that
is not a multiple of ``log.every``, so that every checkpoint holds metrics that were not logged yet.

Exit code: 0 equal; 1 not equal, or a resume failed; 2 bad input.
"""

import argparse
import json
import multiprocessing
import os
import random
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlplug.checkpointing.atomic import PARTIAL
from rlplug.checkpointing.format import FOLDER, Checkpoint, checkpoints
from rlplug.config import compose
from rlplug.registry import load
from rlplug.testing.comparing import compare_runs
from rlplug.types import CheckpointError, ConfigError, RunError

DEFAULTS = {"hardware": "cpu", "logger.only": "[]"}
LIFETIME = (0.05, 1.5)  # seconds that a process of `continuous` lives
TRIES = 100  # to hit a checkpoint that is being written
RANKS_END_S = 60  # also those that are still importing torch
LATEST = 0.95  # of the run: a later kill may come after its end
Tell = Callable[[str], None]

_server = multiprocessing.get_context("forkserver")  # forks processes that need not import torch first


def warm_up(overrides: Sequence[str]) -> None:
    """Let the processes of this run start quickly. Call it before the first one."""
    config = compose(overrides)
    chosen = [config.algo, config.env, config.buffer, config.loop, config.hardware]
    chosen += [*config.models.values(), *config.exploration.values(), *config.logger.values()]
    modules = {component.cls.__module__ for component in chosen}
    _server.set_forkserver_preload(["rlplug.cli.train", "rlplug.cli.resume", compare_runs.__module__, *sorted(modules)])


def _main(words: Sequence[str], log: Path) -> None:
    """Be ``python -m rlplug <words>``."""
    multiprocessing.current_process().daemon = False  # so that it may start ranks
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["rlplug", *words]
    runpy.run_module("rlplug", run_name="__main__", alter_sys=True)


@dataclass
class Kill:
    """One SIGKILL."""

    newest: str
    """name of the newest checkpoint after the kill, if any"""
    left: str
    """what the kill interrupted, if anything: "writing" or "deleting" of a checkpoint"""


@dataclass
class Report:
    """What ``disturbed`` and ``continuous`` did and found."""

    kills: list[Kill] = field(default_factory=list)
    compared: list[dict[str, tuple[int, list[str]]]] = field(default_factory=list)
    """the result of ``compare_runs`` for each run that ended"""

    def left(self, what: str) -> int:
        """Count the kills that interrupted ``what``."""
        return sum(kill.left == what for kill in self.kills)

    @property
    def differences(self) -> list[str]:
        """Names of the values that differ, over all runs."""
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
    """A run in a process of its own, whose output goes to a file.

    Args:
        overrides: of a new run in ``folder``; None: resume the run there.
        changed: overrides of the resumed run.
        log: file for its output; None: ``<folder>.log``.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str] | None = None,
        changed: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.folder, self.log = folder, log or folder.with_name(folder.name + ".log")
        words = ["resume", str(folder), *changed] if overrides is None else [*overrides, f"hydra.run.dir={folder}"]
        self.started = time.monotonic()
        self._process = _server.Process(target=_main, args=(words, self.log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while the process lives."""
        return self._process.exitcode

    def wait(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a condition holds; return False if the run finished before.

        Raises:
            RunError: the run failed.
        """
        while not until():
            if self.code:
                raise RunError(f"{self.folder} ended with exit code {self.code}:\n{self.log.read_text()[-3000:]}")
            if self.code == 0:
                return False
            time.sleep(0.0005)
        return True

    def kill(self) -> Kill:
        """Send SIGKILL and look at what is left, once its ranks have ended by themselves.

        Raises:
            RunError: a checkpoint that was there is gone, or one is incomplete; or a rank goes on.
        """
        before, ranks = _newest(self.folder), list[psutil.Process]()
        with suppress(psutil.NoSuchProcess):  # it may have ended
            ranks = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        self._process.join()
        if psutil.wait_procs(ranks, timeout=RANKS_END_S)[1]:
            raise RunError(f"{self.folder}: its ranks live {RANKS_END_S} s after it was killed")
        newest = _newest(self.folder)
        if newest < before:
            raise RunError(f"{self.folder}: {before} was there before the kill, and {newest or 'nothing'} after it")
        try:
            for path in checkpoints(self.folder):
                Checkpoint(path).verify()
        except CheckpointError as error:
            raise RunError(f"a kill left an incomplete checkpoint under a final name: {error}") from None
        left = [name > newest for name in _partial(self.folder)]
        return Kill(newest, "writing" if any(left) else "deleting" if left else "")


def undisturbed(overrides: Sequence[str], folder: Path) -> float:
    """Make the run that others are compared with.

    Returns:
        Seconds that it took, without the start of the process.

    Raises:
        RunError: it failed.
    """
    process = Process(folder, overrides)
    process.wait(lambda: bool(_starts(folder)))
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
    tell: Tell = lambda _: None,
) -> Report:
    """Make a run in ``folder``, kill and resume it again and again, and compare it with the run in ``like``.

    Args:
        seconds: that an undisturbed run takes; the kills are spread over them at random.
        while_writing: how many of ``kills`` hit a checkpoint that is being written; a kill that misses is repeated.

    Raises:
        RunError: a resume failed, or the run is too short for so many kills.
    """
    draw = random.Random(seed)
    for _ in range(5):
        moments = sorted(draw.uniform(0.0, LATEST) for _ in range(kills))
        writing = draw.sample(range(kills), while_writing)
        plan = [(moment, i in writing) for i, moment in enumerate(moments)]
        report = _disturb(overrides, folder, seconds, plan, tell)
        if report is not None:
            report.compared.append(compare_runs(like, folder))
            return report
        tell("the run ended before its last kill; trying again with earlier kills")
        seconds *= 0.7
        shutil.rmtree(folder)
    raise RunError(f"{folder} ended before it could be killed {kills} times: raise total_steps")


def _disturb(
    overrides: Sequence[str], folder: Path, seconds: float, plan: Sequence[tuple[float, bool]], tell: Tell
) -> Report | None:
    """Kill a run as planned.

    Args:
        plan: for each kill its share of the run, and whether it has to hit a checkpoint that is being written.

    Returns:
        None if the run ended too early.
    """
    report, process, starts = Report(), Process(folder, overrides), 0
    total_steps = compose(overrides).total_steps
    for moment, writing in plan:
        for _ in range(TRIES):
            if not process.wait(lambda: len(_starts(folder)) > starts):  # noqa: B023
                return None
            starts = len(_starts(folder))
            end = time.monotonic() + max(moment - _starts(folder)[-1] / total_steps, 0.0) * seconds
            if not process.wait(lambda: time.monotonic() >= end):  # noqa: B023
                return None
            if writing and not process.wait(lambda: any(name > _newest(folder) for name in _partial(folder))):
                return None
            kill = process.kill()
            report.kills.append(kill)
            what = f", {kill.left} a checkpoint" if kill.left else ""
            tell(f"kill {len(report.kills)}{what}; newest: {kill.newest or 'none yet'}")
            process = Process(folder)
            if not writing or kill.left == "writing":
                break
        else:
            raise RunError(f"{folder}: {TRIES} kills, and none hit a checkpoint that was being written")
    process.wait()
    return report


def continuous(
    overrides: Sequence[str], like: Path, folder: Path, kills: int = 200, seed: int = 0, tell: Tell = lambda _: None
) -> Report:
    """Kill processes 0.05 to 1.5 seconds after their start: while they start, resume, train or write.

    A run that finishes is compared with the run in ``like``, and the next run begins.

    Raises:
        RunError: a resume failed, or a kill left an incomplete checkpoint.
    """
    draw, report = random.Random(seed), Report()
    while len(report.kills) < kills and not report.differences:
        shutil.rmtree(folder, ignore_errors=True)
        process = Process(folder, overrides)
        process.wait(lambda: bool(_starts(folder)))
        while len(report.kills) < kills:
            end = process.started + draw.uniform(*LIFETIME)
            if not process.wait(lambda: time.monotonic() >= end):  # noqa: B023
                break
            report.kills.append(process.kill())
            if len(report.kills) % 20 == 0:
                tell(f"kill {len(report.kills)}; newest: {report.kills[-1].newest or 'none yet'}")
            process = Process(folder)
        process.wait()
        report.compared.append(compare_runs(like, folder))
        tell(f"a run ended after {len(report.kills)} kills: {len(report.differences)} differences")
    return report


def _newest(run: Path) -> str:
    return next((path.name for path in checkpoints(run)), "")


def _partial(run: Path) -> list[str]:
    """Return the names of the checkpoints that are being written or deleted."""
    return [path.name.removesuffix(PARTIAL) for path in (run / FOLDER).glob(f"step_*{PARTIAL}")]


def _starts(run: Path) -> list[int]:
    """Return the step, as the run counts them, that each process of the run began with."""
    try:
        manifest = json.loads((run / "manifest.json").read_text())
    except FileNotFoundError:
        return []
    unit = load("loop", manifest["plugins"]["loop"]["name"]).unit
    return [0, *(resumed[unit] for resumed in manifest["resumed"])]


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """Return a command line with ``hardware=cpu`` and ``logger.only=[]``, unless it sets them itself."""
    given = {override.partition("=")[0] for override in overrides}
    return [*(f"{key}={value}" for key, value in DEFAULTS.items() if key not in given), *overrides]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.tools.kill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="at random moments of the run (default: 5)")
    parser.add_argument("--while-writing", type=int, default=2, help="of them, while a checkpoint is written (2)")
    parser.add_argument("--continuous", type=int, metavar="KILLS", help="instead: 0.05 to 1.5 s after a process starts")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--folder", type=Path, help="where to keep the runs; by default only runs that differ are kept")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="the run's settings, as for training")
    given = parser.parse_intermixed_args(arguments)
    if not 0 <= given.while_writing <= given.kills:
        parser.error("--while-writing is some of --kills")

    def tell(line: str) -> None:
        print(f"kill: {line}", file=sys.stderr, flush=True)

    base = given.folder or Path(tempfile.gettempdir(), f"rlplug-kill-{os.getpid()}")
    try:
        report = _check(given, base, tell)
    except ConfigError as error:
        tell(str(error))
        return 2
    except RunError as error:
        tell(f"{error}\nthe folders are kept: {base}")
        return 1
    print(report, *(f"differs: {name}" for name in report.differences[:20]), sep="\n")
    if given.folder or report.differences:
        print(f"the folders are kept: {base}")
    else:
        shutil.rmtree(base)
    return 1 if report.differences else 0


def _check(given: argparse.Namespace, base: Path, tell: Tell) -> Report:
    overrides = with_defaults(given.overrides)
    warm_up(overrides)
    a, b = base.absolute() / "undisturbed", base.absolute() / "disturbed"
    if a.exists() or b.exists():
        raise ConfigError("--folder", f"{base} holds runs already; choose another folder")
    base.mkdir(parents=True, exist_ok=True)
    seconds = undisturbed(overrides, a)
    tell(f"the undisturbed run took {seconds:.1f} s")
    if given.continuous is not None:
        return continuous(overrides, a, b, given.continuous, given.seed, tell)
    return disturbed(overrides, a, b, seconds, given.kills, given.while_writing, given.seed, tell)


if __name__ == "__main__":
    sys.exit(main())
