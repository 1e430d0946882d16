import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from rlplug.envs.spaces import batched, columns, execute, inside_action, inside_obs, joined, observe, take
from rlplug.types import ConfigError


def test_bounded_actions_are_rescaled_and_clipped():
    space = Box(np.array([0, -10], np.float32), np.array([1, 30], np.float32))
    assert inside_action(space) == Box(-1, 1, (2,), np.float32)
    out = execute(space)(np.array([[-1, -1], [0, 0], [1, 1], [0.5, -0.5], [-7, 7]], np.float32))
    assert out.dtype == np.float32
    assert out.tolist() == [[0, -10], [0.5, 10], [1, 30], [0.75, 0], [0, 30]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    bounds=st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2),
    action=st.floats(-1.5, 1.5, width=32),
)
def test_rescaled_actions_lie_in_the_space(dtype, bounds, action):
    space = Box(min(bounds), max(bounds), (1,), dtype)
    (out,) = execute(space)(np.array([[action]], np.float32))
    assert space.contains(out)


def test_bounds_of_every_size_hold():
    big = float(np.finfo(np.float32).max)
    out = execute(Box(-big, big, (1,), np.float32))(np.array([[-1], [0], [1]], np.float32))
    assert out[:, 0].tolist() == [-big, 0, big]
    assert execute(Box(-np.inf, np.inf, (2,), np.float32))(np.array([[3, -200]], np.float32)).tolist() == [[3, -200]]
    assert inside_obs(Box(-1e300, 1e300, (1,), np.float64)) == Box(-np.inf, np.inf, (1,), np.float32)


def test_each_bound_holds_by_itself():
    low, high = np.array([[0, -np.inf, 0, -np.inf], [4, 5, np.inf, np.inf]], np.float32)
    space = Box(low, high)
    assert not inside_action(space).is_bounded()
    out = execute(space)(np.array([[0, 3, 7, -200], [-7, 9, -1, 200]], np.float32))
    assert out.tolist() == [[2, 3, 7, -200], [0, 5, 0, 200]]


@pytest.mark.parametrize("space", [Box(-np.inf, np.inf, (2,)), Box(-1, 1, (2,)), Discrete(3), MultiDiscrete([2, 3])])
def test_environments_get_actions_in_memory_of_their_own(space):
    action = np.zeros((4, *space.shape), inside_action(space).dtype)
    assert not np.shares_memory(execute(space)(action), action)


def test_discrete_spaces_count_from_zero():
    assert inside_action(Discrete(3, start=-1)) == Discrete(3)
    assert execute(Discrete(3, start=-1))(np.array([0, 2])).tolist() == [-1, 1]
    assert inside_obs(Discrete(3, start=5)) == Discrete(3)
    assert observe(Discrete(3, start=5))(np.array([5, 7])).tolist() == [0, 2]
    many = MultiDiscrete([2, 3], start=[1, 10])
    assert inside_action(many) == MultiDiscrete([2, 3])
    assert execute(many)(np.array([[0, 0], [1, 2]])).tolist() == [[1, 10], [2, 12]]


def test_parts_of_discrete_actions_are_side_by_side():
    arm = Dict(grip=MultiBinary(2), move=Tuple([Discrete(3, start=-1), MultiDiscrete([[2], [5]])]))
    assert inside_action(arm) == MultiDiscrete([2, 2, 3, 2, 5])
    actions = execute(arm)(np.array([[1, 0, 0, 1, 4], [0, 1, 2, 0, 3]]))
    one, two = columns(actions, 2)
    assert arm.contains(one)
    assert arm.contains(two)
    assert one["grip"].tolist() == [1, 0]
    assert one["move"][0] == -1
    assert one["move"][1].tolist() == [[1], [4]]
    assert two["move"][1].tolist() == [[0], [3]]
    assert take(actions, slice(1))["move"][0].tolist() == [-1]


def test_parts_of_continuous_actions_are_side_by_side():
    arm = Tuple([Box(-2.0, 1.0, (2, 1), np.float64), Box(-np.inf, np.inf, (1,), np.float32)])
    assert inside_action(arm) == Box(*np.array([[-1, -1, -np.inf], [1, 1, np.inf]], np.float32))
    (one,) = columns(execute(arm)(np.array([[-1.0, 0.5, 7.0]], np.float32)), 1)
    assert arm.contains(one)
    assert one[0].tolist() == [[-2.0], [0.25]]
    assert one[1].tolist() == [7.0]
    assert joined(arm)(np.array([[-1.0, 0.5, 7.0]], np.float32)).tolist() == [[-2.0, 0.25, 7.0]]


