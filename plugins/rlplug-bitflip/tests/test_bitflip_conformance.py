"""Does everything in this package keep to rlplug's contracts? Every check makes real, short runs."""

import pytest
from rlplug.testing import conformance


@pytest.mark.parametrize("check", conformance.checks("rlplug-bitflip"), ids=str)
def test_conformance(check):
    check()
