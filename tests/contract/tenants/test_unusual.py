"""The conformance kit has no objection to plugins that are right, however unusual they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlplug.testing import conformance
from rlplug.testing.checks.causes import counted
from tests.contract.tenants import unusual
from tests.installing import install, site  # noqa: F401  fixtures

CONF = Path(__file__).parents[3] / "conf"
PACKAGES = {
    "rlplug-unusual": unusual.files(lambda group, option: (CONF / group / f"{option}.yaml").read_text()),
}
REFUSED = {  # each of these checks had an objection
    "rlplug-unusual": (
        *("algo-remembering-act-cartpole", "algo-remembering-state-cartpole"),  # rows of act lacked prev_action
        *("algo-together-terms-carts2", "algo-together-parts-carts2"),  # terms with an agent axis
        "algo-together-act-carts2",
        *("algo-distilled-learns-cartpole", "algo-distilled-parts-cartpole"),  # a frozen child, a frozen layer
        *("algo-careful-composes", "exploration-shaking-served"),  # a second YAML file
    ),
}


@pytest.fixture
def checks(install, request):  # noqa: F811
    distribution = request.param
    install(distribution, distribution.replace("-", "_"), PACKAGES[distribution])
    return {str(check): check for check in conformance.checks(distribution)}


@pytest.mark.parametrize("checks", PACKAGES, indirect=True)
def test_what_was_refused_passes(checks, request):
    for name in REFUSED[request.node.callspec.params["checks"]]:
        checks[name]()


@pytest.mark.slow
@pytest.mark.parametrize("checks", PACKAGES, indirect=True)
def test_all_else_passes_too(checks):
    for check in checks.values():
        check()


def test_what_counts_of_a_term():
    valid = torch.tensor([[True, True], [True, False], [False, False]])
    alive = torch.tensor([[[1, 1], [1, 0]], [[0, 1], [1, 1]], [[1, 1], [1, 1]]], dtype=torch.bool)
    batch = {"valid": valid, "alive": alive}
    assert counted(batch, torch.zeros(())) is None
    assert torch.equal(counted(batch, torch.zeros(2, 2)), valid[:2])
    assert counted(batch, torch.zeros(3, 2, 2)).tolist() == [
        [[True, True], [True, False]],
        [[False, True], [False, False]],
        [[False, False], [False, False]],
    ]
    assert torch.equal(counted({"alive": alive[0]}, torch.zeros(2, 2)), alive[0])
    assert counted({}, torch.zeros(2)) is None
