"""What an environment may not say: one error each, with the environment, its episode's seed and the step."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlplug.envs import EnvList, NativeVector, Subprocess
from rlplug.envs.checking import Bounds, MisfitError, reader
from rlplug.envs.spaces import inside_obs
from rlplug.types import RunError
from tests.envs.walking import Everything, Faulty

ZERO = np.zeros(2, np.float32)


def say_obs(env, first, second=5):
    return (first, second), env.fine()[1]


def say_mask(env, *parts):
    return env.fine()[0], {"action_mask": parts}


def obs(*parts):
    return partial(_swapped, say_obs, parts)


def mask(*parts):
    return partial(_swapped, say_mask, parts)


def _swapped(function, parts, env):
    return function(env, *parts)


def fall(env):
    raise ZeroDivisionError("the pole is gone")


def leave(env):
    raise SystemExit(3)


FAULTS = {
    "shape": (obs(np.zeros(3, np.float32)), r"observation\[0\] has shape \[3\]; its space declares \[2\]"),
    "scalar": (obs(0.0), r"observation\[0\] has shape \[\]; its space declares \[2\]"),
    "ragged": (obs([[1.0], [1.0, 2.0]]), r"observation\[0\] is not an array"),
    "type": (obs(np.array(["a", "b"])), r"observation\[0\] is of type <U1; its space declares float32"),
    "float index": (obs(ZERO, 5.5), r"observation\[1\] is of type float64; its space declares int64"),
    "index too large": (obs(ZERO, 8), r"observation\[1\] is 8; its space is Discrete\(3, start=5\)"),
    "index too small": (obs(ZERO, 4), r"observation\[1\] is 4; its space is Discrete\(3, start=5\)"),
    "parts": (lambda env: ((ZERO,), {}), "observation is 1 parts; its space is a Tuple of 2"),
    "no tuple": (lambda env: (ZERO[0], {}), "observation is of type float32; its space is a Tuple of 2"),
    "raises": (fall, r"Traceback.*in fall\n.*ZeroDivisionError: the pole is gone"),
    "leaves": (leave, r"Traceback.*in leave\n.*SystemExit: 3"),
    "nothing allowed": (mask([1, 0], [0, 0, 0]), "action_mask forbids every action"),
    "mask too long": (mask(np.ones(2), np.ones(4)), "action_mask has 6 elements of type float64; .* need 5"),
    "float mask": (mask(np.ones(2), np.ones(3)), "action_mask has 5 elements of type float64; .* need 5 of type bool"),
    "no mask": (lambda env: (env.fine()[0], {}), "info lacks 'action_mask'"),
}


def play(env, seeds):
    env.reset(seeds)
    for _ in range(5):
        env.step(np.zeros((len(seeds), 2), np.int64))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at_reset", [False, True])
def test_one_error_that_names_environment_seed_and_step(fault, at_reset):
    says, message = FAULTS[fault]
    envs = [Faulty(Faulty.fine), Faulty(says, at_reset)]
    env = EnvList(envs, mask_key="action_mask", env_ids=[4, 7])
    seed = int(np.random.SeedSequence([11, 0]).generate_state(1)[0])
    step, where = (0, "reset") if at_reset else (3, "step")
    verb = rf" raised in {where}\(\):\n" if fault in ("raises", "leaves") else ": "
    with pytest.raises(RunError, match=rf"(?s)^environment 7 \(episode 0, seed {seed}, step {step}\){verb}.*{message}"):
        play(env, [10, 11])
    assert envs[0].steps == step  # nobody went on


@pytest.mark.parametrize(("fault", "at_reset"), [("raises", True), ("leaves", False), ("shape", True)])
def test_the_same_in_a_worker(fault, at_reset):
    says, message = FAULTS[fault]
    env = Subprocess(partial(Late, says, at_reset), [4, 7, 9], workers=2, mask_key="action_mask")
    step = 0 if at_reset else 3
    with pytest.raises(RunError, match=rf"(?s)^environment 4 \(episode 0, seed \d+, step {step}.*{message}"):
        play(env, [10, 11, 12])
    env.close()


class Late(Faulty):
    """Sound at the first reset, which shows whether there are masks."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed) if self.resets or not self.at_reset else self.sound(seed)
        self.resets += 1
        return result

    def sound(self, seed):
        gymnasium.Env.reset(self, seed=seed)
        return self.fine()


