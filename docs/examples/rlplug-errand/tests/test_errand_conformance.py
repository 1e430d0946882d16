"""Check this package against rlplug's contracts, in real, short runs."""

import pytest
from rlplug.testing import conformance


@pytest.mark.parametrize("check", conformance.checks("rlplug-errand"), ids=str)
def test_conformance(check):
    check()
