"""What several benchmarks do: train in a process of its own, put a table on a page, draw curves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlplug.results.curves import Curve
from rlplug.results.plot import draw as figure
from rlplug.results.plot import save

WIDTH = 6.4  # inches of a picture on a page


def rlplug(*words: str) -> None:
    """Run one command line.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run([sys.executable, "-m", "rlplug", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"python -m rlplug {' '.join(words)} failed:\n{done.stderr}")


def trained(folder: Path, words: Sequence[str]) -> Path:
    """Train into ``folder``, unless a run has finished there; return it."""
    if not (folder / "summary.json").exists():
        rlplug(*words, f"hydra.run.dir={folder}")
    return folder


def write_table(page: Path, name: str, table: Sequence[str]) -> None:
    """Replace the lines between ``<!-- name -->`` and ``<!-- end -->`` of a page."""
    old, text = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL), page.read_text(encoding="utf-8")
    new = "\n".join(["", *table, "", ""])
    page.write_text(old.sub(lambda found: found[1] + new + found[2], text, count=1), encoding="utf-8")


def draw(path: Path, curves: Sequence[Curve], x: str, y: str, title: str) -> None:
    """Draw curves as a picture on a page, with these labels of the axes."""
    save(figure(curves, x, y, title, WIDTH), [path])
