"""A logger or callback that fails is left out, and the run goes on; what is meant to end the run ends it."""

import json
from pathlib import Path

import pytest

from rlplug.checkpointing.format import checkpoints
from rlplug.cli import main
from rlplug.testing.comparing import compare_runs
from tests.installing import Install, install, manifest, site

__all__ = ["install", "site"]


RUN = ["algo=ppo", "env=cartpole", "num_envs=4", "model.hidden=[8]", "total_steps=1024", "rollout_fragment_length=32"]
RUN += ["tuned=none", "algo.sgd_minibatch_size=64", "log.every=256", "eval.every=0", "eval.episodes=1"]
RUN += ["checkpoint.every=256", "logger=[bad,csv]"]


ENDING = """
from rlplug import hookimpl
from rlplug.settings import settings
from rlplug.types import RunError

class Logger:
    @settings
    class Config:
        pass

    def __init__(self, cfg, ctx):
        self.calls = 0

    @hookimpl
    def {event}(self, run):
        self.calls += 1
        if self.calls >= {call} and not (run.run_dir / "resumed").exists():
            raise {error}
"""


def run(install: Install, folder: Path, error: str, event: str, call: int, *words: str) -> int:
    """Return the exit code of a run whose first logger raises ``error`` from so many calls on, until it is resumed."""
    files = {
        "rlplug_bad/__init__.py": manifest(("logger", "bad", "rlplug_bad.logger:Logger"), conf="rlplug_bad.conf"),
        "rlplug_bad/logger.py": ENDING.format(event=event, call=call, error=error),
        "rlplug_bad/conf/logger/bad.yaml": "# @package logger.bad\nname: bad\n",
    }
    install("rlplug-bad", "rlplug_bad", files)
    return main([*RUN, *words, f"hydra.run.dir={folder}"])


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


def test_it_is_left_out(install: Install, tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]):
    assert run(install, tmp_path / "run", "ValueError('a bad row\\nand why')", "rlplug_logged", 2) == 0
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert len(rows) == 5
    printed, step = capsys.readouterr(), rows[1].partition(",")[0]
    assert printed.err.splitlines() == [
        f"rlplug: logger.bad failed in rlplug_logged at step {step}, and is disabled: ValueError: a bad row"
        f" ({site}/rlplug_bad/logger.py:18)"
    ]
    assert printed.out == ""
    assert status(tmp_path / "run") == "finished"


ERRORS = {"KeyboardInterrupt": (130, "interrupted"), "RunError('it is good enough')": (1, "failed")}
EVENTS = {  # at which call a logger says so, and after how many steps, less final observations, the run ends
    "rlplug_started": (1, 0),
    "rlplug_collected": (3, 384),
    "rlplug_updated": (3, 384),
    "rlplug_logged": (3, 768),
    "rlplug_evaluated": (2, 1024),
    "rlplug_checkpoint": (1, None),
}
SAVED = ("checkpoint.every=512", "eval.every=512")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main([*RUN, *SAVED, "logger=[csv]", f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize(
    ("event", "error"),
    [(event, [*ERRORS][i % 2]) for i, event in enumerate(EVENTS)],
)
def test_a_run_that_a_logger_ends_goes_on_exactly(
    event: str, error: str, undisturbed: Path, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It ends after the round, with a checkpoint, however often the logger says so again."""
    (call, steps), (code, end), folder = EVENTS[event], ERRORS[error], tmp_path / "run"
    assert run(install, folder, error, event, call, *SAVED) == code
    assert status(folder) == end
    printed, (last, *_) = capsys.readouterr().err, checkpoints(folder)
    assert "Traceback" not in printed
    assert steps is None or steps - 64 < int(last.name.removeprefix("step_")) <= steps
    if code == 1:
        assert f"it is good enough; the last good checkpoint is {last}" in printed
    (folder / "resumed").touch()
    assert main(["resume", str(folder)]) == 0
    parts = compare_runs(folder, undisturbed)
    assert parts["weights"][0] == 9
    assert [f"{part}: {name}" for part in ("weights", "learner", "rank0", "buffer") for name in parts[part][1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_all_ranks_end_with_the_one_whose_logger_says_so(
    error: str, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, end = ERRORS[error]
    words = ("hardware=2cpu", "checkpoint.every=0")
    assert run(install, tmp_path / "run", error, "rlplug_updated", 3, *words) == code
    assert status(tmp_path / "run") == end
    (last,) = checkpoints(tmp_path / "run")
    assert (f"it is good enough; the last good checkpoint is {last}" in capsys.readouterr().err) == (code == 1)
    (tmp_path / "run" / "resumed").touch()
    assert main(["resume", str(tmp_path / "run")]) == 0
