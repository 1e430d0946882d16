"""Dict and Tuple actions: every algorithm sees one array, the environment its own structure."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import rlplug
from rlplug.cli import check
from rlplug.config import choose, default_node
from rlplug.context import EnvShard, RunContext
from rlplug.envs.masks import find_masks
from rlplug.results.export import export
from rlplug.spaces import Hybrid
from rlplug.testing.checks import envs as kit
from rlplug.testing.worlds import World
from rlplug.types import ConfigError, EnvSpec

WORLD = "rlplug.testing.worlds:World-v0"
RUN = ["env=gymnasium", f"env.id={WORLD}", "hardware=cpu", "logger.only=[]", "eval.every=0", "seed=1", "tuned=none"]
RUN += ["model.hidden=[8]"]
ROLLOUT = ["num_envs=2", "rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "algo.num_sgd_iter=1"]
IN_ORDER = ["total_steps=64", "algo.distribution=autoregressive"]
REPLAY = ["train_batch_size=8", "num_steps_sampled_before_learning_starts=16", "total_steps=64"]


def world(action, **options):
    context = RunContext(spec=EnvSpec({}), total_steps=0).derive(shard=EnvShard("actor", 2, range(2)))
    node = default_node("env", "gymnasium", {"id": WORLD, "kwargs": {"action": action}} | options)
    return choose("env", "env", node).build(context)


INSIDE = {
    "dict": MultiDiscrete([2, 2, 2, 3, 3]),
    "tuple": Box(*np.array([[-1, -1, -np.inf], [1, 1, np.inf]], np.float32)),
    "one": Discrete(3),
    "hybrid": Hybrid(
        Box(*np.array([[-np.inf, -1, -1], [np.inf, 1, 1]], np.float32)),  # far, steer
        MultiDiscrete([3, 2, 2]),
    ),
    "bounded": Hybrid(Box(-1.0, 1.0, (2,), np.float32), MultiDiscrete([2, 3])),
}


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
@pytest.mark.parametrize("action", INSIDE)
def test_an_environment_gets_its_own_actions(action, vectorization):
    """``World`` raises on actions outside of its space."""
    env = world(action, vectorization=vectorization)
    try:
        space = env.spec.single_agent.action
        assert space == INSIDE[action]
        space.seed(0)
        env.reset([1, 2])
        for _ in range(20):
            env.step(np.stack([space.sample(), space.sample()]))
        env.load(env.state())
        env.step(np.stack([space.sample(), space.sample()]))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("algo", "action", "words"),
    [
        ("ppo", "dict", [*ROLLOUT, "total_steps=64"]),
        (
            "ppo",
            "dict",
            [*ROLLOUT, *IN_ORDER, "model=lstm", "model.hidden=8", "algo.max_seq_len=8", "algo.kl_coeff=0.2"],
        ),
        ("impala", "dict", ["num_envs=2", "rollout_fragment_length=16", "train_batch_size=32", *IN_ORDER]),
        ("ppo", "tuple", [*ROLLOUT, "total_steps=64"]),
        ("sac", "dict", REPLAY),
        ("dqn", "one", REPLAY),
        ("ppo", "hybrid", [*ROLLOUT, "total_steps=64", "algo.kl_coeff=0.2", "exploration=[icm]"]),
        ("ppo", "bounded", [*ROLLOUT, "total_steps=64", "model=lstm", "model.hidden=8", "algo.distribution=beta"]),
        ("a2c", "bounded", ["num_envs=2", "total_steps=64", "algo.distribution=squashed_gaussian"]),
        ("impala", "hybrid", ["num_envs=2", "rollout_fragment_length=16", "train_batch_size=32", "total_steps=64"]),
        ("appo", "hybrid", ["num_envs=2", "rollout_fragment_length=8", "train_batch_size=16", "total_steps=64"]),
    ],
)
def test_a_policy_acts_in_the_structure_of_the_environment(algo, action, words, tmp_path):
    folder = tmp_path / "run"
    result = rlplug.train([f"algo={algo}", *RUN, f"+env.kwargs.action={action}", *words], folder=folder)
    env, agent = World(action=action), rlplug.load(folder)
    obs, _ = env.reset(seed=3)
    for mode in ("greedy", "explore"):
        assert env.action_space.contains(agent.act(obs, mode=mode))
    several = rlplug.load(folder).act(np.stack([obs, obs, obs]))
    of = [several] if isinstance(several, np.ndarray) else [*leaves(several)]
    assert {len(x) for x in of} == {3}
    assert np.isfinite(float(result))


def leaves(actions):
    for part in actions.values() if isinstance(actions, dict) else actions:
        yield from leaves(part) if isinstance(part, dict | tuple) else [part]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("hybrid", ["total_steps=64"]),
        *[pytest.param(x, ["total_steps=64"], marks=pytest.mark.slow) for x in ("dict", "tuple", "one")],
        pytest.param("dict", IN_ORDER, marks=pytest.mark.slow),
        pytest.param("bounded", ["total_steps=64", "algo.distribution=beta"], marks=pytest.mark.slow),
    ],
)
def test_an_export_has_the_parts_side_by_side(action, words, tmp_path):
    """``export`` replays 40 recorded steps, and compares."""
    folder = tmp_path / "run"
    rlplug.train(["algo=ppo", *RUN, f"+env.kwargs.action={action}", *ROLLOUT, *words], folder=folder)
    (found,) = [x for x in export(folder, "torch", tmp_path / "export", steps=40)["outputs"] if x["name"] == "action"]
    assert found["shape"] == ["batch", *INSIDE[action].shape]
    dtypes = {"tuple": "float32", "bounded": "float32", "hybrid": "float64"}  # one of its parts is
    assert found["dtype"] == dtypes.get(action, "int64")
    assert "the parts side by side: " in found["meaning"]


def test_a_recording_is_read_again(tmp_path):
    words, data = ["+env.kwargs.action=dict", "total_steps=64"], tmp_path / "data"
    rlplug.train(["algo=ppo", *RUN, *ROLLOUT, *words, f"record.path={data}"], folder=tmp_path / "run")
    rlplug.train(["algo=bc", *RUN, *words, f"data.path={data}", "train_batch_size=8"], folder=tmp_path / "bc")
    env = World(action="dict")
    assert env.action_space.contains(rlplug.load(tmp_path / "bc").act(env.reset(seed=1)[0]))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_recording_of_hybrid_actions_is_read_again(kind, tmp_path):
    words, data = ["+env.kwargs.action=hybrid", "total_steps=64"], tmp_path / "data"
    record = [f"record.path={data}", f"record.format={kind}"]
    rlplug.train(["algo=ppo", *RUN, *ROLLOUT, *words, *record], folder=tmp_path / "run")
    for algo in ("bc", "marwil"):
        folder = tmp_path / algo
        rlplug.train([f"algo={algo}", *RUN, *words, f"data.path={data}", "train_batch_size=8"], folder=folder)
        env = World(action="hybrid")
        assert env.action_space.contains(rlplug.load(folder).act(env.reset(seed=1)[0]))


def test_masks_are_those_of_the_parts_side_by_side():
    masks = find_masks(World(action="dict").action_space, "m", {"m": None})
    assert masks is not None
    assert masks.size == sum(INSIDE["dict"].nvec)
    given = [[1, 0], [0, 1], [1, 1], [0, 0, 1], [1, 0, 0]]
    assert masks.read({"m": given}, False, False).tolist() == [x > 0 for part in given for x in part]


def test_check_shows_the_structure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check.main(["algo=ppo", *RUN, "+env.kwargs.action=one"]) == 0
    assert "action        Discrete(3), the parts of Dict('move': Discrete(3, start=-1))" in capsys.readouterr().out


def test_agents_have_none():
    with pytest.raises(ConfigError, match=r"the actions of .* are a Dict or Tuple, which agents cannot have"):
        kit.make("multi", entry_point="rlplug.testing.worlds:Troop", kwargs={"action": "dict"})
