"""Ctrl-C and SIGTERM stop a run where it can be continued exactly; a living run is nobody else's."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplug.cli import main
from rlplug.distributed.collectives import Collectives
from rlplug.distributed.fabric import one_rank
from rlplug.run import launch
from rlplug.run.launch import STOPPING
from rlplug.testing.comparing import differences_of_runs
from rlplug.trainer.agreement import Agreement
from rlplug.trainer.placement import Placement
from tests.tools.kill import Process, warm_up, with_defaults

RUN = with_defaults(
    [
        *("algo=sac", "env=pendulum", "model.hidden=[8]", "num_steps_sampled_before_learning_starts=50"),
        *("train_batch_size=16", "buffer.capacity=300", "total_steps=600", "eval.every=400", "log.every=100"),
        "eval.episodes=100",  # long enough to be interrupted
    ]
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    warm_up(RUN)
    assert main([*RUN, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def at(folder: Path, number: int, step: int, then: Callable[[int], None] = lambda _: None) -> int | None:
    """Start the run, send it a signal when it has logged ``step``, and return its exit code."""
    process = Process(folder, RUN)
    assert process.wait(lambda: step in logged(folder))
    then(process.pid)
    os.kill(process.pid, number)
    while process.code is None:
        time.sleep(0.001)
    assert process.log.read_text().splitlines() == ["", STOPPING.decode().strip()]
    return process.code


def logged(folder: Path) -> list[int]:
    """The steps at which a row was written."""
    try:
        lines = (folder / "metrics.csv").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(line.partition(",")[0]) for line in lines[1:] if "," in line]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_is_continued_exactly(number: int, code: int, folder: Path, undisturbed: Path):
    assert at(folder, number, 200) == code
    told = summary(folder)
    assert told["status"] == "interrupted"
    assert 200 <= told["env_steps"] < 600
    assert (folder / "checkpoints" / told["checkpoint"]).name == f"step_{told['env_steps']:012}"
    assert main(["resume", str(folder)]) == 0
    assert summary(folder)["status"] == "finished"
    assert differences_of_runs(undisturbed, folder) == []


@pytest.mark.parametrize("step", [400, 600])
def test_stopped_in_an_evaluation(step: int, folder: Path, undisturbed: Path):
    assert at(folder, signal.SIGINT, step) == 130
    told = summary(folder)
    assert (told["status"], told["env_steps"]) == ("interrupted", step)
    assert told["eval/env_steps"] == (400 if step == 600 else None)  # this evaluation did not end
    assert main(["resume", str(folder)]) == 0
    assert differences_of_runs(undisturbed, folder) == []


def test_a_second_ctrl_c_while_the_first_is_being_handled(monkeypatch: pytest.MonkeyPatch):
    """It comes while the line is being written, as to a terminal that is slow."""
    written: list[bytes] = []

    def write(file: int, line: bytes) -> None:
        written.append(line)
        if len(written) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch.os, "write", write)
    agreement = Agreement(Placement(Collectives(one_rank())), lambda: False, [])
    trainer: Any = SimpleNamespace(agreement=agreement, ctx=SimpleNamespace(rank=0))
    with pytest.raises(KeyboardInterrupt), launch._stop_on_signal(trainer):
        signal.raise_signal(signal.SIGINT)
    assert written == [STOPPING]


def test_a_living_run_is_not_resumed(folder: Path, capsys: pytest.CaptureFixture[str]):
    def resume(process: int) -> None:
        os.kill(process, signal.SIGSTOP)  # alive, and it changes nothing itself
        before = content(folder)
        capsys.readouterr()
        assert main(["resume", str(folder)]) == 2
        assert content(folder) == before
        (message,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"{folder} is being written by process {process} on \S+, since", message)
        os.kill(process, signal.SIGCONT)

    assert at(folder, signal.SIGTERM, 100, resume) == 143


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
