"""Options of the whole test suite."""

from __future__ import annotations

import os

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything here is about the processor, on every machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.json instead of comparing")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")
