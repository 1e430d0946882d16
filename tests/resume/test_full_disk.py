"""A disk that fills up: one message, nothing half written, and the run goes on once there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

import pytest
import yaml

from rlplug.checkpointing.format import Checkpoint, checkpoints
from rlplug.cli import main
from rlplug.run.run_dir import read
from rlplug.testing.comparing import differences_of_runs
from tests.checkpointing.runs import punctual
from tests.tools.kill import Process, warm_up, with_defaults

RUN = with_defaults(
    [
        *("algo=sac", "env=pendulum", "model.hidden=[8]", "num_steps_sampled_before_learning_starts=50"),
        *("train_batch_size=16", "buffer.capacity=200", "total_steps=300", "eval.every=0", "eval.episodes=1"),
        *("log.every=1", "checkpoint.every=50"),
    ]
)
FULL = "No space left on device"


class Disk:
    """A file system of a few megabytes, and a file in it that takes the room."""

    def __init__(self, path: Path) -> None:
        self.path, self.ballast = path, path / "ballast"

    def fill(self, but: int = 0) -> None:
        """Leave so many bytes; in whole pages."""
        with self.ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGESIZE))
            except OSError:
                pass
        os.truncate(self.ballast, self.ballast.stat().st_size - but)

    def make_room(self) -> None:
        self.ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("a disk of a few megabytes is a tmpfs of Linux")
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size=6m,mode=0777,uid={os.getuid()}"
    become_root = [] if os.getuid() == 0 else ["sudo", "-n"]
    try:
        mount = [*become_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("mounting a disk of a few megabytes takes root, or sudo")
    if done.returncode:
        pytest.skip(f"a disk of a few megabytes may not be mounted here: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run([*become_root, "umount", str(path)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main([*RUN, f"hydra.run.dir={folder}"]) == 0
    return folder


def whole(run: Path) -> None:
    """Every file under a final name can be read; nothing else was left."""
    for path in checkpoints(run):
        Checkpoint(path).verify()
    read(run)
    assert not list(run.rglob("*.partial"))


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (message,) = capsys.readouterr().err.splitlines()
    return message


def resume(run: Path) -> int:
    return main(["resume", str(run)])


@pytest.mark.parametrize("free", [170, 240])
def test_full_while_checkpoints_are_written(
    free: int, disk: Disk, undisturbed: Path, capsys: pytest.CaptureFixture[str]
):
    run = disk.path / "run"
    disk.fill(but=free * 1024)
    with punctual():
        assert main([*RUN, f"hydra.run.dir={run}"]) == 1
    message, good = only_line(capsys), checkpoints(run)
    last = f"the last good checkpoint is {good[0]}" if good else "there is no checkpoint yet; begin again"
    what = f"a checkpoint could not be written to {run}", f"{run / 'metrics.csv'}"  # whichever the disk refused first
    assert message.startswith(tuple(f"rlplug: {one}: {FULL}; {last}" for one in what))
    assert message.endswith(f"{'continue' if good else 'begin again'} with: python -m rlplug resume {run}")
    whole(run)

    disk.fill()
    assert resume(run) == 1
    assert FULL in capsys.readouterr().err.splitlines()[-1]
    whole(run)
    assert checkpoints(run) == good

    disk.make_room()
    assert resume(run) == 0
    assert differences_of_runs(undisturbed, run) == []


def test_full_while_metrics_are_appended(disk: Disk, undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    run = disk.path / "run"
    disk.fill(but=10 * PAGESIZE)
    assert main([*RUN, "checkpoint.every=0", f"hydra.run.dir={run}"]) == 1
    where = only_line(capsys).removesuffix(
        f": {FULL}; there is no checkpoint yet; begin again with: python -m rlplug resume {run}"
    )
    assert where in (f"rlplug: {run}", f"rlplug: {run / 'metrics.csv'}")  # the latter: there was room for half a row
    disk.make_room()
    assert resume(run) == 0
    assert differences_of_runs(undisturbed, run) == []


def test_full_metrics_behind_a_checkpoint(disk: Disk, undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    """A run that goes on for longer, on a disk that is full meanwhile."""
    run = disk.path / "run"
    assert main([*RUN, "total_steps=150", "checkpoint.every=0", f"hydra.run.dir={run}"]) == 0
    (last,) = checkpoints(run)
    disk.fill(but=(run / "metrics.csv").stat().st_size // PAGESIZE * PAGESIZE + 6 * PAGESIZE)
    capsys.readouterr()
    assert main(["resume", str(run), "total_steps=300"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert f": {FULL}; the last good checkpoint is {last}; continue with: python -m rlplug resume {run}" in message
    whole(run)
    disk.make_room()
    assert resume(run) == 0
    assert differences_of_runs(undisturbed, run) == []


@pytest.mark.parametrize("pages", range(5))
def test_full_from_the_start(pages: int, disk: Disk, capsys: pytest.CaptureFixture[str]):
    run = disk.path / "run"
    disk.fill(but=pages * PAGESIZE)
    command = [*RUN, "total_steps=100", "checkpoint.every=0", f"hydra.run.dir={run}"]
    assert main(command) == 1
    message = only_line(capsys)
    assert str(run) in message
    assert FULL in message
    assert not list(run.glob("*.partial"))
    disk.make_room()
    if "begin again with" in message:
        assert resume(run) == 0
    else:
        assert main(command) == 0


def run_of(disk: Disk, words: list[str]) -> Process:
    """Start a run on the disk; what it says is written elsewhere."""
    warm_up(words)
    return Process(disk.path / "run", words, log=disk.path.with_name("said.log"))


def ended(process: Process) -> list[str]:
    """Return what a run that failed has said, on both outputs."""
    while process.code is None:
        time.sleep(0.01)
    assert process.code == 1
    return [line for line in process.log.read_text().splitlines() if line]


def test_the_message_of_a_process(disk: Disk):
    """Nothing else is said, by a thread or at exit."""
    run = disk.path / "run"
    disk.fill(but=170 * 1024)
    process = run_of(disk, RUN)
    (message,) = ended(process)
    assert FULL in message
    assert yaml.safe_load((run / "config.yaml").read_text())["algo"]["name"] == "sac"


def test_full_under_tensorboard(disk: Disk):
    """Its files are written by a thread of its own, which has nothing else to say."""
    run = disk.path / "run"
    words = [*RUN, "total_steps=100000", "checkpoint.every=1000000", "eval.every=100", "logger.only=[tensorboard]"]
    process = run_of(disk, [*words, "logger.tensorboard.flush_secs=1"])
    while not checkpoints(run) and process.code is None:  # of the first evaluation
        time.sleep(0.01)
    disk.fill()
    (message,) = ended(process)
    assert FULL in message
    assert f"the last good checkpoint is {checkpoints(run)[0]}; continue with: " in message
    whole(run)
