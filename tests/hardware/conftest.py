"""One undisturbed run of two ranks, which disturbed ones of this folder have to equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware.test_command_line import PPO


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    subprocess.run([sys.executable, "-m", "rlplug", *PPO, f"hydra.run.dir={run}"], check=True)
    return run
