"""Environments on a device: Gymnasium's dynamics, and rows that never pass through the host."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from rlplug import tree
from rlplug.api import EnvTraits, Needs, VecEnv
from rlplug.collection.stepping import make_shard
from rlplug.config import choose, compose, default_node
from rlplug.context import EnvShard, RunContext
from rlplug.run.build import build
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from rlplug.types import ConfigError, EnvSpec

NAMES = ("acrobot_torch", "cartpole_torch", "mountaincar_continuous_torch", "pendulum_torch")


def make(name, n, **changes):
    ctx = RunContext(spec=EnvSpec({})).derive(shard=EnvShard("learner", n, range(n)))
    return choose("env", "env", default_node("env", name, changes)).build(ctx)


class OnHost(VecEnv):
    """The same environments, which trade arrays."""

    autoreset, traits = AutoresetMode.NEXT_STEP, EnvTraits(check_bounds=False)

    def __init__(self, env):
        self.env, self.spec = env, env.spec

    def reset(self, seeds, tasks=None):
        return tree.map(torch.Tensor.numpy, self.env.reset(seeds, tasks))

    def step(self, action):
        return tree.map(torch.Tensor.numpy, self.env.step(torch.from_numpy(action)))

    def state(self):
        return self.env.state()

    def load(self, state):
        self.env.load(state)


# ---- dynamics --------------------------------------------------------------------------------------------------------


def balanced(obs, rng):
    """Push the cart under the pole, in some columns: episodes that end, and others that are truncated."""
    steady = np.arange(len(obs)) % 2 == 0
    return np.where(steady, obs[:, 2] + 0.3 * obs[:, 3] > 0, rng.random(len(obs)) < 0.5).astype(np.int64)


def torque(obs, rng):
    """Beyond the bounds, too; half of the columns swing up to the highest speed."""
    pump = np.sign(obs[:, 2]) * 1.5
    return np.where(np.arange(len(obs)) % 2 == 0, pump, rng.uniform(-1.5, 1.5, len(obs)))[:, None].astype(np.float32)


def swung(obs, rng):
    """Push the second link along with its motion, in some columns: they swing up. Others push at random."""
    along = np.sign(obs[:, 5]) + 1
    return np.where(np.arange(len(obs)) % 2 == 0, along, rng.integers(0, 3, len(obs))).astype(np.int64)


def rocked(obs, rng):
    """Push along with the motion, in some columns: they reach the goal. Others push at random, to the left end."""
    along = np.where(obs[:, 1] >= 0, 1.0, -1.0)
    return np.where(np.arange(len(obs)) % 2 == 0, along, rng.uniform(-1, 0.4, len(obs)))[:, None].astype(np.float32)


@pytest.mark.parametrize(
    ("name", "env_id", "policy", "scale"),
    [
        ("acrobot_torch", "Acrobot-v1", swung, 1),
        ("cartpole_torch", "CartPole-v1", balanced, 1),
        ("mountaincar_continuous_torch", "MountainCarContinuous-v0", rocked, np.float32(1)),
        ("pendulum_torch", "Pendulum-v1", torque, np.float32(2)),
    ],
)
def test_it_does_what_gymnasium_does(name, env_id, policy, scale):
    n, rng, over, ends = 4, np.random.default_rng(0), np.ones(4, np.bool_), {"terminated": 0, "truncated": 0}
    env, theirs = make(name, n), [gymnasium.make(env_id) for _ in range(n)]
    obs = env.reset(range(n))["obs"].numpy()
    for t in range(1100 if name.startswith("mountaincar") else 520):
        if t:
            action = policy(obs, rng)
            row = {key: leaf.numpy() for key, leaf in env.step(torch.from_numpy(action)).items()}
            obs = row["obs"]
            assert not row["reward"][over].any()
            assert not (row["terminated"] | row["truncated"])[over].any()
        states, began, over = env.state()["state"].numpy(), over, np.zeros(n, np.bool_)
        for i, one in enumerate(theirs):
            if began[i]:  # its action is ignored, and its first state is its own
                wanted, _ = one.reset()
                low, high = STARTS[name]
                assert (low <= states[:, i]).all()
                assert (states[:, i] <= high).all()
                one.unwrapped.state = states[:, i].copy()
                continue
            wanted, reward, terminated, truncated, _ = one.step((action * scale)[i])
            single = name.startswith("mountaincar")  # Gymnasium keeps its state in single precision
            close = {"rtol": 1e-7, "atol": 1e-8} if single else {"rtol": 1e-12, "atol": 1e-12}
            np.testing.assert_allclose(states[:, i], one.unwrapped.state, **close)
            one.unwrapped.state = states[:, i].copy()  # a pole on its tip makes more of a rounding with every step
            np.testing.assert_allclose(obs[i], wanted, rtol=2e-7, atol=1e-7)
            np.testing.assert_allclose(row["reward"][i], reward, rtol=1e-6)
            assert (row["terminated"][i], row["truncated"][i]) == (terminated, truncated)
            over[i] = terminated or truncated
            ends["terminated"] += int(terminated)
            ends["truncated"] += int(truncated)
    assert ends["truncated"] >= 2
    assert ends["terminated"] >= 6 or name == "pendulum_torch"


STARTS = {  # lowest and highest initial states
    "acrobot_torch": (np.full(4, -0.1), np.full(4, 0.1)),
    "cartpole_torch": (np.full(4, -0.05), np.full(4, 0.05)),
    "mountaincar_continuous_torch": (np.array([-0.6, 0.0]), np.array([-0.4, 0.0])),
    "pendulum_torch": (np.array([-np.pi, -1.0]), np.array([np.pi, 1.0])),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_episode_has_a_start_of_its_own_whatever_other_columns_there_are(name):
    """Starts are uniform, and those of a column follow from its seed alone."""
    limit, n = {"max_episode_steps": 1}, 500
    env, alone = make(name, n, **limit), make(name, 1, **limit)
    action = torch.from_numpy(np.zeros((n, *env.spec.single_agent.action.shape), env.spec.single_agent.action.dtype))
    env.reset(range(n))
    alone.reset([7])
    starts = [env.state()["state"]]
    for _ in range(9):
        for _ in range(2):  # the only step of an episode, and the one that begins another
            env.step(action)
            alone.step(action[:1])
        starts.append(env.state()["state"])
        assert torch.equal(starts[-1][:, 7:8], alone.state()["state"])
    every = torch.stack(starts, 1).flatten(1)  # [S, 10 episodes x 500 columns]
    low, high = (torch.from_numpy(x)[:, None] for x in STARTS[name])
    drawn = (low < high).squeeze(1)
    assert torch.equal(every[~drawn], low[~drawn].expand(-1, 5000))
    assert all(len(x.unique()) == 5000 for x in every[drawn])
    scaled = ((every - low) / (high - low))[drawn]
    assert (scaled.mean(1) - 0.5).abs().max() < 0.02
    assert (scaled.var(1) - 1 / 12).abs().max() < 0.004
    assert (torch.corrcoef(torch.cat([scaled, scaled.roll(1, 1)])) - torch.eye(2 * len(scaled))).abs().max() < 0.06


def test_seeds_are_checked():
    env = make("cartpole_torch", 2)
    with pytest.raises(ValueError, match="3 seeds for 2 environments"):
        env.reset([0, 1, 2])
    big = [env.reset(seeds)["obs"] for seeds in ([2**64 - 1, 2**40], [-1, 2**40])]
    assert torch.equal(*big)


@pytest.mark.parametrize("name", NAMES)
def test_it_stays_on_an_accelerator(name):
    """A tensor without memory that claims to be on one: a mix of devices, and a look at a number, raise."""
    cuda, n = torch.device("cuda", 0), 4
    with FakeTensorMode():
        ctx = RunContext(spec=EnvSpec({})).derive(shard=EnvShard("learner", n, range(n)), device=cuda)
        env = choose("env", "env", default_node("env", name, {})).build(ctx)
        rows, space = [env.reset(range(n))], env.spec.single_agent.action
        dtype = torch.float32 if space.shape else torch.int64
        rows += [env.step(torch.zeros(n, *space.shape, dtype=dtype, device=cuda)) for _ in range(2)]
        for row in rows:
            assert {leaf.device for leaf in row.values()} == {cuda}
            assert row["obs"].shape == (n, *env.spec.single_agent.obs.shape)
            assert row["obs"].dtype == torch.float32


# ---- collection ------------------------------------------------------------------------------------------------------

RUN = (
    *("algo=ppo", "hardware=cpu", "logger.only=[]", "tuned=none"),
    *("rollout_fragment_length=40", "algo.sgd_minibatch_size=80"),
)


@pytest.fixture
def trainer(tmp_path):
    made = []

    def of(*words):
        made.append(build(compose([*RUN, *words]), tmp_path))
        return made[-1]

    yield of
    for one in made:
        one.close()


def with_value(step, out, carry):
    """What an algorithm returns, and a value: rows on which nobody acts are written, too."""
    return out | {"value": step["obs"].sum(-1)}, carry


@pytest.mark.parametrize("words", [("env=cartpole_torch",), ("env=pendulum_torch", "model=lstm")])
def test_its_rows_are_those_of_the_same_environments_on_the_host(trainer, words):
    """One collector writes arrays, the other tensors: equal rows, also from a state in the middle of an episode."""
    segments = []
    for host in (False, True):
        run = trainer(*words, "num_envs=4", "env.max_episode_steps=23")
        player = run.collector.player
        env = OnHost(player.env) if host else player.env
        shard = EnvShard("actor", 4, range(4))
        keys = (*run.ctx.needs.keys, "value", "prev_action", "prev_reward")
        run.ctx.needs = Needs(data="rollout", keys=keys)
        act = run.algorithm.act
        run.algorithm.act = lambda step, *args, act=act: with_value(step, *act(step, *args))
        made = make_shard(env, run.algorithm, run.ctx, shard, [5, 6, 7, 8], keys=keys)
        first = [tree.map(torch.clone, made.collect(30)) for _ in range(2)]
        state = made.state()
        rest = [tree.map(torch.clone, made.collect(n)) for n in (30, 1, 7)]
        segments.append([*first, *rest])
        assert all(isinstance(x, np.ndarray) == host for x in tree.leaves(state["open"]))
    for one, two in zip(*segments, strict=True):
        assert dict(tree.items(one)).keys() == dict(tree.items(two)).keys()
        for path, leaf in tree.items(one):
            assert torch.equal(leaf, dict(tree.items(two))[path]), path
    assert any(s["truncated"].any() for s in segments[0])


class Traffic(TorchFunctionMode):
    """Counts what brings a number to the host."""

    def __init__(self):
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("numpy", "item", "tolist", "cpu", "__bool__", "__array__", "__float__", "__int__", "nonzero"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_collecting_brings_nothing_to_the_host(trainer):
    """Rollouts of a network's actions: without a look, an accelerator runs on. The same on the host is seen."""
    for host in (False, True):
        run = trainer("env=cartpole_torch", "num_envs=4")
        env = OnHost(run.collector.player.env) if host else run.collector.player.env
        made = make_shard(env, run.algorithm, run.ctx, EnvShard("actor", 4, range(4)), [5, 6, 7, 8])
        made.collect(8)
        with Traffic() as traffic:
            made.collect(8)
        assert bool(traffic.found) == host, set(traffic.found)


