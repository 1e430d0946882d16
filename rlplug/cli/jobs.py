"""Runs that a sweeper of rlplug starts, each in a process of its own that ends with the sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlplug.cli import main as run
from rlplug.cli import tell
from rlplug.settings import NonNegativeFloat, PositiveFloat, option, settings
from rlplug.types import ConfigError

POLL_S = 0.2
"""seconds between two checks that the sweep's process still exists"""
ATTEMPTS = 3
"""how often Ray starts a run whose machine or worker died"""
OWN = ("workers", "ray")
"""options of sweepers that say where runs train, which may change when a sweep is continued"""
Train = Callable[[Sequence["Job"]], list[Path]]


@settings
class Ray:
    address: str | None = option("host:port of a Ray cluster whose machines train the runs; null: this machine.")
    num_cpus: PositiveFloat = option("CPU cores that Ray reserves for a run.")
    num_gpus: NonNegativeFloat = option("CUDA devices that Ray gives to a run; fractions are allowed.")


class Job(Protocol):
    @property
    def folder(self) -> Path: ...

    def command(self) -> list[str] | None:
        """Return the words of a command line that trains it; None: it has been trained."""
        ...


def log(folder: Path) -> Path:
    """Return the file for the output of a run."""
    return folder.with_name(f"{folder.name}.log")


def hint(folder: Path, workers: int | None) -> str:
    """Return the part of a message that names this file, if there is one."""
    return "" if workers == 0 else f"; see {log(folder)}"


@contextmanager
def pool(workers: int | None, ray: Ray) -> Iterator[Train]:
    """Yield a function that trains runs and returns the folders of those that failed; Ctrl-C in a run is raised there.

    Args:
        workers: runs at a time; None: one per CPU core, or as many as the cluster has room for; 0: one after another in
            this process.

    Raises:
        ConfigError: the cluster does not answer, or none of its machines has room for a run.
    """
    if ray.address is None:
        yield partial(on_this_machine, workers=workers)
        return
    if workers == 0:
        raise ConfigError("sweeper.workers", "0 trains in this process; leave it out to train on sweeper.ray.address")

    from rlplug.actors.cluster import connected  # here, because torch and Ray take seconds to import
    from rlplug.plan import Plan, RayCluster

    with ExitStack() as stack:
        try:
            given = {"address": ray.address, "num_cpus": ray.num_cpus, "num_gpus": ray.num_gpus}
            cluster = RayCluster(**given, object_store_memory=None, placement_strategy="PACK")  # type: ignore[arg-type]
            stack.enter_context(connected(Plan(ray=cluster)))
        except ConfigError as error:
            raise ConfigError("sweeper.ray.address", error.message) from None
        _require_room(ray)
        yield partial(on_ray, workers=workers, cfg=ray)


def on_this_machine(jobs: Sequence[Job], workers: int | None) -> list[Path]:
    """Train every run in a process of this machine; ``workers`` is that of ``pool``."""
    commands = [(job.folder, command) for job in jobs if (command := job.command()) is not None]
    if workers == 0:
        codes: Sequence[int] = [*map(run, (command for _, command in commands))]
    else:
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as threads:
            files = [_file(folder) for folder, _ in commands]
            codes = [*threads.map(logged, [command for _, command in commands], files)]
    return _failed([folder for folder, _ in commands], codes)


def on_ray(jobs: Sequence[Job], workers: int | None, cfg: Ray) -> list[Path]:
    """Train every run on a machine of the cluster; one whose machine or worker dies continues on another."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    options: dict[str, Any] = {"num_cpus": cfg.num_cpus, "num_gpus": cfg.num_gpus, "max_retries": 0}
    train: Any = ray.remote(**options)(logged)
    left, running, codes = list(jobs), dict[Any, Job](), dict[Path, int]()
    attempts = dict.fromkeys((job.folder for job in jobs), 0)
    while left or running:
        while left and len(running) < (workers or len(jobs)):
            job = left.pop(0)
            if (command := job.command()) is not None:
                running[train.remote(command, _file(job.folder), str(Path.cwd()))] = job
        if running:
            (reference,), _ = ray.wait([*running], num_returns=1)
            job = running.pop(reference)
            try:
                codes[job.folder] = ray.get(reference)
            except RayTaskError as error:  # its program could not be started there
                tell(f"{job.folder}: {error.cause}; the machines of the cluster need a shared folder")
                codes[job.folder] = 1
            except RayError:  # the machine, or Ray's worker on it, died
                attempts[job.folder] += 1
                if attempts[job.folder] < ATTEMPTS:
                    left.append(job)
                else:
                    tell(f"{job.folder}: the machine or Ray's worker died {ATTEMPTS} times")
                    codes[job.folder] = 1
    return _failed([*codes], [*codes.values()])


def _require_room(cfg: Ray) -> None:
    import ray

    for key, resource, what in (("num_cpus", "CPU", "CPU cores"), ("num_gpus", "GPU", "CUDA devices")):
        most = max(node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"])
        if getattr(cfg, key) > most:
            said = f"{getattr(cfg, key):g} {what} are more than the {most:g} of the cluster's largest machine"
            raise ConfigError(f"sweeper.ray.{key}", said)


def _file(folder: Path) -> str:
    return str(log(folder).absolute())


def _failed(folders: Sequence[Path], codes: Sequence[int]) -> list[Path]:
    for number in (signal.SIGINT, signal.SIGTERM):
        if {128 + number, -number} & {*codes}:
            raise KeyboardInterrupt(number)
    return [folder for folder, code in zip(folders, codes, strict=True) if code]


def logged(command: Sequence[str], file: str, folder: str | None = None) -> int:
    """Run a command line of rlplug with its output appended to a file, and return its exit code."""
    line = [sys.executable, "-m", "rlplug.cli.jobs", str(os.getpid()), *command]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as output:
        return subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, check=False, cwd=folder).returncode


def _end_with(parent: int) -> None:
    """End this process when its parent ends, so that a continued sweep does not meet it."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    sys.exit(run())
