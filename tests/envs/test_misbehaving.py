"""Environments that break the rules of Gymnasium end in one line that names the rule, and never in a traceback."""

import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import TimeLimit

from rlplug.envs import EnvList, NativeVector, env_list, seeded
from rlplug.envs.checking import MisfitError
from rlplug.types import ConfigError, RunError
from tests.envs.making import gym

OBS = np.zeros(2, np.float32)


class Rude(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def __init__(self, **answers):
        if "init" in answers:
            sys.exit(answers["init"])
        self.answers = answers

    def reset(self, *, seed=None, options=None):
        return self.answers.get("reset", (OBS, {}))

    def step(self, action):
        own = {"reward": 0.0, "terminated": False, "truncated": False, "info": {}}
        return OBS, *((own | self.answers)[key] for key in own)

    def close(self):
        if "close" in self.answers:
            raise ValueError(self.answers["close"])


class RudeVector(VectorEnv):
    """Two of them."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs, spec = 2, None
    single_observation_space, single_action_space = Rude.observation_space, Rude.action_space
    observation_space, action_space = Box(-1, 1, (2, 2)), gymnasium.spaces.MultiDiscrete([2, 2])
    two = {"reward": np.zeros(2), "terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool), "info": {}}  # noqa: RUF012

    def __init__(self, **answers):
        self.answers = answers

    def reset(self, *, seed=None, options=None):
        return self.answers.get("reset", (np.zeros((2, 2), np.float32), {}))

    def step(self, actions):
        said = self.two | self.answers
        return np.zeros((2, 2), np.float32), *(said[key] for key in self.two)

    def close(self, **kwargs):
        Rude.close(self)


gymnasium.register("Rude-v0", Rude)
SINGLE = {
    "reward": ("much", "reward is 'much'; it should be a number"),
    "terminated": ("yes", "terminated is 'yes'; it should be a bool"),
    "truncated": (0.5, "truncated is 0.5; it should be a bool"),
    "info": (None, "the info that step() returns is of type NoneType; it should be a dict"),
    "reset": (OBS, "reset() returns one value "),
}
MANY = {
    "reward": (["much", 1.0], "reward is an array of "),
    "terminated": (np.zeros(3, bool), "terminated has shape [3]; it should be a bool for each of 2 environments"),
    "truncated": (np.full(2, 0.5), "truncated is an array of float64; it should be a bool for each of 2 environments"),
    "info": ([], "the info that step() returns is "),
    "reset": (np.zeros((2, 2), np.float32), "reset() returns one value "),
}


def play(envs):
    envs.reset([1, 2])
    envs.step(np.zeros(2, np.int64))


SAID = [
    *((lambda given: EnvList([Rude(**given) for _ in range(2)]), what, *answer) for what, answer in SINGLE.items()),
    *((lambda given: NativeVector(RudeVector(**given)), what, *answer) for what, answer in MANY.items()),
]


@pytest.mark.parametrize(("made", "what", "given", "said"), SAID)
def test_what_is_wrong_is_said(made, what, given, said):
    with pytest.raises(RunError) as error:
        play(made({what: given}))
    assert said in str(error.value).splitlines()[-1]


class Step(Rude):
    """Returns what it is told, as many values as there are."""

    def step(self, action):
        return self.answers["step"]


class Seedless(Rude):
    def reset(self):
        return OBS, {}


class Optionless(Rude):
    def reset(self, *, seed=None):
        return OBS, {}


class Clumsy(Rude):
    def step(self, action):
        first, second = OBS, 0.0, False
        return first, second


STEPS = "write Gymnasium's (observation, reward, terminated, truncated, info) = step(action)"
RESETS = "write Gymnasium's (observation, info) = reset(seed=None, options=None)"
OLD = ", and the environment looks like Gym before 0.26"
BROKEN = {
    "four values": (lambda: Step(step=(OBS, 0.0, False, {})), f"step() returns 4 values; {STEPS}{OLD}"),
    "three values": (lambda: Step(step=(OBS, 0.0, False)), f"step() returns 3 values; {STEPS}"),
    "six values": (lambda: Step(step=(OBS, 0.0, False, False, {}, 1)), f"step() returns too many values; {STEPS}"),
    "nothing": (lambda: Step(step=None), f"step() returns a different type; {STEPS}"),
    "no seed": (Seedless, f"reset() takes no 'seed'; {RESETS}{OLD}"),
    "the observation alone": (lambda: Rude(reset=OBS), f"reset() returns one value of type ndarray; {RESETS}"),
}


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 9)], ids=["bare", "wrapped"])
@pytest.mark.parametrize("what", BROKEN)
def test_another_interface_is_named(what, wrap):
    make_one, said = BROKEN[what]
    with pytest.raises(RunError) as error:
        play(EnvList([wrap(make_one()) for _ in range(2)]))
    assert str(error.value).endswith(f"): {said}")


def test_a_vector_with_another_interface_is_named():
    class Four(RudeVector):
        def step(self, actions):
            return super().step(actions)[1:]

    with pytest.raises(RunError, match=r"\): step\(\) returns 4 values; write Gymnasium's"):
        play(NativeVector(Four()))


def test_a_reset_without_options_is_named():
    with pytest.raises(RunError) as error:
        play(EnvList([TimeLimit(Optionless(), 9), Rude()]))
    assert str(error.value).endswith(f"): reset() takes no 'options'; {RESETS}{OLD}")


def test_what_an_environment_takes_apart_itself_is_its_own_mistake():
    with pytest.raises(RunError, match=r"(?s)raised in step\(\):\nTraceback .*first, second = OBS, 0.0, False"):
        play(EnvList([TimeLimit(Clumsy(), 9), Rude()]))


def test_numbers_and_flags_of_any_type_are_taken():
    envs = EnvList([Rude(reward=reward, terminated=end) for reward, end in ((np.array([1.5])[0], 1), (2, np.False_))])
    envs.reset([1, 2])
    said = envs.step(np.zeros(2, np.int64))
    assert said["reward"].tolist() == [1.5, 2.0]
    assert said["terminated"].tolist() == [True, False]


def test_a_number_is_one():
    assert env_list.number(np.array(3)) == 3.0
    with pytest.raises(MisfitError, match=r"reward has shape \[1\]; it should be a number"):
        env_list.number(np.array([3.0]))


@pytest.mark.parametrize("kind", ["list", "native", "subprocess"])
def test_a_close_that_raises_is_told_and_keeps_nobody(kind, capfd):
    seeded.tell_once.cache_clear()
    broken, workers = {"close": "no"}, {"vectorization": "subprocess", "workers": 1}
    envs = {
        "list": lambda: EnvList([Rude(**broken) for _ in range(2)]),
        "native": lambda: NativeVector(RudeVector(**broken)),
        "subprocess": lambda: gym("tests.envs.test_misbehaving:Rude-v0", kwargs=broken, **workers),
    }[kind]()
    envs.reset([1, 2])
    envs.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("rlplug: an environment raised in close()")


def test_an_environment_that_exits_when_it_is_made():
    with pytest.raises(ConfigError, match=r"^env.id: Rude-v0 cannot be made: SystemExit: 3$"):
        gym("tests.envs.test_misbehaving:Rude-v0", kwargs={"init": 3}, vectorization="list")


class Weary(Rude):
    """Fails at every second step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps % 2 == 0:
            raise ValueError("tired")
        return super().step(action)


def test_an_environment_that_fails_again_and_again_ends_the_run(monkeypatch, capsys):
    monkeypatch.setattr(seeded, "MOST_RETRIES", 5)
    envs = EnvList([Weary(), Rude()], remake=Weary)
    envs.reset([1, 2])
    for _ in range(11):  # one that is made, one that fails, and again
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(RunError, match=r"(?s)ValueError: tired\n.* was replaced 5 times already$"):
        envs.step(np.zeros(2, np.int64))
