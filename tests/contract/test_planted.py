"""The conformance kit finds bugs that are planted into built-in components, each by the check that is meant for it."""

from __future__ import annotations

import inspect

import pytest

from tests.contract import planted
from tests.contract.planted import BUGS, manners, values
from tests.contract.toys import ALGORITHMS, OTHERS
from tests.installing import install, site  # noqa: F401  fixtures
from tests.tools.planted import found_by


@pytest.fixture
def package(install):  # noqa: F811
    install("rlplug-planted", "rlplug_planted", planted.FILES)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name, marks=[] if bug.quick else pytest.mark.slow) for bug in BUGS]
)
def test_the_kit_finds(package, bug):
    found = found_by(bug)
    assert found, f"no check {bug.check} of the kit finds {bug.name}: {bug.cls.__doc__}"
    assert all(said for _, said in found)


def test_the_table_has_every_bug():
    own = {
        cls
        for module in (values, manners)
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and cls.__doc__
    }
    assert own - {manners.Nothing} == {bug.cls for bug in BUGS}
    assert len(BUGS) + len(ALGORITHMS) - 1 + len(OTHERS) >= 50
    assert len({bug.name for bug in BUGS}) == len(BUGS)
