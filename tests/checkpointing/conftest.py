"""Small real runs, trained once."""

from pathlib import Path

import pytest

from tests.checkpointing.runs import trained


@pytest.fixture(scope="session")
def sac_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished after 200 steps; checkpoints at 50, 100, 150 and 200. Copy it before it is changed."""
    return trained("sac", tmp_path_factory.mktemp("runs") / "sac")


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished after some 256 steps, with a checkpoint before the last."""
    return trained("ppo", tmp_path_factory.mktemp("runs") / "ppo")
