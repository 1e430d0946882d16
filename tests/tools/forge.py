"""Forge recordings at random and read each in a copy of this process: ``python -m tests.tools.forge 400 [seed]``.

Each case takes an honest recording of one of the formats, damages or forges it, and reads it in two ways: as
``rlplug data`` does, and as a run does, every episode of it. That may end in two ways: with whole episodes, or with one
line that names the file. Anything else is a fault: a traceback, a process that ends by a signal, one that takes more
than a minute or more memory than it may, or code in the file that was executed.
"""

import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

import numpy as np

from rlplug.cli import main as rlplug
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.types import ConfigError, RunError
from tests.tools import forgeries, forgeries_binary  # noqa: F401  they fill FORGERIES
from tests.tools.asking import ask, main
from tests.tools.recordings import FORGERIES, SPEC

LINES = 3  # of an error message


class Forger:
    """Runs cases in a folder.

    Args:
        work: an empty folder.
        seed: it determines a case, together with the case's number.
    """

    def __init__(self, work: Path, seed: int = 0) -> None:
        self.work, self.seed = work, seed
        self.outcomes: Counter[tuple[str, str]] = Counter()

    def faults(self, number: int) -> list[str]:
        """Run one case and return what is wrong with it."""
        rng, folder = Random(f"{self.seed} {number}"), self.work / f"case{number}"
        kinds = Random(self.seed).sample(sorted(FORGERIES), len(FORGERIES))
        name = kinds[number % len(kinds)]
        folder.mkdir(parents=True)
        marker = folder / "executed"
        with warnings.catch_warnings():  # of the libraries that forge
            warnings.simplefilter("ignore")
            path = FORGERIES[name](folder, rng, marker)
        answer = ask(name, lambda: _read_in_every_way(path), self.work)
        fault = "something was executed" if marker.exists() else answer.fault((0,))
        self.outcomes[name, "fault" if fault else answer.printed.strip()] += 1
        if fault:
            return [f"case {number}, {name}: {fault}: {answer.printed}\n  in {path}"]
        shutil.rmtree(folder)
        return []


def _read_in_every_way(path: Path) -> None:
    """Read a recording, and print whether any way refused it."""
    ended = [_read(path, lambda: _described(path))]
    for damaged, unfinished in (("refuse", "refuse"), ("skip", "truncate")):
        for spec in (SPEC, None):
            reading = Reading(spec, damaged=damaged, unfinished=unfinished)  # type: ignore[arg-type]
            ended.append(_read(path, lambda reading=reading: _learned(path, reading)))
    print("refused" if "refused" in ended else "read")


def _read(path: Path, way: Callable[[], None]) -> str:
    try:
        way()
    except (ConfigError, RunError) as error:
        _check_message(str(error), path)
        return "refused"
    return "read"


def _check_message(message: str, path: Path) -> None:
    assert message.strip(), "the message is empty"
    assert len(message.splitlines()) <= LINES, f"the message is too long: {message}"
    assert all(letter.isprintable() or letter == "\n" for letter in message), f"a terminal obeys {message!r}"
    assert path.name.split(".")[0] in message, f"the message does not name the file: {message}"


def _described(path: Path) -> None:
    """Run ``rlplug data``."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = rlplug(["data", str(path)])
    assert "Traceback" not in err.getvalue()
    assert code in (0, 1, 2), f"exit code {code}: {err.getvalue()}"
    assert not {"nan", "inf"} & {*out.getvalue().split()}, f"numbers that are not finite: {out.getvalue()}"
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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(Forger, sys.argv[1:]))
