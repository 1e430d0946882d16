"""Simulators: what the kit finds, environments that are copied or set to a state, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from rlplug import testing
from rlplug.config import compose
from rlplug.context import RunContext
from rlplug.envs import simulated
from rlplug.envs.on_device import DeviceSimulator
from rlplug.envs.simulation import Copier, Stepper
from rlplug.plugins.env.classic_torch import CartPole
from rlplug.run.build import build
from rlplug.testing.checks import envs
from rlplug.testing.checks.simulators import check_simulator
from rlplug.testing.configs import config
from rlplug.types import ConfigError, EnvSpec


def played(env, steps: int):
    return list(envs.walk(env, 11, steps))


@pytest.fixture(scope="module")
def cartpole():
    env = envs.make("cartpole_torch")
    return env, played(env, 60)


def test_the_kit_takes_a_simulator_that_steps_as_the_environment(cartpole):
    env, rows = cartpole
    check_simulator(env, DeviceSimulator(env), rows)


def step(change):
    """Return a ``step`` whose row is another one; ``change`` is of the simulator, the row and what was given."""

    def changed(self, env_state, action):
        row = DeviceSimulator.step(self, env_state, action)
        return {key: leaf for key, leaf in (row | change(row, env_state, action)).items() if leaf is not None}

    return {"step": changed}


def of(name, function):
    def changed(self, batch):
        return function(getattr(DeviceSimulator, name)(self, batch), batch)

    return {name: changed}


def cleared(found, batch):
    batch["action"].zero_()
    return found


def overwritten(row, state, action):
    state.copy_(row["env_state"])
    return {}


def moves_on(self, env_state, action):
    """Play on from a state that has ended."""
    return DeviceSimulator.step(
        self, torch.cat((env_state[..., :-1], torch.zeros_like(env_state[..., :1])), -1), action
    )


SAYS = "differs from a step of the environment: it gives "
WRONG = {
    "backwards": ({"step": lambda self, state, action: DeviceSimulator.step(self, state, 1 - action)}, f"{SAYS}obs "),
    "late": (
        step(lambda row, *_: {"terminated": torch.zeros_like(row["terminated"])}),
        "simulator().terminated() differs",
    ),
    "generous": (of("reward", lambda paid, _: paid + 1), "simulator().reward() differs from the reward of step()"),
    "endless": (
        of("terminated", lambda over, _: over & False),
        "simulator().terminated() differs from the terminated of",
    ),
    "wide": (of("reward", lambda paid, _: paid.unsqueeze(-1)), "simulator().reward() gives shape ["),
    "clearing": (of("reward", cleared), "simulator().reward() changes its argument"),
    "overwriting": (step(overwritten), "changes its argument"),
    "noisy": (step(lambda row, *_: {"reward": row["reward"] + torch.rand(())}), "gives different results in two calls"),
    "mixing": (
        step(lambda row, state, action: {"obs": row["obs"] + (0.01 if len(action) == 1 else 0)}),
        "for a single column gives obs ",
    ),
    "short": (step(lambda *_: {"env_state": None}), "gives no env_state"),
    "truncating": (
        step(lambda row, *_: {"truncated": row["terminated"]}),
        "truncates where the environment does not",
    ),
    "walking": ({"step": moves_on}, "from an ended state, which stays, gives"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_kit_finds_a_simulator_that_does_not(case, cartpole):
    members, said = WRONG[case]
    env, rows = cartpole
    with pytest.raises(AssertionError) as error:
        check_simulator(env, type("Wrong", (DeviceSimulator,), members)(env), rows)
    assert said in str(error.value)


def test_a_simulator_needs_the_state_in_the_rows(cartpole):
    env, rows = cartpole
    bare = CartPole(config("env/cartpole_torch"), RunContext(spec=EnvSpec({})))
    bare.spec = EnvSpec(bare.spec.groups)
    with pytest.raises(AssertionError, match="has its state as the extra 'env_state'"):
        check_simulator(bare, DeviceSimulator(env), rows)


@pytest.mark.parametrize("option", ["frozenlake", "pendulum", "masked_cartpole"])
def test_a_copied_environment_is_a_simulator(option):
    env = envs.make("gymnasium", option, simulator="copy", max_episode_steps=20)
    rows = played(env, 45)
    model = env.traits.simulator()
    env.close()
    assert isinstance(model, Copier)
    check_simulator(env, model, rows)
    check_simulator(env, pickle.loads(pickle.dumps(model)), rows)  # brought back by its seed and actions


@pytest.mark.parametrize("option", ["hopper", "lunarlander"])
def test_a_copy_that_is_a_new_environment_is_refused(option):
    said = "env.simulator: is copy, but a copy of .* does not continue where it was.*rlplug.envs.simulated"
    with pytest.raises(ConfigError, match=said):
        envs.make("gymnasium", option, simulator="copy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vectorization": "subprocess"}, "needs env.vectorization=list"),
        ({"backend": "envpool"}, "copies single environments"),
        ({"id": "CliffWalking-v1"}, "set env.max_episode_steps"),
    ],
)
def test_copies_are_refused_where_they_cannot_be(changes, said):
    with pytest.raises(ConfigError, match=said):
        envs.make("gymnasium", "cartpole", simulator="copy", **changes)


def hopper():
    return gymnasium.make("Hopper-v5", max_episode_steps=15)


def saved(env):
    data = env.unwrapped.data
    return np.concatenate((data.qpos, data.qvel, data.qacc_warmstart))


def loaded(env, state):
    bare = env.unwrapped
    nq, nv = bare.model.nq, bare.model.nv
    bare.set_state(state[:nq], state[nq : nq + nv])
    bare.data.qacc_warmstart[:] = state[nq + nv :]
    return bare._get_obs()


def test_an_environment_that_is_set_to_its_state_is_a_simulator():
    env = simulated(hopper, saved, loaded, envs.COLUMNS, max_episode_steps=15)
    rows = played(env, 40)
    model = env.traits.simulator()
    assert isinstance(model, Stepper)
    check_simulator(env, model, rows)


@pytest.mark.parametrize("env", ["cartpole", "kuhn"])
def test_an_environment_without_a_simulator_is_refused(env):
    with pytest.raises(ConfigError, match=r"has no simulator.*env.simulator=copy or rlplug.envs.simulated"):
        build(compose(["algo=alphazero", f"env={env}", "hardware=cpu"]), Path())


def test_the_context_of_a_test_offers_the_simulator_of_its_environment():
    ctx = testing.context(overrides=["env=knapsack"])
    row = ctx.simulator().step(
        torch.tensor([[60.0, 100, 120, 10, 20, 30, 0, 0, 0, 50, 0, 0]]).double(), torch.tensor([2])
    )
    assert row["reward"].tolist() == [120.0]
    assert row["action_mask"].tolist() == [[True, True, False]]
