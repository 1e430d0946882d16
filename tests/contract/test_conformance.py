"""Everything that is registered, by whichever distribution, keeps to its contract; the kit notices what does not."""

from __future__ import annotations

import pytest

from rlplug.testing import conformance


@pytest.mark.parametrize("check", conformance.checks(), ids=str)
def test_conformance(check):
    check()
