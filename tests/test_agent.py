"""The policy of a run, used without the run."""

import json
import shutil
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import nn

import rlplug
from rlplug import registry
from rlplug.agent import Agent, load
from rlplug.api import Algorithm, Losses, Needs, Optim, VecEnv
from rlplug.checkpointing.format import Checkpoint, Snapshot, checkpoints, write
from rlplug.envs import EnvList
from rlplug.evaluation.evaluator import EVALUATION
from rlplug.plugins.buffer.rollout import Rollout
from rlplug.plugins.env.gymnasium import Gymnasium
from rlplug.plugins.hardware.machine import CPU
from rlplug.plugins.logger.csv import CSV
from rlplug.plugins.loop.alternate import Alternate
from rlplug.results.evaluate import evaluate
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import CheckpointError, ConfigError
from tests.checkpointing.runs import punctual
from tests.installing import Install, install, install_into, manifest, site  # noqa: F401  fixtures

SHORT = ["logger.only=[]", "model.hidden=[8]", "eval.every=0", "eval.episodes=3", "checkpoint.every=100"]
SMALL = ["total_steps=64", "rollout_fragment_length=16", "num_envs=4", "algo.sgd_minibatch_size=64"]
SAC = ["algo=sac", "env=pendulum", "total_steps=200", "num_steps_sampled_before_learning_starts=150", *SHORT]
PPO = ["algo=ppo", "env=cartpole", "tuned=none", *SMALL, *SHORT]


def trained(folder: Path, *overrides: str) -> Path:
    with punctual():
        rlplug.train([*overrides, f"hydra.run.dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def sac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "sac", *SAC)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "ppo", *PPO)


def summary(run: Path) -> dict[str, float]:
    return json.loads((run / "summary.json").read_text())


# ---- acting in the environment as it is -----------------------------------------------------------------------------


def test_it_plays_the_evaluation_of_the_run_in_bare_environments(sac: Path):
    """Observations and actions of gymnasium itself: torques in [-2, 2], no adapter in between."""
    agent = load(sac)
    envs = [gymnasium.make("Pendulum-v1") for _ in range(3)]
    seeds = np.random.SeedSequence([0, EVALUATION, int(summary(sac)["eval/env_steps"])]).generate_state(3)
    episodes = [int(np.random.SeedSequence([int(seed), 0]).generate_state(1)[0]) for seed in seeds]
    obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, episodes, strict=True)])
    returns = np.zeros(3)
    for _ in range(200):
        steps = [env.step(action) for env, action in zip(envs, agent.act(obs), strict=True)]
        obs = np.stack([step[0] for step in steps])
        returns += [step[1] for step in steps]
    assert returns.mean() == pytest.approx(summary(sac)["eval/return_mean"], rel=1e-6)
    assert returns.std() == pytest.approx(summary(sac)["eval/return_std"], rel=1e-4)


@pytest.mark.parametrize("algo", ["sac", "ppo"])
@pytest.mark.parametrize("mode", ["greedy", "explore", "random"])
def test_one_observation_or_many(algo: str, mode, request: pytest.FixtureRequest):
    agent = load(request.getfixturevalue(algo))
    (space,) = agent.spec.native_spaces.values()
    one = agent.act(space.obs.sample(), mode)
    assert space.action.contains(one)
    many = agent.act(np.stack([space.obs.sample() for _ in range(5)]), mode)
    assert len(many) == 5
    assert all(space.action.contains(action) for action in many)


def test_a_batch_is_what_each_one_gives(ppo: Path):
    agent = load(ppo)
    rows = np.random.default_rng(0).normal(size=(50, 4))
    singly = [agent.act(row.tolist()) for row in rows]
    assert agent.act(rows).tolist() == singly
    assert agent.act(torch.from_numpy(rows)).tolist() == singly
    assert len(set(singly)) == 2


def test_greedy_is_the_same_in_every_process_and_explore_by_the_seed(sac: Path):
    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)

    def acts(mode, **kwargs) -> list:
        agent = load(sac, **kwargs)
        torch.rand(7)
        return [agent.act(obs, mode).tolist() for _ in range(2)]

    first, second = acts("greedy")
    assert first == second == acts("greedy", seed=5)[0]
    first, second = acts("explore")
    assert first != second
    assert [first, second] == acts("explore") == acts("explore", seed=0)
    assert first != acts("explore", seed=1)[0]


