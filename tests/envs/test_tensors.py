"""``env=tensors``: simulators that exchange tensors, in both modes of automatic resets; and what is refused."""

from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.config import compose
from rlplug.envs.spaces import execute, inside_action
from rlplug.plugins.env.tensors import executed
from rlplug.run.build import build
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from rlplug.testing.simulators import Points
from rlplug.testing.worlds import NESTED
from rlplug.types import ConfigError, RunError
from tests.envs import test_on_device as on_device
from tests.envs.test_nested_actions import leaves

POINTS = "rlplug.testing.simulators:Points"
HERE = f"{__name__}:"


def make(entry_point=POINTS, n=3, **kwargs):
    return on_device.make("tensors", n, entry_point=entry_point, kwargs=kwargs)


def by_hand(seed, actions, limit):
    """The rows of one point, stepped alone by plain Python: place, reward, terminated, truncated."""
    sim, rows = Points(1, torch.device("cpu"), "Disabled", limit), []
    place, steps, over = sim.reset(seed=[seed])[0].item(), 0, False
    for action in actions:
        if over:
            place, steps, over = sim.reset(options={"reset_mask": torch.tensor([True])})[0].item(), 0, False
            rows.append((place, 0.0, False, False))
            continue
        place, steps = place + min(max(0.125 + 0.375 * action, -0.25), 0.5), steps + 1
        there, late = place >= 1, steps >= limit
        over = there or late
        rows.append((place, float(there) - 0.1, there, late and not there))
    return rows


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_rows_are_those_of_single_episodes(mode):
    env, rng = make(autoreset=mode, max_episode_steps=9), np.random.default_rng(0)
    actions = rng.uniform(-1.2, 1.2, (80, 3)).astype(np.float32)
    env.reset([4, 5, 6])
    rows = [env.step(torch.from_numpy(action)[:, None]) for action in actions]
    ends = 0
    for i in range(3):
        for row, (place, reward, terminated, truncated) in zip(rows, by_hand(4 + i, actions[:, i], 9), strict=True):
            assert row["obs"][i].item() == pytest.approx(place, abs=1e-6)
            assert row["reward"][i].item() == pytest.approx(reward)
            assert (row["terminated"][i], row["truncated"][i]) == (terminated, truncated)
            ends += 10 * terminated + truncated
    assert ends > 30
    assert ends % 10
    assert rows[0]["obs"].dtype == rows[0]["reward"].dtype == torch.float32
    assert env.spec.max_episode_steps == 9
    assert env.traits.independent
    assert env.traits.traceable == (mode == "NextStep")


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_a_resumed_run_is_the_undisturbed_one(mode):
    words = (f"env.entry_point={POINTS}", f"+env.kwargs.autoreset={mode}", "num_envs=4", "tuned=none")
    words += ("algo.sgd_minibatch_size=32", "rollout_fragment_length=16", "model.hidden=[8]")
    check_resumes(Case("ppo", "tensors", words), updates=3)


def test_without_a_state_new_episodes_begin():
    class Forgetful(Points):
        state = property()

    forgets = make()
    forgets.env = Forgetful(3, forgets.device)
    forgets.reset([1, 2, 3])
    assert forgets.state() is None
    env = make()
    env.reset([1, 2, 3])
    kept = tree.map(torch.clone, env.state())
    kept["env"]["place"] = kept["env"]["place"][:2]
    with pytest.raises(ValueError, match=r"env.env.place should be"):
        env.load(kept)


def test_a_policy_learns(tmp_path):
    """Returns near 0.6 need some seven steps at full speed; a policy at rest is truncated at -1.2."""
    line = ["algo=ppo", "env=tensors", f"env.entry_point={POINTS}", "num_envs=64", "rollout_fragment_length=16"]
    line += ["algo.sgd_minibatch_size=256", "algo.lr=0.005", "hardware=cpu", "logger.only=[]", "total_steps=40_000"]
    with closing(build(compose([*line, "seed=1"]), tmp_path)) as trainer:
        trainer.loop.run(trainer)
        batch = trainer.collector.player.collect(64, "greedy")
    finished = batch["terminated"].sum() + batch["truncated"].sum()
    assert batch["terminated"].sum() > 0.95 * finished
    assert batch["reward"].sum() / finished > 0.5


class Rich(Points):
    """Observations and actions of every kind."""

    single_observation_space = single_action_space = None

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.single_observation_space = Dict(
            {"seen": Tuple((Discrete(4, start=2), Box(0, 255, (2, 2), np.uint8))), "kind": MultiDiscrete([3, 2])}
        )
        self.single_action_space = MultiDiscrete([3, 2], start=[1, 0])

    def obs(self):
        n = self.num_envs
        seen = torch.full((n,), 5), torch.full((n, 2, 2), 7, dtype=torch.uint8)
        return {"seen": seen, "kind": torch.ones(n, 2, dtype=torch.int32)}

    def reset(self, *, seed=None, options=None):
        return self.obs(), {}

    def step(self, action):
        self.last, none = action, torch.zeros(self.num_envs)
        return self.obs(), none, none.bool(), none.bool(), {}


