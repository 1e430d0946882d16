import pytest

from rlplug.functional import piecewise_linear
from rlplug.functional.schedule import due


@pytest.mark.parametrize(
    ("step", "value"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (25, 0.5), (60, 0.2), (90, -0.1), (99, -0.1)]
)
def test_linear_between_the_points_and_constant_outside(step, value):
    assert piecewise_linear([(10, 1.0), (20, 0.5), (30, 0.5), (90, -0.1)], step) == pytest.approx(value)


def test_one_point_is_a_constant():
    assert [piecewise_linear([(5, 3)], step) for step in (0, 5, 9)] == [3.0, 3.0, 3.0]


def test_a_step_that_occurs_twice_is_a_jump():
    points = [(0, 1.0), (10, 1.0), (10, 0.1), (20, 0.1)]
    assert [piecewise_linear(points, step) for step in (9, 10, 11)] == [1.0, 0.1, 0.1]


@pytest.mark.parametrize(
    ("every", "last", "step", "expected"),
    [
        (10, 0, 9, False),
        (10, 0, 10, True),
        (10, 10, 19, False),
        (10, 19, 20, True),
        (10, 5, 31, True),
        (0, 0, 9, False),
    ],
)
def test_what_is_due_every_so_many_steps(every: int, last: int, step: int, expected: bool):
    assert due(every, last, step) is expected
