import copy
import json
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from rlplug.envs.making import find, make_list
from rlplug.envs.spaces import single_agent
from rlplug.envs.spec_json import from_json, mismatch, playable, space_from_json, space_to_json, to_json
from rlplug.testing.worlds import NESTED
from rlplug.types import CheckpointError, ConfigError, EnvSpec, Group

FLOATS = ("float16", "float32", "float64", ">f4")
INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(FLOATS + INTEGERS)))
    shape = draw(st_np.array_shapes(min_dims=0, max_dims=3, max_side=3))
    numbers = st_np.from_dtype(dtype, allow_nan=False)
    if draw(st.booleans()):
        a, b = (np.full(shape, draw(numbers), dtype) for _ in "ab")
    else:
        a, b = (draw(st_np.arrays(dtype, shape, elements=numbers)) for _ in "ab")
    low, high = np.asarray(np.minimum(a, b)), np.asarray(np.maximum(a, b))
    if dtype.kind == "f":  # a space that holds infinity alone is none that an environment can have
        assume(not np.isposinf(low).any() and not np.isneginf(high).any())
    space = Box(low, high, shape, dtype)  # type: ignore[arg-type]
    if dtype.kind == "i" and draw(st.booleans()):  # which holds the type's limits, and says that they are none
        space = Box(-np.inf, np.inf, shape, dtype)  # type: ignore[arg-type]
    return space


@st.composite
def multi_discretes(draw):
    dtype = np.dtype(draw(st.sampled_from(("int64", "int32", "uint8"))))
    shape = draw(st_np.array_shapes(max_dims=2, max_side=3))
    nvec, start = (draw(st_np.arrays(dtype, shape, elements=st.integers(low, 100))) for low in (1, 0))
    return MultiDiscrete(nvec, dtype, start=start)  # type: ignore[arg-type]


LEAVES = st.one_of(
    boxes(),
    st.builds(
        Discrete, st.integers(1, 99), start=st.integers(-9, 9), dtype=st.sampled_from((np.int64, np.int32, np.int16))
    ),
    multi_discretes(),
    st.builds(MultiBinary, st.one_of(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=3))),
)
KEYS = st.text(max_size=4)
SPACES = st.recursive(
    LEAVES, lambda sub: st.dictionaries(KEYS, sub, max_size=3).map(lambda d: Dict(OrderedDict(d))), max_leaves=5
)


def same(a, b) -> bool:
    """As ``==``, but exactly: gymnasium's compares bounds by allclose, and no order of keys."""
    if isinstance(a, Dict):
        pairs = zip(a.spaces.items(), b.spaces.items(), strict=True)
        return all(key == key_b and same(sub, sub_b) for (key, sub), (key_b, sub_b) in pairs)
    if isinstance(a, Box):
        names = ("low", "high", "bounded_below", "bounded_above")
        if not all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in names):
            return False
    return type(a) is type(b) and a == b and a.dtype == b.dtype and a.shape == b.shape


@settings(max_examples=300, deadline=None)
@given(SPACES)
def test_every_space_comes_back_from_strict_json(space):
    text = json.dumps(space_to_json(space), allow_nan=False)
    assert same(space_from_json(json.loads(text)), space)


@settings(max_examples=50, deadline=None)
@given(
    groups=st.dictionaries(KEYS, st.builds(Group, SPACES, SPACES, st.lists(KEYS).map(tuple)), min_size=1, max_size=2),
    extras=st.dictionaries(KEYS, SPACES, max_size=2),
    limit=st.none() | st.integers(1),
    offers=st.frozensets(st.sampled_from(("state", "simulator", "tasks"))),
)
def test_every_spec_comes_back(groups, extras, limit, offers):
    spec = EnvSpec(groups, native_spaces=groups, extras=extras, max_episode_steps=limit, offers=offers)
    back = from_json(json.loads(json.dumps(to_json(spec))))
    assert back == spec
    assert [*back.groups, *back.extras] == [*spec.groups, *spec.extras]
    assert mismatch(spec, back) is None


def test_a_real_environment_with_its_own_spaces():
    env = make_list(find("Pendulum-v1"), 1)
    env.close()
    back = from_json(json.loads(json.dumps(to_json(env.spec))))
    assert back == env.spec
    assert back.native_spaces["agent"].action == Box(-2, 2, (1,))
    assert back.single_agent.action == Box(-1, 1, (1,))


@pytest.mark.parametrize("action", ["hybrid", "bounded"])
def test_hybrid_actions_come_back(action):
    spec = single_agent(Box(-1, 1, (2,)), NESTED[action], None)
    node = json.loads(json.dumps(to_json(spec), allow_nan=False))
    assert from_json(node) == playable(node) == spec
    node["groups"][0]["action"]["discrete"] = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
    with pytest.raises(CheckpointError, match="the discrete part is Discrete"):
        from_json(node)


def test_both_zeros_come_back_and_images_are_small():
    space = Box(np.array([0.0, -0.0], np.float32), np.ones(2, np.float32))
    assert same(space_from_json(space_to_json(space)), space)
    assert len(json.dumps(space_to_json(Box(0, 255, (210, 160, 3), np.uint8)))) < 100
    assert len(json.dumps(space_to_json(Box(-np.inf, np.inf, (210, 160, 3))))) < 100