def test_the_callers_random_numbers_and_arrays_stay_as_they_are(sac: Path):
    obs = np.zeros((2, 3), np.float32)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    agent = load(sac)
    agent.act(obs, "explore")
    assert torch.equal(torch.rand(3), expected)
    assert not obs.any()
    with pytest.raises(ValueError, match="mode should be one of explore, greedy, random, got 'best'"):
        agent.act(np.zeros(3), "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no device cuda here; use cpu"):
        load(sac, device="cuda")


def test_what_it_knows_of_its_training(sac: Path, ppo: Path):
    agent = load(sac)
    assert agent.env_steps == 200
    assert agent.spec.native_spaces["agent"].action == Box(-2, 2, (1,))
    assert load(str(sac / "checkpoints" / "step_000000000100")).env_steps == 100
    weights = Checkpoint(sac / "checkpoints" / "step_000000000200").tree("weights")["algorithm"]
    assert all(torch.equal(value, weights[name]) for name, value in agent.algorithm.state_dict().items())
    assert load(ppo).env_steps == summary(ppo)["env_steps"]


@pytest.mark.parametrize(
    ("obs", "said"),
    [
        (np.zeros(4), r"the observation has shape \[4\]; the observation space is Box\(.*\): \[3\], or \[n, 3\] for n"),
        (np.zeros((1, 2, 3)), r"has shape \[1, 2, 3\]"),
        (1.0, r"has shape \[\]"),
        ("left", "the observation is a str; the observation space is Box"),
        (["a", "b", "c"], "the observation is a list; the observation space is Box"),
        ((np.zeros(3), {}), r"the observation is a tuple: reset\(\) returns it and an info; the observation space is"),
        (None, "the observation is a NoneType; the observation space is Box"),
        (np.array([0.0, np.nan, 0.0]), "the observation holds NaN"),
        ({"obs": np.zeros(3)}, "the observation is a dict; the observation space is Box"),
    ],
)
def test_other_observations_are_refused(sac: Path, obs, said: str):
    with pytest.raises(ValueError, match=said):
        load(sac).act(obs)


def test_a_policy_that_was_trained_with_masks_is_given_them(tmp_path: Path, sac: Path):
    agent, mask = load(trained(tmp_path / "taxi", *PPO, "env=taxi", "env.max_episode_steps=20")), np.arange(6) == 4
    assert agent.act(7, "random", action_mask=mask) == 4
    assert agent.act([7, 8], "explore", action_mask=[mask, ~mask])[0] == 4
    with pytest.raises(ValueError, match=r"was trained with action masks: act\(obs, action_mask=...\), \[6\] bool"):
        agent.act(7)
    with pytest.raises(ValueError, match="trained without action masks"):
        load(sac).act(np.zeros(3), action_mask=np.ones(7, bool))


# ---- memory and every kind of space ---------------------------------------------------------------------------------

OBS = Dict(
    image=Box(0, 255, (2, 2), np.uint8),
    place=Discrete(5, start=-2),
    speed=Box(-1, np.inf, (), np.float64),
    tools=MultiDiscrete([2, 3], start=[1, 0]),
    lights=MultiBinary(2),
)


class Rooms(gymnasium.Env):
    """Every kind of observation; actions count from 3."""

    observation_space = OBS
    action_space = Discrete(4, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), float(action), self.steps == 5, False, {}


class Home(VecEnv):
    @settings
    class Config:
        pass

    def __new__(cls, cfg, ctx):
        return EnvList([Rooms() for _ in ctx.env_ids], 5)


class Counting(Algorithm):
    """Sees its own last action and reward, counts the rows of the episode, and writes down what it was given."""

    size = 3

    @settings
    class Config:
        parts: PositiveInt = option("Unused.")

    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("obs", "action", "prev_action", "prev_reward"))

    def __init__(self, cfg, ctx):
        super().__init__()
        self.ctx = ctx
        self.bias = nn.Parameter(torch.zeros(self.size))
        self.given: list = []
        self.steps = ctx.schedule([(0, 0.0), (1000, 1000.0)])

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), 0.1))}

    def forward(self, batch, parts):
        return Losses({"bias": self.bias.square().sum() + 0 * batch["reward"]})

    def initial_carry(self, n):
        return {"rows": torch.zeros(n, dtype=torch.int64)}

    def act(self, step, carry, mode):
        rows = torch.where(step["is_first"], 0, carry["rows"] + 1)
        self.given.append({key: value for key, value in step.items() if key != "is_first"} | {"rows": rows})
        draw = self.ctx.randint(4, len(rows)) if mode != "greedy" else 0
        return {"action": (rows + draw) % 4}, {"rows": rows}