def test_a_single_part_stays_as_it_is():
    assert inside_action(Dict(move=Tuple([Discrete(3, start=1)]))) == Discrete(3)
    actions = execute(Dict(move=Tuple([Discrete(3, start=1)])))(np.array([0, 2]))
    assert [one["move"] for one in columns(actions, 2)] == [(1,), (3,)]
    assert inside_action(Tuple([Box(0.0, 2.0, (2, 2))])).shape == (2, 2)
    assert joined(Dict(move=Discrete(3, start=1)))(np.array([0, 2])).tolist() == [1, 3]


def test_observations_keep_their_dtype_except_float64():
    wide, half = np.float64, np.float16
    spaces = {"wide": Box(-np.inf, np.inf, (2,), wide), "image": Box(0, 255, (2, 2), np.uint8), "count": Discrete(4)}
    spaces |= {"flags": MultiBinary(3), "deep": Dict({"half": Box(-1, 1, (1,), half)})}
    rows = {"wide": np.zeros((5, 2)), "image": np.zeros((5, 2, 2), np.uint8), "count": np.zeros(5, np.int32)}
    rows |= {"flags": np.zeros((5, 3), np.int8), "deep": {"half": np.zeros((5, 1), half)}}
    inside, obs = inside_obs(Dict(spaces)), observe(Dict(spaces))(rows)
    for key, dtype in {"wide": np.float32, "image": np.uint8, "count": np.int64, "flags": np.int8}.items():
        assert obs[key].dtype == inside[key].dtype == dtype
    assert obs["deep"]["half"].dtype == inside["deep"]["half"].dtype == np.float32


@pytest.mark.parametrize(
    ("function", "space"),
    [
        (inside_obs, Tuple([Text(3)])),
        (inside_action, Tuple([Discrete(2), Box(0, 9, (1,), np.int64)])),
        (inside_action, Dict(a=Dict(b=Text(3)))),
        (inside_obs, Dict({"words": Text(3)})),
        (inside_action, Dict({})),
        (inside_action, Box(0, 9, (2,), np.int64)),
    ],
)
def test_spaces_that_are_not_served_are_named(function, space):
    with pytest.raises(ConfigError, match="supported are") as error:
        function(space)
    assert error.value.key == "env.id"


ROOM = Dict(speed=Box(-1, 1, (2,), np.float32), doors=Tuple([Discrete(3, start=1), MultiBinary(2)]))


def test_one_observation_is_given_a_leading_axis_and_a_batch_is_counted():
    one, n = batched(ROOM, {"speed": [0.5, 0.5], "doors": (1, [0, 1])})
    assert n is None
    assert [one["speed"].shape, one["doors"][0].tolist(), one["doors"][1].tolist()] == [(1, 2), [1], [[0, 1]]]
    many, n = batched(ROOM, {"speed": np.zeros((4, 2)), "doors": ([1, 2, 3, 1], np.zeros((4, 2), np.int8))})
    assert n == 4
    assert observe(ROOM)(many)["doors"]["0"].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        ({"speed": [0, 0]}, "the observation is a dict of speed; the observation space is Dict"),
        ({"speed": [0, 0], "doors": (1,)}, "the observation is a tuple of 0; the observation space is Tuple"),
        ({"speed": [0, 0], "doors": [1, [0, 1]]}, "the observation is a list; the observation space is Tuple"),
        ({"speed": [0, 0], "doors": (4, [0, 1])}, "the observation 4 is outside of the observation space, Discrete"),
        ({"speed": [[0, 0]], "doors": (1, [0, 1])}, "the parts of the observation differ in their leading axis"),
        ({"speed": [0] * 3, "doors": (1, [0, 1])}, r"has shape \[3\]; .*: \[2\], or \[n, 2\] for n of them"),
    ],
)
def test_what_is_not_of_the_space_is_refused(obs, said):
    with pytest.raises(ValueError, match=said):
        batched(ROOM, obs)
