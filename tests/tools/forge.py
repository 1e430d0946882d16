"""Forge recordings at random and read each in a process of its own: ``python -m tests.tools.forge --cases 400``.

Each case takes an honest recording of one of the formats, damages or forges it, and reads it in two ways: as
``rlplug data`` does, and as a run does, every episode of it. That may end in two ways: with whole episodes, or with one
line that names the file. Anything else is counted: a traceback, a process that ends by a signal, one that takes more
than a minute or more memory than it may, or code in the file that was executed.

A seed determines the cases; without ``--seed`` a new one is drawn and printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rlplug.cli import main as rlplug
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.types import ConfigError, RunError
from tests.tools import forgeries, forgeries_binary  # noqa: F401  they fill FORGERIES
from tests.tools.recordings import FORGERIES, SPEC

LIMIT = 60.0  # seconds that a case may take
MEMORY = 6 * 2**30  # bytes that its process may add
LINES = 3  # of an error message


class ViolationError(AssertionError):
    """A forged recording was not handled as it must be."""


@dataclass
class Forger:
    """Runs cases in a folder.

    Args:
        work: an empty folder.
        seed: it determines a case, together with the case's number.
        limit: seconds that a case may take.
    """

    work: Path
    seed: int = 0
    limit: float = LIMIT
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of forgery, how it ended) -> number of cases"""

    def case(self, number: int) -> str:
        """Run one case, and return how it ended: ``read``, ``refused``, or the kind of its violation."""
        rng, folder = Random(f"{self.seed} {number}"), self.work / f"case{number}"
        kinds = Random(self.seed).sample(sorted(FORGERIES), len(FORGERIES))
        name = kinds[number % len(kinds)]
        folder.mkdir(parents=True)
        marker = folder / "executed"
        with warnings.catch_warnings():  # of the libraries that forge
            warnings.simplefilter("ignore")
            path = FORGERIES[name](folder, rng, marker)
        ended, said = self._read(path)
        if marker.exists():
            ended, said = "executed", "code in the file was executed"
        self.outcomes[name, ended] += 1
        if ended in ("read", "refused"):
            shutil.rmtree(folder)
        else:
            print(f"violation: case {number}, {name}: {ended}: {said}\n  in {path}", file=sys.stderr)
        return ended

    def _read(self, path: Path) -> tuple[str, str]:
        """Read a recording in a process of its own."""
        context = multiprocessing.get_context("fork")  # what reads is imported
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(path, there))
        process.start()
        there.close()
        try:
            if not here.poll(self.limit):
                return "hang", f"more than {self.limit:g} seconds"
            return here.recv()
        except EOFError:
            process.join()
            code = process.exitcode or 0
            return "crash", signal.Signals(-code).name if code < 0 else f"exit code {code}"
        finally:
            here.close()
            process.kill()
            process.join()

    def table(self) -> str:
        """Return a table of outcomes by kind of forgery."""
        ways = ("read", "refused", "traceback", "hang", "crash", "executed")
        lines = [f"{'forgery':44}" + "".join(f"{way:>11}" for way in ways)]
        for name in sorted(FORGERIES):
            counts = [self.outcomes[name, way] for way in ways]
            if any(counts):
                lines.append(f"{name:44}" + "".join(f"{count or '':>11}" for count in counts))
        return "\n".join(lines)

    def count(self, way: str) -> int:
        return sum(count for (_, ended), count in self.outcomes.items() if ended == way)


def _child(path: Path, answer: Any) -> None:
    """Read a recording in every way, and send how that ended."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        ended = [_read(path, lambda: _described(path))]
        for damaged, unfinished in (("refuse", "refuse"), ("skip", "truncate")):
            for spec in (SPEC, None):
                reading = Reading(spec, damaged=damaged, unfinished=unfinished)  # type: ignore[arg-type]
                ended.append(_read(path, lambda reading=reading: _learned(path, reading)))
        answer.send(("refused" if "refused" in ended else "read", ""))
    except BaseException:
        answer.send(("traceback", traceback.format_exc()))
    answer.close()


def _read(path: Path, way: Callable[[], None]) -> str:
    try:
        way()
    except (ConfigError, RunError) as error:
        _check_message(str(error), path)
        return "refused"
    return "read"


def _check_message(message: str, path: Path) -> None:
    if not message.strip() or len(message.splitlines()) > LINES:
        raise ViolationError(f"the message is too long, or empty: {message}")
    if not all(letter.isprintable() or letter == "\n" for letter in message):
        raise ViolationError(f"the message has letters that a terminal obeys: {message!r}")
    if path.name.split(".")[0] not in message:
        raise ViolationError(f"the message does not name the file: {message}")


def _described(path: Path) -> None:
    """Run ``rlplug data``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = rlplug(["data", str(path)])
    if "Traceback" in err.getvalue() or code not in (0, 1, 2):
        raise ViolationError(f"exit code {code}: {err.getvalue()}")
    if "nan" in out.getvalue().split() or "inf" in out.getvalue().split():
        raise ViolationError(f"it shows numbers that are not finite: {out.getvalue()}")
    if code == 2:
        _check_message(err.getvalue(), path)


def _learned(path: Path, reading: Reading) -> None:
    """Read every episode, and check that they are rows of the stream."""
    recording = Recording([str(path)], reading)
    for number, steps in enumerate(recording.lengths.tolist()):
        rows = recording.episode(number, None, 1)
        assert rows["valid"].tolist() == [True] * steps + [False]
        for key in ("obs", "action"):
            leaves = rows[key].values() if isinstance(rows[key], dict) else [rows[key]]
            assert all(len(leaf) == steps + 1 for leaf in leaves), key
        assert np.isfinite(rows["reward"]).all()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.forge", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, help="one case, by its number; needs --seed")
    options = parser.parse_args(argv)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    work = Path(tempfile.mkdtemp(prefix="rlplug-forge-"))
    forger, began = Forger(work, seed), time.monotonic()
    numbers = range(options.cases) if options.only is None else [options.only]
    for number in numbers:
        if forger.case(number) not in ("read", "refused"):
            print(f"again: python -m tests.tools.forge --seed {seed} --only {number}", file=sys.stderr)
    print(forger.table())
    bad = {way: forger.count(way) for way in ("traceback", "hang", "crash", "executed")}
    took = time.monotonic() - began
    print(
        f"seed {seed}: {len(numbers)} recordings in {took:.0f} s, {', '.join(f'{n} {way}' for way, n in bad.items())}"
    )
    if not any(bad.values()):
        shutil.rmtree(work)
    return int(any(bad.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