@pytest.mark.parametrize(
    "fault", [name for name in FAULTS if name not in ("shape", "scalar", "ragged", "parts", "float index")]
)
def test_the_same_in_a_vector(fault):
    """Gymnasium's own vector already refuses another shape, with an error of its own, and truncates a float index."""
    says, message = FAULTS[fault]
    if fault in ("type", "no tuple"):
        message = "raised in step"  # by SyncVectorEnv, which converts
    if fault.startswith("index"):
        message = r"observation\[1\] is \[5, [48]\]; its space is Discrete\(3, start=5\)"
    vector = SyncVectorEnv([lambda: Faulty(Faulty.fine), lambda: Faulty(says)])
    env = NativeVector(vector, mask_key="action_mask", env_ids=[4, 7])
    with pytest.raises(RunError, match=rf"(?s)^environments? .*\(a vector with seeds 10, 11, step [23]\).*{message}"):
        play(env, [10, 11])


def test_a_vector_that_raises_in_reset():
    env = NativeVector(SyncVectorEnv([lambda: Faulty(fall, at_reset=True)]), env_ids=[3])
    with pytest.raises(RunError, match=r"(?s)^environment 3 \(.*\) raised in reset\(\):.*ZeroDivisionError"):
        env.reset([0])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_nothing_may_be_allowed_behind_the_end(mode):
    """A terminated episode's last mask matters to nobody: it reads as all allowed."""

    class Ending(Faulty):
        def step(self, action):
            obs, _ = self.fine()
            return obs, 0.0, True, False, {"action_mask": (np.zeros(2, np.int8), np.zeros(3, np.int8))}

    native = NativeVector(SyncVectorEnv([lambda: Ending(fall)], autoreset_mode=mode), mask_key="action_mask")
    for env in (native, EnvList([Ending(fall)], mask_key="action_mask")):
        env.reset([0])
        row = env.step(np.zeros((1, 2), np.int64))
        assert row["terminated"].all()
        assert row["final_action_mask" if "final_action_mask" in row else "action_mask"].tolist() == [[True] * 5]


def test_a_dict_that_lacks_a_key():
    read = reader(Dict(a=Discrete(2), b=Dict(c=Discrete(2))))
    assert read({"a": 1, "b": {"c": 0}, "more": None}) == {"a": 1, "b": {"c": 0}}
    with pytest.raises(MisfitError, match=r"observation\['b'\] is a dict with 'd'; its space has the keys 'c'"):
        read({"a": 1, "b": {"d": 0}})
    with pytest.raises(MisfitError, match="observation is of type int; its space has the keys 'a', 'b'"):
        read(3)


def test_numbers_that_fit_are_converted_and_others_are_not_wrapped():
    read = reader(Box(0, 255, (2,), np.uint8))
    assert read(np.array([0, 255])).dtype == np.uint8
    for low, high in ((0, 256), (-1, 3)):
        with pytest.raises(MisfitError, match=f"holds {low} to {high}; its space declares uint8"):
            read(np.array([low, high]))
    assert reader(Box(-1, 1, (2,)))([1, 0]).dtype == np.float32


def test_bounds():
    space = inside_obs(Everything.observation_space["seen"])
    bounds = Bounds(Dict({**space.spaces, "v": Box(np.array([-1, -np.inf], np.float32), np.array([1, 2], np.float32))}))
    good = {
        "0": np.full((3, 2, 4, 5, 3), 255, np.uint8),
        "1": {"turn": np.full((3, 2), 2)},
        "v": np.tile(np.array([-1.000001, -1e30], np.float32), (3, 2, 1)),
    }
    assert bounds.find(good) is None
    good["v"][2, 1, 0] = np.nan  # which is found elsewhere
    assert bounds.find(good) is None
    good["v"][2, 0, 1] = 2.1
    t, b, what = bounds.find(good)
    assert (t, b) == (2, 0)
    assert what.startswith("observation['v'] holds 2.1 ")
    assert what.endswith(" at [1], beyond the bounds of its space, -inf to 2.0")
    good["1"]["turn"][1, 1] = 3
    t, b, what = bounds.find(good)
    assert (t, b) == (1, 1)
    assert "observation['1']['turn'] is 3, outside of its space, Discrete(3)" in what
    good["v"][0, 1, 0] = 2
    assert bounds.find(good)[:2] == (0, 1)
    assert Bounds(Box(-np.inf, np.inf, (2,))).find(np.full((1, 1, 2), np.inf, np.float32)) is None
    assert Bounds(Box(0, 10, (1,), np.uint8)).find(np.full((1, 1, 1), 11, np.uint8)) is not None
