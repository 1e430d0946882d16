"""``metrics.csv``: a row per log interval and per evaluation, readable at any moment."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlplug import hookimpl
from rlplug.api import Context, Run
from rlplug.settings import settings

STEP = "step"


class CSV:
    """Columns: ``step`` (environment steps), then the metrics in order of appearance; blank where a row has none.

    A row is written in one piece. New columns rewrite the file beside its final name and rename it. A continued
    run drops the rows behind the step that it continues from.
    """

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self._columns = [STEP]
        self._path = Path()

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self._path = run.folder / "metrics.csv"
        rows: list[dict[str, str]] = []
        if self._path.exists():
            self._columns, rows = _read(self._path)
        self._rewrite(row for row in rows if int(row[STEP]) <= run.progress.env_steps)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        row = {**metrics, STEP: step}
        new = [name for name in row if name not in self._columns]
        if new:
            rows = _read(self._path)[1]
            self._columns += new
            self._rewrite([*rows, row])
        else:
            with self._path.open("ab", buffering=0) as file:
                file.write(_lines(self._columns, [row]))

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        beside = self._path.with_name(self._path.name + ".partial")
        with beside.open("wb") as file:
            file.write(_lines(self._columns, [header, *rows]))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)


def _lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows; a last line without its end is left out: the process died while it wrote it."""
    text = path.read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = list(reader)
    return list(reader.fieldnames or [STEP]), rows
