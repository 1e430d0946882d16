"""What trackers of experiments share: rows that they lack, and the identity, video and best weights of a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

from rlplug.api import Run


class Rows:
    """Chooses the metrics that a tracker lacks, so that it has each of them once per step.

    A resumed run logs the steps after its checkpoint again, and most trackers cannot delete rows. A killed process may
    not have sent its last rows, and a tracker may be new to a resumed run; ``metrics.csv`` has these rows.

    Args:
        last: highest step of each metric that the tracker has.
    """

    def __init__(self, last: Mapping[str, int] | None = None) -> None:
        self._last = dict(last or {})

    def new(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the metrics that the tracker lacks at a step; they count as sent from now on."""
        found = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        self._last |= dict.fromkeys(found, step)
        return found

    def missing(self, run: Run) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield step and metrics of each row before the checkpoint of a resumed run that the tracker lacks."""
        if not run.logged:
            return
        with (run.run_dir / "metrics.csv").open(newline="") as file:
            for row in islice(csv.DictReader(file), run.logged):
                step = int(row.pop("step"))
                if found := self.new({name: float(value) for name, value in row.items() if value}, step):
                    yield step, found


def manifest(run: Run) -> dict[str, Any]:
    """Return the run's ``manifest.json``; ``run`` in it is the identity that a resumed run keeps."""
    return json.loads((run.run_dir / "manifest.json").read_bytes())


def commit(run: Run) -> str | None:
    """Return the Git commit of the folder in which the run was started; None outside of a repository."""
    git = manifest(run)["git"]
    return git and git["commit"]


def video(run: Run) -> Path | None:
    """Return the video of the evaluation that has just ended; None: none was recorded."""
    path = run.run_dir / "videos" / f"step_{run.steps:012d}.mp4"
    return path if path.is_file() else None


def best(run: Run) -> list[Path]:
    """Return the files of the best checkpoint that ``rlplug.load`` needs; empty without a best checkpoint."""
    folder = run.run_dir / "checkpoints" / "best"
    return [folder.resolve() / name for name in ("manifest.json", "weights.pt")] if folder.exists() else []


class SystemUsage:
    """Load of the machine and of this process, for ``log.system``."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent()  # the next call returns the mean since this one
        self._process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return the load since the last call, and the memory now, in percent of the machine and in MB."""
        found = {"cpu_percent": psutil.cpu_percent(), "ram_percent": psutil.virtual_memory().percent}
        found |= {"process_cpu_percent": self._process.cpu_percent()}
        found |= {"process_ram_mb": self._process.memory_info().rss / 2**20}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["gpu_ram_percent"] = 100 * (1 - free / total)
            with suppress(Exception):  # needs NVIDIA's management library
                found["gpu_percent"] = torch.cuda.utilization()
        return {f"system/{name}": float(value) for name, value in found.items()}
