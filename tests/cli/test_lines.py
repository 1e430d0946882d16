"""Generated command lines: each gets one clear answer. ``python -m tests.tools.lines`` asks more of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.lines import Answer, generate

ROOT = Path(__file__).parents[2]


def ask(*words: str) -> str:
    """Have lines asked in a process of its own, whose copies have nothing of pytest's."""
    command = [sys.executable, "-m", "tests.tools.lines", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(printed: str) -> int:
    found = re.search(r"2: (\d+)", printed)
    return int(found[1]) if found else 0


def test_a_few_generated_lines():
    """Other ones each time; the seed is printed."""
    assert refused(ask("12")) > 5


@pytest.mark.slow
def test_more_generated_lines():
    assert refused(ask("100")) > 60


def test_odd_lines():
    assert refused(ask("odd")) > 40


@pytest.mark.slow
def test_five_hundred_generated_lines():
    assert len({tuple(line) for line in generate(500, 0)}) > 400
    assert refused(ask("500", "0")) > 350


def test_a_fault_is_seen():
    """Whatever the generator finds, it finds it by these."""
    good = Answer(["x"], 2, "rlplug: x: unknown key\n", 0.1)
    assert good.fault is None
    assert Answer(["x"], 2, "", 0.1).fault == "0 lines, 0 of them its own"
    assert Answer(["x"], 2, good.printed * 4, 0.1).fault == "4 lines, 4 of them its own"
    assert Answer(["x"], 1, good.printed, 0.1).fault == "exit code 1"
    assert Answer(["x"], None, "", 60.0).fault == "no answer in 60 s"
    assert Answer(["x"], 2, "Traceback (most recent call last):\n", 0.1).fault == "a traceback"
