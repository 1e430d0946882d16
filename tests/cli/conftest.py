from pathlib import Path

import pytest

from tests.installing import install, site

__all__ = ["install", "site"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
