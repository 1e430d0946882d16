"""A state that no environment had is refused when it is loaded, not steps later."""

from contextlib import closing

import numpy as np
import pytest
import torch

from rlplug import tree
from rlplug.config import choose, default_node
from rlplug.context import EnvShard, RunContext
from rlplug.types import EnvSpec

OPTIONS = (
    *("acrobot_torch", "mountaincar_continuous_torch"),
    *("cartpole_torch", "chase", "climbing", "connect_four", "interest_evolution", "knapsack", "kuhn"),
    *(
        "linear_bandit",
        "pendulum_torch",
        "penalty",
        "point_goals",
        "rock_paper_scissors",
        "spread_torch",
        "tictactoe",
        "tsp",
        "two_step",
    ),
)
COUNTED = {
    "interest_evolution": ("seeds", "sessions", "steps", "user", "click"),
    "linear_bandit": ("seeds", "number", "length"),
    "point_goals": ("seeds", "count", "episode"),
}


def build(option):
    """Return two columns of an environment."""
    context = RunContext(spec=EnvSpec({}), total_steps=0).derive(shard=EnvShard("actor", 2, range(2)))
    return choose("env", "env", default_node("env", option, {})).build(context)


def paths(state):
    """Return the keys to every leaf."""
    for key, value in state.items():
        yield from ((key, *path) for path in paths(value)) if isinstance(value, dict) else ((key,),)


def changed(state, path, value):
    key, *rest = path
    return state | {key: changed(state[key], rest, value) if rest else value}


def leaf(state, path):
    return leaf(state[path[0]], path[1:]) if path else state


@pytest.mark.parametrize("option", OPTIONS)
def test_leaves_of_other_types_and_shapes_are_refused(option):
    with closing(build(option)) as env:
        env.reset([1, 2])
        state = tree.map(lambda x: x, env.state())
        for path in paths(state):
            own = leaf(state, path)
            for wrong in (None, "x", np.zeros(1, np.complex64), own[:1] if np.ndim(own) else [own]):
                with pytest.raises(ValueError, match=path[-1]):
                    env.load(changed(state, path, wrong))
        with pytest.raises(ValueError, match="has others"):
            env.load({"other": 1})
        env.load(state)


@pytest.mark.parametrize(("option", "name"), [(option, name) for option in COUNTED for name in COUNTED[option]])
def test_negative_seeds_and_counters_are_refused(option, name):
    with closing(build(option)) as env:
        env.reset([1, 2])
        own = env.state()[name]
        for wrong in ([-1, 2] if isinstance(own, list) else own * 0 - 2,):
            with pytest.raises(ValueError, match=f"env.{name} is negative"):
                env.load(env.state() | {name: wrong})


@pytest.mark.parametrize("name", ["user", "click"])
def test_levels_and_clicks_beyond_the_spaces_are_refused(name):
    with closing(build("interest_evolution")) as env:
        env.reset([1, 2])
        with pytest.raises(ValueError, match=f"env.{name} is above"):
            env.load(env.state() | {name: env.state()[name] * 0 + 99})


@pytest.mark.parametrize("option", ["interest_evolution", "point_goals"])
def test_tensors_in_the_place_of_arrays_are_refused(option):
    with closing(build(option)) as env:
        env.reset([1, 2])
        state = tree.map(lambda x: x, env.state())
        arrays = [path for path in paths(state) if isinstance(leaf(state, path), np.ndarray)]
        for path in arrays:
            with pytest.raises(ValueError, match="env holds tensors where it should hold arrays"):
                env.load(changed(state, path, torch.as_tensor(leaf(state, path))))
