"""Generated command lines: each gets one clear answer. ``python -m tests.tools.lines`` asks more of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.asking import Answer
from tests.tools.lines import fault_of, generate

ROOT = Path(__file__).parents[2]


def ask(*words: str) -> str:
    """Have lines asked in a process of its own, whose copies have nothing of pytest's."""
    command = [sys.executable, "-m", "tests.tools.lines", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(printed: str) -> int:
    found = re.search(r"^exit code: 2 (\d+)$", printed, re.MULTILINE)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["odd"], 40),
        pytest.param(["12"], 5, marks=pytest.mark.slow),
        pytest.param(["500", "0"], 350, marks=pytest.mark.slow),
    ],
)
def test_every_line_has_one_clear_answer(words: list[str], least: int):
    """Generated lines are other ones each time, unless they have a seed, which is printed."""
    assert refused(ask(*words)) > least


def test_a_fault_is_seen():
    """Whatever a campaign finds, it finds it by these."""

    def fault(code: int | None, printed: str, **options) -> str | None:
        return Answer("x", code, printed, 0.0).fault(**options)

    assert fault(2, "rlplug: it is damaged\n") is fault(0, "") is None
    assert fault(1, "rlplug: environment 0 raised in step():\nTraceback (most recent call last):\n") is None
    for code, printed, said in (
        (None, "", "no answer in 60 s"),
        (-11, "", "exit code -11"),
        (1, "Traceback (most recent call last):\n", "a traceback"),
        (2, "damaged\n", "1 lines, 0 of them its own"),
        (1, "", "0 lines, 0 of them its own"),
        (2, "rlplug: x\x1b\n", "control characters"),
        (2, "rlplug: x\nrlplug: FORGED\n", "a forged line"),
        (2, "rlplug: x\n" * 50, "50 lines, 50 of them its own"),
        (2, "rlplug: " + "x" * 5000, "a line without an end"),
    ):
        assert (fault(code, printed) or "").startswith(said), (code, printed)
    assert fault(1, "rlplug: x\n", codes=(0, 2)) == "exit code 1"
    assert fault_of(["x"], Answer("x", 2, "rlplug: x\n" * 4, 0.0)) == "4 lines, 4 of them its own"
    assert len({tuple(line) for line in generate(500, 0)}) > 400