HERE = {"Home": "env", "Counting": "algo"}
NAMES = {"env": "Gone", "loop": "GoneLoop", "buffer": "GoneBuffer", "hardware": "GoneHardware", "logger": "GoneLogger"}
PARENTS = {"env": "cartpole", "loop": "alternate", "buffer": "rollout", "hardware": "cpu"}
ALGO = """# @package _global_
total_steps: 40
rollout_fragment_length: 20
train_batch_size: 20
replay_ratio: null
algo: {name: counting, parts: 1}
"""
GONE = {
    "rlplug_gone/__init__.py": manifest(
        *((kind, "gone", f"{__name__}:{name}") for kind, name in NAMES.items()),
        *((kind, name.lower(), f"{__name__}:{name}") for name, kind in HERE.items()),
        conf="rlplug_gone.conf",
    ),
    **{f"rlplug_gone/conf/{kind}/gone.yaml": f"defaults: [{name}]\nname: gone\n" for kind, name in PARENTS.items()},
    "rlplug_gone/conf/env/home.yaml": "name: home\n",
    "rlplug_gone/conf/logger/gone.yaml": "# @package logger.gone\nname: gone\n",
    "rlplug_gone/conf/algo/counting.yaml": ALGO,
}


class Gone(Gymnasium):
    pass


class GoneLoop(Alternate):
    pass


class GoneBuffer(Rollout):
    pass


class GoneHardware(CPU):
    pass


class GoneLogger(CSV):
    pass


@pytest.fixture
def counting(install: Install, tmp_path: Path) -> Path:  # noqa: F811
    install("rlplug-gone", "rlplug_gone", GONE)
    return trained(
        tmp_path / "counting", "algo=counting", "env=home", "logger.only=[]", "eval.episodes=2", "eval.every=0"
    )


def uninstall(site: Path, name: str = "rlplug-gone", module: str = "rlplug_gone") -> None:  # noqa: F811
    shutil.rmtree(site / f"{name.replace('-', '_')}-1.2.dist-info")
    shutil.rmtree(site / module)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(module)]:
        del sys.modules[loaded]
    registry.refresh()


def rows(agent: Agent) -> list:
    return agent.algorithm.given[-1]["rows"].tolist()  # type: ignore[union-attr]


def sample(**changes):
    obs = {"image": np.zeros((2, 2), np.uint8), "place": 0, "speed": 0.0, "tools": [1, 0], "lights": [0, 1]} | changes
    return {key: value for key, value in obs.items() if value is not None}


def test_every_kind_of_space_arrives_inside_and_leaves_outside(counting: Path):
    agent = load(counting)
    assert agent.algorithm.steps.item() == agent.env_steps > 0  # type: ignore[union-attr, operator]  a schedule
    action = agent.act(
        sample(image=np.full((2, 2), 255, np.uint8), place=-2, speed=0.5, tools=[2, 2], lights=[True, False])
    )
    assert action == 3  # the first one of the environment, which is 0 inside
    assert agent.spec.native_spaces["agent"].action.contains(action)
    given = agent.algorithm.given[-1]["obs"]  # type: ignore[union-attr]
    expected = {"image": [[[255, 255]] * 2], "place": [0], "speed": [0.5], "tools": [[1, 2]], "lights": [[1, 0]]}
    assert {key: value.tolist() for key, value in given.items()} == expected
    assert (given["image"].dtype, given["speed"].dtype) == (torch.uint8, torch.float32)


@pytest.mark.parametrize(
    ("obs", "said"),
    [  # of parts, see tests/envs/test_env_spaces.py
        (np.zeros(3), "the observation is a ndarray; the observation space is Dict"),
        (sample(more=1), "the observation is a dict of .*, more; the"),
        (sample(place=-3), "outside"),
        (sample(tools=[0, 0]), "outside"),
        (sample(place=1.0), "is of type float64; the observation space is Discrete"),
    ],
)
def test_other_dicts_are_refused(counting: Path, obs, said: str):
    with pytest.raises(ValueError, match=said):
        load(counting).act(obs)


