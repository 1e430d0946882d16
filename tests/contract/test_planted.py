"""The conformance kit finds bugs that are planted into built-in components, each by the check that is meant for it."""

from __future__ import annotations

import inspect

import pytest

from rlplug.testing.conformance import Check
from tests.contract import planted
from tests.contract.planted import BUGS, Bug, manners, values
from tests.contract.toys import ALGORITHMS, OTHERS
from tests.installing import installed
from tests.tools.planted import found_by

package = installed("rlplug-planted", "rlplug_planted", planted.FILES, autouse=False)


QUICK = (
    values.DqnBootstrapsAfterTheEnd,
    values.DqnNeverMovesTheTarget,
    values.DqnGradientsIntoTheTarget,
    values.DqnForgetsImportanceWeights,
    values.DqnBootstrapsOutsideTheMask,
    values.PpoShiftsRewards,
    manners.LinUcbFreezesItsWidth,
    manners.DqnScalesRewardsInPlace,
    manners.PpoHasALambda,
    manners.EpsilonOutsideTheMask,
    manners.DeafToPriorities,
    manners.DrawsFromNumpy,
)
"""found in every run of the tests, each by another check; all others take minutes together"""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name, marks=() if bug.cls in QUICK else pytest.mark.slow) for bug in BUGS]
)
def test_the_kit_finds(package, bug):
    found = found_by(bug)
    assert found, f"no check {bug.check} of the kit finds {bug.name}: {bug.cls.__doc__}"
    for _, said in found:
        assert bug.says in said


@pytest.mark.parametrize("error", [NameError("SAMPLES"), TimeoutError("not finish within 300 s")])
def test_a_crash_or_a_time_limit_does_not_count_as_found(error, monkeypatch):
    def crash():
        raise error

    bug = BUGS[0]
    monkeypatch.setattr(Bug, "checks", lambda self: [Check("algo", bug.name, bug.check, crash)])
    with pytest.raises(type(error)):
        found_by(bug)


def test_the_table_has_every_bug():
    own = {
        cls
        for module in (values, manners)
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and cls.__doc__
    }
    assert own - {manners.Nothing, manners.Changed} == {bug.cls for bug in BUGS}
    assert len(BUGS) + len(ALGORITHMS) - 1 + len(OTHERS) >= 50
    assert len({bug.name for bug in BUGS}) == len(BUGS)
