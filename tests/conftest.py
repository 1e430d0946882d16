"""Options of the whole test suite."""

from __future__ import annotations

import gc
import os
import sys

import absl.logging
import pytest

if not os.environ.get("RLPLUG_TEST_CUDA"):  # of tests/hardware/test_cuda.py, which measures nothing else
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
# graphs of torch.compile run a few times: the C++ compiler takes 20 s to optimize one, and 5 s without (and with the
# assertions of its headers); the processes that would compile several at a time take seconds to start
os.environ.setdefault("TORCHINDUCTOR_DEBUG_COMPILE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# absl, which dm_control imports, would take pytest's captured stderr for its own, and close it when Hydra sets up
# logging
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

from tests.composing import reuse  # noqa: E402  after what torch reads when it is imported

reuse()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.json instead of comparing")


LONG = ("test_quality.py", "test_site.py", "test_types.py", "test_wheel.py")
"""files with tests of one long program each"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long programs: if one of them came last, all other workers would wait for it."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Take modules and tests out of garbage collection, a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session", autouse=True)
def runs_of_mlflow(tmp_path_factory: pytest.TempPathFactory) -> None:
    """MLflow's own folder is in the current one, which is that of the repository."""
    os.environ.setdefault("MLFLOW_TRACKING_URI", str(tmp_path_factory.mktemp("mlflow") / "mlruns"))