def batch(n: int):
    return {key: np.stack([value] * n) for key, value in sample().items()}


def test_it_remembers_until_it_is_reset(counting: Path):
    agent = load(counting)
    assert [agent.act(sample(), reward=1.0) for _ in range(5)] == [3, 4, 5, 6, 3]
    assert rows(agent) == [4]
    agent.reset()
    assert agent.act(sample()) == 3
    assert rows(agent) == [0]


def test_its_last_action_and_reward(counting: Path):
    agent = load(counting)
    agent.act(batch(2), reward=[7.0, 7.0])
    agent.act(batch(2), "explore", reward=[1.0, 2.0])
    explored = agent.act(batch(2), reward=3.0)
    agent.reset(np.array([False, True]))
    agent.act(batch(2), reward=[4.0, 5.0])
    seen = [
        (given["prev_action"].tolist(), given["prev_reward"].tolist(), given["rows"].tolist())
        for given in agent.algorithm.given  # type: ignore[union-attr]
    ]
    last = (explored - 3).tolist()
    assert seen[0] == ([0, 0], [0.0, 0.0], [0, 0])
    assert seen[1] == ([0, 0], [1.0, 2.0], [1, 1])
    assert seen[2][1:] == ([3.0, 3.0], [2, 2])
    assert seen[3] == ([last[0], 0], [4.0, 0.0], [3, 0])


def test_what_does_not_go_with_the_episodes_is_refused(counting: Path):
    agent = load(counting)
    agent.act(batch(2))
    with pytest.raises(ValueError, match=r"this policy reads the reward of its last action: act\(obs, reward=...\)"):
        agent.act(batch(2))
    with pytest.raises(ValueError, match=r"3 observations, but 2 episodes are open; call reset\(\) to begin new ones"):
        agent.act(batch(3), reward=0.0)
    with pytest.raises(ValueError, match=r"ended should be \[2\] bool"):
        agent.reset(np.array([True]))
    with pytest.raises(ValueError, match=r"ended should be \[2\] bool"):
        agent.reset([0, 1])
    assert rows(agent) == [0, 0]
    agent.reset()
    assert agent.act(batch(3)).tolist() == [3, 3, 3]


# ---- what need not be here, and what must ---------------------------------------------------------------------------


def test_only_algorithm_and_models_need_be_installed(install: Install, site: Path, tmp_path: Path):  # noqa: F811
    install("rlplug-gone", "rlplug_gone", GONE)
    gone = [f"{kind}=gone" for kind in ("env", "loop", "buffer", "hardware")]
    run = trained(tmp_path / "run", *PPO, *gone, "logger.only=[gone]")
    before = load(run).act(np.full((3, 4), 0.1))
    uninstall(site)
    with pytest.raises(ConfigError, match="unknown env 'gone'"):
        registry.load("env", "gone")
    assert load(run).act(np.full((3, 4), 0.1)).tolist() == before.tolist()
    said = r"^env: the run used env 'gone' of rlplug-gone 1\.2, which is not installed: pip install rlplug-gone==1\.2$"
    with pytest.raises(CheckpointError, match=said):
        evaluate(run)
    notes: list[str] = []
    played = evaluate(run, ["env=cartpole"], notes.append)  # the same one, by another name
    assert played["eval/return_mean"] == summary(run)["eval/return_mean"]
    assert len(notes) == 1
    assert notes[0].startswith(
        "an evaluation runs on the CPU because the run's hardware is not available: hardware.name: "
    )


def test_an_algorithm_that_is_gone_is_named(counting: Path, site: Path):  # noqa: F811
    uninstall(site)
    with pytest.raises(CheckpointError, match=r"^algo: the run used algo 'counting' of rlplug-gone 1\.2, which is not"):
        load(counting)


def test_another_version_is_noted(counting: Path, site: Path):  # noqa: F811
    uninstall(site)
    install_into(site, "rlplug-gone", "rlplug_gone", GONE, version="1.3")
    registry.refresh()
    with pytest.warns(UserWarning, match=r"^rlplug-gone was 1\.2 then, and is 1\.3 now$"):
        load(counting)


def test_an_algorithm_that_has_changed_is_refused(counting: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counting, "size", 4)
    with pytest.raises(CheckpointError, match=r"does not fit algo 'counting' as it is now: size mismatch for bias: "):
        load(counting)


