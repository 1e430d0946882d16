"""One undisturbed run of two ranks, which disturbed ones of this folder have to equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplug.cli import main
from tests.hardware.test_command_line import PPO


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*PPO, f"hydra.run.dir={run}"]) == 0
    return run