@pytest.mark.parametrize(
    "space",
    [
        Tuple([Text(5)]),
        Text(5),
        Dict(a=Text(5)),
        Dict({1: Discrete(2)}),  # type: ignore[dict-item]
        Box(0, 1, (1,), np.longdouble),
    ],
)
def test_other_spaces_are_refused(space):
    with pytest.raises(ConfigError, match="cannot be written into a checkpoint; supported are Box"):
        space_to_json(space)


GOOD = to_json(single_agent(Dict(a=Box(0, 1, (2,)), b=MultiDiscrete([2, 3])), Discrete(3), 200))


def broken(change):
    node = copy.deepcopy(GOOD)
    change(node)
    return node


@pytest.mark.parametrize(
    "node",
    [
        None,
        [],
        {},
        "Box",
        broken(lambda node: node.pop("native_spaces")),
        broken(lambda node: node.update(groups=3)),
        broken(lambda node: node["groups"][0]["action"].update(type="Text")),
        broken(lambda node: node["groups"][0]["action"].update(n=-1)),
        broken(lambda node: node["groups"][0]["action"].update(n="3")),
        broken(lambda node: node["groups"][0]["action"].update(dtype="float7")),
        broken(lambda node: node["groups"][0]["obs"]["spaces"][0][1].update(low=[0.0, 0.0, 0.0])),
        broken(lambda node: node["groups"][0]["obs"]["spaces"][0][1].update(low=9)),
        broken(lambda node: node["groups"][0]["obs"]["spaces"][1][1].update(start=[0])),
    ],
)
def test_what_is_no_spec_is_refused(node):
    with pytest.raises(CheckpointError, match=r"^the environment's spaces cannot be read from the manifest"):
        from_json(node)


@pytest.mark.parametrize("value", [None, 1, 1.5, True, [], ["x"], {}, {"x": 1}], ids=repr)
@pytest.mark.parametrize(
    "put",
    [
        lambda node, value: node["groups"][0].update(name=value),
        lambda node, value: node["groups"][0].update(agents=["a", value]),
        lambda node, value: node["native_spaces"][0].update(name=value),
        lambda node, value: node["extras"].append([value, {"type": "MultiBinary", "n": 1}]),
        lambda node, value: node["groups"][0]["extras"].append([value, {"type": "MultiBinary", "n": 1}]),
        lambda node, value: node.update(offers=["state", value]),
        lambda node, value: node.update(frame_stack=value),
        lambda node, value: node.update(max_episode_steps=value),
    ],
    ids=["group", "agent", "native group", "extra", "extra of a group", "offer", "frame stack", "limit"],
)
def test_names_are_texts_and_counts_are_numbers(put, value, request):
    node = json.loads(json.dumps(to_json(PENDULUM)))
    put(node, value)
    allowed = {"frame stack": [1], "limit": [1, None]}.get(request.node.callspec.id.partition("-")[0], [])
    if any(value is one for one in allowed):
        assert to_json(from_json(node)) == node
    else:
        with pytest.raises(CheckpointError, match=r"^the environment's spaces cannot be read from the manifest"):
            from_json(node)


PART = Dict(a=Discrete(2))
OBS, TORQUES, NEARLY = Box(-1, 1, (3,)), Box(-2, 2, (1,)), Box(-2.000001, 2, (1,))
PENDULUM = single_agent(OBS, TORQUES, 200)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (PENDULUM, None),
        (single_agent(OBS, Discrete(3), 200), f"the action space was {TORQUES}, and is Discrete(3)"),
        (single_agent(OBS, NEARLY, 200), f"the action space was {TORQUES}, and is Box(-2.000001, 2.0, (1,), float32)"),
        (single_agent(PART, TORQUES, 200), f"the observation space was {OBS}, and is {PART}"),
        (replace(PENDULUM, max_episode_steps=None), "the step limit of episodes was 200 steps, and is none"),
        (replace(PENDULUM, offers=frozenset({"tasks"})), "the list of optional features was nothing, and is tasks"),
        (
            replace(PENDULUM, extras={"action_mask": MultiBinary(3)}),
            "the space of 'action_mask' was nothing, and is MultiBinary(3)",
        ),
        (
            replace(PENDULUM, groups={"red": PENDULUM.single_agent, "blue": PENDULUM.single_agent}),
            "who plays was agent, and is red, blue",
        ),
        (
            replace(PENDULUM, groups={"agent": replace(PENDULUM.single_agent, agents=("a", "b"))}),
            "the list of agents inside was empty, and is a, b",
        ),
    ],
)
def test_differences_in_words(now, said):
    assert mismatch(PENDULUM, now) == said


def test_differences_that_the_words_hide():
    low = np.linspace(-1, 0, 2000, dtype=np.float32)
    other = low.copy()
    other[1000] = 0.5
    a, b = (single_agent(Box(bound, np.ones(2000, np.float32)), Discrete(2), None) for bound in (low, other))
    text = mismatch(a, b)
    assert text is not None
    assert text.endswith("and is another that prints the same")
    assert "\n" not in text