@pytest.mark.parametrize(
    "words",
    [
        ("ppo", "cartpole_torch", "num_envs=4", "algo.sgd_minibatch_size=32", "rollout_fragment_length=16"),
        ("sac", "pendulum_torch", "num_envs=2", "preprocess.normalize_obs=true"),
        ("dqn", "cartpole_torch", "num_envs=3", "buffer=prioritized"),
    ],
    ids=lambda words: words[0],
)
def test_a_resumed_run_is_the_undisturbed_one(words):
    name, env, *others = words
    check_resumes(Case(name, env, (*others, "tuned=none", "model.hidden=[8]")), updates=3)


def test_a_state_serves_environments_that_were_made_anew():
    env, twin = (make("cartpole_torch", 3, max_episode_steps=12) for _ in range(2))
    env.reset([1, 2, 3])
    right = torch.ones(3, dtype=torch.int64)
    for _ in range(30):
        env.step(right)
    state = env.state()
    kept = tree.map(torch.clone, state)
    wanted = [env.step(right) for _ in range(30)]
    assert all(torch.equal(x, y) for x, y in zip(state.values(), kept.values(), strict=True))  # it is a copy
    twin.load(state)
    for row in wanted:
        other = twin.step(right)
        assert all(torch.equal(row[key], other[key]) for key in row)


# ---- what is refused -------------------------------------------------------------------------------------------------


REFUSED = {"env.vectorization": "subprocess", "env.frame_stack": 4, "env.atari": "true", "env.max_episode_steps": 0}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        *((f"{key}={value}", key) for key, value in REFUSED.items()),
        ("eval.record=1", "eval.record: environments on a device cannot render; use 0"),
    ],
)
def test_what_it_cannot_do_is_said_in_one_message(trainer, word, message):
    with pytest.raises(ConfigError) as raised:
        trainer("env=cartpole_torch", word)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


class SameStep(OnHost):
    autoreset, traits = AutoresetMode.SAME_STEP, EnvTraits(device=torch.device("cpu"))


def test_environments_on_a_device_reset_one_step_later():
    env = SameStep(make("cartpole_torch", 1))
    with pytest.raises(ConfigError, match="env: has a device, and resets within the step that ends an episode"):
        make_shard(env, None, None, None, [0])
