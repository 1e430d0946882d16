"""Write docs/terminal.md: what a terminal of 80 and of 130 columns shows of a real run.

    python -m tests.tools.screens

The run is a process of its own on a pseudo-terminal, whose screen is read at its start, in the middle, during an
evaluation and at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.loggers.test_progress_logger import Terminal

PAGE = Path(__file__).parents[2] / "docs" / "terminal.md"
HEAD = """# A run on a terminal

What a terminal shows of `python -m rlplug algo=ppo env=pendulum total_steps=40_000 eval.every=20_000` and
`python -m rlplug watch <run folder>`, at 80 and at 130 columns. `python -m tests.tools.screens` writes this page from a
real run.

The first line shows percent, steps, speed and the remaining time. The second one shows the mean return of the last
training episodes, its history as a sparkline, and the last evaluation. Below are the time by phase and the memory of
the process, the last and the next checkpoint, and the Ray actors with their states, if there are any. Evaluations show
their own progress. They count toward neither the speed nor the remaining time.

The view is redrawn in place, below an empty line on which the cursor waits, so that lines of other programs are not
broken. In a file or a pipe, and with `logger.progress.live=false`, there are plain lines; in a notebook, one line.
"""
RUN = ["algo=ppo", "env=pendulum", "total_steps=40_000", "eval.every=20_000", "eval.episodes=40", "hardware=cpu"]
WAIT_S = 300
HOME = "/home/me/project"  # as long as the name of a temporary folder


def screens(columns: int) -> dict[str, str]:
    """Return the screens of one run, by what they show."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, Terminal(columns, 24) as terminal:
        own = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm"}
        words = [*RUN, "logger.progress.refresh=10", "hydra.run.dir=runs/ppo-pendulum/2030-01-02_03-04-05_000000-s0"]
        command = [sys.executable, "-m", "rlplug", *words]
        run = subprocess.Popen(command, stdout=terminal.theirs, stderr=terminal.theirs, env=own, cwd=folder)
        end = time.monotonic() + WAIT_S
        while run.poll() is None and time.monotonic() < end:
            text = "\n".join(terminal.lines())
            for name, shows in {
                "At the start": "no episode has ended yet" in text,
                "In the middle": "eval -" in text and "▅" in text and "evaluating" not in text,
                "During an evaluation": "evaluating" in text and "evaluating 0/" not in text,
            }.items():
                if shows and name not in found:
                    found[name] = text.replace(folder, HOME)
            time.sleep(0.05)
        time.sleep(0.2)
        found["At the end"] = "\n".join(terminal.lines()).replace(folder, HOME)
    return found


def main() -> None:
    parts = [HEAD]
    for columns in (80, 130):
        for name, text in screens(columns).items():
            parts.append(f"## {name}, {columns} columns\n\n```text\n{text}\n```\n")
    PAGE.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