def test_spaces_are_those_of_other_environments():
    env = make(f"{HERE}Rich", 2)
    obs = env.reset([0, 1])["obs"]
    assert obs["seen"]["0"].tolist() == [3, 3]
    assert obs["seen"]["1"].dtype == torch.uint8
    assert obs["kind"].dtype == torch.int64
    env.step(torch.tensor([[0, 1], [2, 0]]))
    assert env.env.last.tolist() == [[1, 1], [3, 0]]


@pytest.mark.parametrize(
    "space",
    [
        Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32)),
        Box(np.array([-np.inf, -1.0], np.float32), np.array([0.5, np.inf], np.float32)),
        Box(-np.inf, np.inf, (2,), np.float32),
        Discrete(3, start=-1),
        Discrete(3),
    ],
    ids=str,
)
def test_actions_are_those_of_other_environments(space):
    rng = np.random.default_rng(0)
    action = rng.uniform(-1.3, 1.3, (50, 2)).astype(np.float32) if space.shape else rng.integers(0, 3, 50)
    found = executed(space, torch.device("cpu"))(torch.from_numpy(action)).numpy()
    np.testing.assert_allclose(found, execute(space)(action), rtol=1e-6)


@pytest.mark.parametrize("action", ["hybrid", "bounded"])
def test_hybrid_actions_are_those_of_other_environments(action):
    space = NESTED[action]
    inside = inside_action(space)
    inside.seed(1)
    given = np.stack([inside.sample() for _ in range(6)])
    given[:3, : inside.size] *= 1.3  # some are beyond their bounds
    found, expected = executed(space, torch.device("cpu"))(torch.from_numpy(given)), execute(space)(given)
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6)
        assert (x.shape, x.is_floating_point()) == (y.shape, y.dtype.kind == "f")


@pytest.mark.parametrize("action", ["dict", "tuple", "one"])
def test_parts_of_actions_are_those_of_other_environments(action):
    space, rng = NESTED[action], np.random.default_rng(0)
    size = 3 if action == "tuple" else 5
    given = rng.uniform(-1.3, 1.3, (6, size)).astype(np.float32) if action == "tuple" else rng.integers(0, 2, (6, size))
    given = given[:, 0] if action == "one" else given
    found, expected = executed(space, torch.device("cpu"))(torch.from_numpy(given)), execute(space)(given)
    assert type(found) is type(expected)
    for x, y in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6)
        assert x.shape == y.shape


# ---- what is refused -------------------------------------------------------------------------------------------------


def without_spaces(num_envs, device):
    return object()


def same_step(num_envs, device):
    return changed(Points(num_envs, device), metadata={"autoreset_mode": AutoresetMode.SAME_STEP})


def fails(num_envs, device):
    raise OSError("no simulator")


def changed(one, **members):
    for name, value in members.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("entry_point", "kwargs", "message"),
    [
        (f"{HERE}without_spaces", {}, "returned object without single_observation_space, single_action_space"),
        (f"{HERE}same_step", {}, r"AutoresetMode.SAME_STEP.*; should be AutoresetMode.NEXT_STEP, or DISABLED with"),
        (f"{HERE}fails", {}, "cannot be made: OSError: no simulator"),
        (POINTS, {"speed": 2}, "cannot be made: TypeError: .*'speed'"),
        (f"{HERE}nothing", {}, "has no 'nothing'"),
        ("points", {}, "is 'points'; write module:name"),
    ],
)
def test_what_is_no_simulator_is_refused(entry_point, kwargs, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make(entry_point, **kwargs)
    assert raised.value.key == "env.entry_point"


def test_it_cannot_render():
    with pytest.raises(ConfigError, match=r"eval.record: environments on a device cannot render"):
        build(compose(["algo=ppo", "env=tensors", f"env.entry_point={POINTS}", "eval.record=1", "hardware=cpu"]), None)


WRONG = {
    "obs": (torch.zeros(3, 2), "the observation is [3, 2] on cpu; expected a tensor [3, 1] on cpu"),
    "reward": (np.zeros(3), "the reward is ndarray; expected a tensor [3] on cpu"),
    "terminated": (torch.zeros(2), "the terminated is [2] on cpu; expected a tensor [3] on cpu"),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_row_of_another_shape_is_named(part):
    value, message = WRONG[part]
    env = make()
    env.reset([0, 1, 2])
    step = env.env.step

    def wrong(action):
        obs, reward, terminated, *others = step(action)
        given = {"obs": obs, "reward": reward, "terminated": terminated} | {part: value}
        return *given.values(), *others

    env.env.step = wrong
    with pytest.raises(RunError) as raised:
        env.step(torch.zeros(3, 1))
    assert str(raised.value) == f"env.entry_point: {message}"
