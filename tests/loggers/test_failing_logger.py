"""A logger or callback that fails is left out, and the run goes on; what is meant to end the run ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplug.cli import main
from tests.installing import Install, install, manifest, site

__all__ = ["install", "site"]

LOGGER = """
from rlplug import hookimpl
from rlplug.settings import settings
from rlplug.types import RunError

class Logger:
    @settings
    class Config:
        pass

    def __init__(self, cfg, ctx):
        self.seen = []

    @hookimpl
    def rlplug_logged(self, run, step):
        self.seen.append(step)
        if len(self.seen) == 2:
            raise {error}

    @hookimpl
    def rlplug_ended(self, run):
        print(self.seen)
"""
RUN = ["algo=ppo", "env=cartpole", "num_envs=4", "model.hidden=[8]", "total_steps=1024", "rollout_fragment_length=32"]
RUN += ["tuned=none"]
RUN += [
    "algo.sgd_minibatch_size=64",
    "log.every=256",
    "eval.every=0",
    "eval.episodes=1",
    "checkpoint.every=256",
    "logger=[bad,csv]",
]


def run(install: Install, folder: Path, error: str) -> int:
    """Return the exit code of a run whose first logger raises ``error`` in the second row."""
    conf = "\n@hookimpl\ndef rlplug_conf():\n    return 'rlplug_bad.conf'\n"
    files = {
        "rlplug_bad/__init__.py": manifest(("logger", "bad", "rlplug_bad.logger:Logger")) + conf,
        "rlplug_bad/logger.py": LOGGER.format(error=error),
        "rlplug_bad/conf/logger/bad.yaml": "# @package logger.bad\nname: bad\n",
    }
    install("rlplug-bad", "rlplug_bad", files)
    return main([*RUN, f"hydra.run.dir={folder}"])


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


def test_it_is_left_out(install: Install, tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]):
    assert run(install, tmp_path / "run", "ValueError('a bad row\\nand why')") == 0
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert len(rows) == 5
    printed, step = capsys.readouterr(), rows[1].partition(",")[0]
    assert printed.err.splitlines() == [
        f"rlplug: logger.bad failed in rlplug_logged at step {step}, and is left out from now on: ValueError: a bad row"
        f" ({site}/rlplug_bad/logger.py:18)"
    ]
    assert printed.out == ""
    assert status(tmp_path / "run") == "finished"


@pytest.mark.parametrize(
    ("error", "code", "end"),
    [("KeyboardInterrupt", 130, "interrupted"), ("RunError('the rig is on fire')", 1, "failed")],
)
def test_what_ends_the_run(error: str, code: int, end: str, install: Install, tmp_path: Path):
    assert run(install, tmp_path / "run", error) == code
    assert status(tmp_path / "run") == end
