"""``metrics.csv``: a row per log interval and per evaluation, readable at any time."""

from __future__ import annotations

import csv
import errno
import io
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplug import hookimpl
from rlplug.api import Context, Run
from rlplug.settings import settings

STEP = "step"


class CSV:
    """Writes columns ``step`` (in the run's unit), then metrics in order of appearance; missing values are blank.

    A row is written in one call. New columns rewrite the file under a temporary name and rename it. A resumed run drops
    the rows that were written after its checkpoint.
    """

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self._columns = [STEP]
        self._path = Path()

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self._path = run.run_dir / "metrics.csv"
        rows: list[dict[str, str]] = []
        if self._path.is_file():
            columns, rows = _read(self._path)
            rows = rows[: run.logged]
            self._columns = [name for name in columns if name == STEP or any(row[name] for row in rows)]
            rows = [{name: row[name] for name in self._columns} for row in rows]
        if len(rows) < run.logged:
            warnings.warn(f"{self._path} has {len(rows)} of the {run.logged} rows that were logged", stacklevel=2)
        self._rewrite(rows)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        row = {**metrics, STEP: step}
        new = [name for name in row if name not in self._columns]
        if new:
            rows = _read(self._path)[1]
            self._columns += new
            self._rewrite([*rows, row])
        else:
            line = _lines(self._columns, [row])
            with self._path.open("ab", buffering=0) as file:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    @hookimpl
    def rlplug_checkpoint(self, run: Run, path: str) -> None:
        with self._path.open("rb") as file:
            os.fsync(file.fileno())  # the rows that a resumed run continues from

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        beside = self._path.with_name(self._path.name + ".partial")
        beside.unlink(missing_ok=True)
        try:
            with beside.open("xb") as file:
                file.write(_lines(self._columns, [header, *rows]))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _lines(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the readable columns and rows; a killed process may have left half a line at the end."""
    text = path.read_bytes().decode(errors="replace")
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]), restval="")
    rows: list[dict[str, str]] = []
    with suppress(csv.Error):
        rows.extend(reader)
    return list(reader.fieldnames or [STEP]), rows