def test_a_damaged_checkpoint_is_passed_over(sac: Path, tmp_path: Path):
    run = shutil.copytree(sac, tmp_path / "run", symlinks=True)
    newest = checkpoints(run)[0] / "weights.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"is damaged or was altered: weights\.pt: .*; trying the previous one"):
        assert load(run).env_steps == 100
    with pytest.raises(CheckpointError, match="is damaged or was altered"):
        load(newest.parent)


def test_the_buffer_is_not_read(sac: Path, tmp_path: Path):
    """It may be gigabytes."""
    one = shutil.copytree(checkpoints(sac)[0], tmp_path / "one")
    for file in one.glob("rank0*"):
        file.unlink()
    assert load(one).act(np.zeros(3)) == load(sac).act(np.zeros(3))


def on_a_gpu(run: Path, folder: Path, option: str = "1gpu", **ray: float) -> Path:
    """The newest checkpoint of a run as it would be had it been trained with hardware=1gpu."""
    checkpoint = Checkpoint(checkpoints(run)[0])
    hardware = rlplug.config.default_node("hardware", option)
    hardware["ray"] |= ray
    raw = checkpoint.manifest["config"] | {"hardware": hardware}
    return write(folder, Snapshot(checkpoint.manifest | {"config": raw}, {"weights": checkpoint.tree("weights")}))


def test_no_gpu_is_needed_after_one_was_used(sac: Path, tmp_path: Path):
    path = on_a_gpu(sac, tmp_path / "gpu")
    assert load(path).act(np.zeros(3)) == load(sac).act(np.zeros(3))
    notes: list[str] = []
    assert evaluate(path, (), notes.append)["eval/return_mean"] == summary(sac)["eval/return_mean"]
    here = "an evaluation runs on the CPU because the run's hardware is not available: hardware: needs a"
    assert notes == [f"{here} CUDA device, but none was found; use hardware=cpu"]
    assert evaluate(path, ["hardware=cpu"], notes.append)["episodes"] == 3
    assert len(notes) == 1
    evaluate(on_a_gpu(sac, tmp_path / "ray", "ray", num_gpus=1), (), notes.append)
    assert notes[1].startswith(f"{here} ")
    with pytest.raises(ConfigError, match=r"^hardware: needs a CUDA device"):
        evaluate(path, ["hardware=1gpu"])


# ---- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_an_evaluation_is_the_runs_own_one(algo: str, request: pytest.FixtureRequest):
    run = request.getfixturevalue(algo)
    played, noted = evaluate(run), summary(run)
    for key in ("eval/return_mean", "eval/return_std", "eval/length_mean", "env_steps"):
        assert played[key] == noted[key]
    assert played["episodes"] == 3
    assert played["eval/return_min"] < played["eval/return_mean"] < played["eval/return_max"]


class Undecided(Counting):
    """Draws even when it is judged."""

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, "explore")
        return out, carry


def test_even_of_a_policy_that_draws(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    files = GONE | {"rlplug_gone/__init__.py": GONE["rlplug_gone/__init__.py"].replace(":Counting", ":Undecided")}
    install("rlplug-gone", "rlplug_gone", files)
    settings = [
        "algo=counting",
        "env=home",
        "logger.only=[]",
        "eval.episodes=2",
        "eval.every=20",
        "checkpoint.every=20",
    ]
    run = trained(tmp_path / "run", *settings)
    steps = [path.name for path in checkpoints(run)]
    assert len(steps) == 2  # and an evaluation at each; the second one does not depend on the first
    played = evaluate(run)
    assert played["eval/return_mean"] == summary(run)["eval/return_mean"]
    assert played["eval/return_mean"] != evaluate(run, ["seed=1"])["eval/return_mean"]


def test_a_changed_environment_and_other_episodes(sac: Path):
    assert evaluate(sac, ["env.max_episode_steps=10", "eval.episodes=5"])["eval/length_mean"] == 10
    seeded = evaluate(sac, ["seed=1"])
    assert seeded["seed"] == 1
    assert seeded["eval/return_mean"] != summary(sac)["eval/return_mean"]
    changed = evaluate(sac, ["+env.kwargs.g=1"])
    assert changed["eval/return_mean"] != summary(sac)["eval/return_mean"]
    with pytest.raises(
        ConfigError, match=r"^env: is not the environment of .*: the observation space was Box\(.*, and"
    ):
        evaluate(sac, ["env=cartpole"])
