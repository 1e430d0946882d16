"""A run that is killed and resumed ends as the undisturbed one, bit for bit."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplug.checkpointing.format import checkpoints
from rlplug.cli import main
from rlplug.testing.checks.runs import differences
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import RunError
from tests.tools import kill
from tests.tools.kill import Process, continuous, disturbed, undisturbed, warm_up, with_defaults

SMALL = ("model.hidden=[8]", "eval.episodes=2", "log.every=37")  # not at the steps of checkpoints
ROUNDS = ("rollout_fragment_length=16", *SMALL)
REPLAY = (
    "num_steps_sampled_before_learning_starts=50",
    "train_batch_size=16",
    "buffer.capacity=300",  # it wraps
    *SMALL,
)
SEGMENTS = ("model.hidden=[8]", "train_batch_size=256", *ROUNDS[:1], *SMALL[1:])
PPO = ("algo=ppo", "algo.sgd_minibatch_size=64", "algo.num_sgd_iter=2", *ROUNDS)
CONFIGS = {
    "sac": ("algo=sac", "env=pendulum", *REPLAY),
    "sac-several-environments": ("algo=sac", "env=pendulum", "num_envs=3", "algo.n_step=3", *REPLAY),
    "sac-correlated-noise": (
        "algo=sac",
        "env=mountaincar_continuous",
        "exploration=ornstein_uhlenbeck",
        "env.max_episode_steps=150",
        *REPLAY,
    ),
    "ppo-native-vector": (*PPO, "env=cartpole"),
    "ppo-list-of-environments": (*PPO, "env=cartpole", "env.vectorization=list"),
    "ppo-continuous": (*PPO, "env=pendulum", "algo.kl_coeff=0.2"),
    "ppo-recurrent-normalized": (
        *(*PPO[: -len(SMALL)], *SMALL[1:], "env=stateless_cartpole"),
        *("model=lstm", "model.hidden=8", "model.torso.hidden=[8]"),
        "preprocess.normalize_obs=true",
        "preprocess.normalize_reward=true",
    ),
    "ppo-curious": (*PPO, "env=cartpole", "exploration=[icm,rnd]"),
    "rainbow": (
        "algo=dqn",
        "env=cartpole",
        "buffer=prioritized",
        "exploration=[]",
        *("algo.n_step=3", "algo.double_q=true", "algo.dueling=true", "algo.noisy=true", "algo.num_atoms=11"),
        *REPLAY,
    ),
    "apex": (
        *("algo=apex_dqn", "env=cartpole", "tuned=none", "num_envs=4", "rollout_fragment_length=8"),
        *("replay_ratio=0.06", "algo.hiddens=[8]", "buffer.num_shards=2", *REPLAY),
    ),
    "apex-ddpg": (
        *("algo=apex_ddpg", "env=pendulum", "tuned=none", "num_envs=4", "rollout_fragment_length=8"),
        *("replay_ratio=0.06", "buffer.num_shards=2", *REPLAY),
    ),
    "a2c": ("algo=a2c", "env=cartpole", *ROUNDS),
    "a3c": ("algo=a3c", "env=cartpole", "tuned=none", "loop.in_flight=3", "train_batch_size=16", *ROUNDS),
    "ddppo-two-ranks": (  # each waits for the other: whom it does not wait for, time decides
        *("algo=ddppo", "tuned=none", "hardware=2cpu", "loop.preemption_threshold=null", *PPO[1:], "env=cartpole"),
        *("env.vectorization=list", "num_envs=4"),
    ),
    "impala": (
        *("algo=impala", "env=cartpole", "loop.in_flight=3", "buffer.replay_proportion=0.5", *SEGMENTS),
        "algo.opt_type=rmsprop",
    ),
    "impala-recurrent": (
        *("algo=impala", "env=stateless_cartpole", "loop.broadcast_interval=2", *SEGMENTS[1:]),
        *("model=lstm", "model.hidden=8", "model.torso.hidden=[8]"),
    ),
    "appo": (
        *("algo=appo", "env=pendulum", "algo.kl_coeff=0.2", "algo.target_update_period=3", *SEGMENTS),
        *("buffer.num_batches=3", "buffer.num_uses=4"),
    ),
    "td3": ("algo=td3", "env=pendulum", *REPLAY),
    "td3-compiled": ("algo=td3", "env=pendulum", "tuned=none", "compile=max", *REPLAY),
    "sac-compiled": ("algo=sac", "env=pendulum", "compile=max", *REPLAY),
    "dqn-compiled": ("algo=dqn", "env=cartpole", "tuned=none", "compile=max", *REPLAY),
    "ppo-compiled": (*PPO, "env=cartpole", "compile=max"),
    "qmix": (
        *("algo=qmix", "env=spread_torch", "tuned=none", "train_batch_size=8", "buffer.capacity=400"),
        *("model.hidden=8", "model.torso.hidden=[8]", "num_steps_sampled_before_learning_starts=100"),
    ),
    "maddpg": (
        *("algo=maddpg", "env=chase", "tuned=none", "num_envs=4", "rollout_fragment_length=8", "replay_ratio=0.06"),
        *REPLAY,
    ),
    "league": (  # in the middle of games
        *("algo=league", "env=tictactoe", "tuned=none", "num_envs=4", "algo.every=4", "algo.size=3"),
        *("algo.algo.sgd_minibatch_size=64", "algo.algo.num_sgd_iter=2", *ROUNDS),
    ),
    "alphazero": (  # in the middle of games
        *("algo=alphazero", "env=tictactoe", "num_envs=4", "algo.num_simulations=8", "algo.reuse_tree=true"),
        *("replay_ratio=0.0625", "train_batch_size=4", "buffer.capacity=300", *ROUNDS),
    ),
    "dreamerv3": (  # in the middle of sequences
        *("algo=dreamerv3", "env=cartpole", "tuned=none", "algo.batch_length=8", "train_batch_size=4"),
        *("replay_ratio=0.05", "num_steps_sampled_before_learning_starts=50", "buffer.capacity=300", *SMALL[1:]),
    ),
    "reinforce": ("algo=reinforce", "env=cartpole", *ROUNDS),
}
OFFLINE = ("env=pendulum", "tuned=none", "train_batch_size=16", *SMALL)
RECORDED = {
    "cql": ("algo=cql", "algo.bc_iters=1500", *OFFLINE),
    "iql-streamed": (
        *("algo=iql", "loop.stream=true", "rollout_fragment_length=2", "buffer.capacity=300", *OFFLINE),
        "num_steps_sampled_before_learning_starts=50",
    ),
}


def length(total_steps: int, every: int) -> tuple[str, ...]:
    return f"total_steps={total_steps}", f"checkpoint.every={every}", f"eval.every={total_steps // 3}"


def prove(folder: Path, overrides: Sequence[str], kills: int, while_writing: int) -> None:
    overrides = with_defaults(overrides)
    warm_up(overrides)
    if "compile=max" in overrides:
        undisturbed(overrides, folder / "first")  # compiles: later ones find artifacts in the cache, and take as long
    seconds = undisturbed(overrides, folder / "a")
    report = disturbed(overrides, folder / "a", folder / "b", seconds, kills, while_writing)
    assert len(report.kills) >= kills
    assert report.left("writing") >= while_writing
    assert report.differences == []
    assert all(count for part, (count, _) in report.compared[0].items() if part != "buffer")
    assert "could not be compiled" not in (folder / "a.log").read_text() + (folder / "b.log").read_text()


@pytest.mark.parametrize("name", ["sac", "ppo-native-vector"])
def test_killed_twice(name: str, tmp_path: Path):
    prove(tmp_path, [*CONFIGS[name], *length(400, 50)], kills=2, while_writing=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_killed_five_times(name: str, tmp_path: Path):
    prove(tmp_path, [*CONFIGS[name], *length(4000, 250)], kills=5, while_writing=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_killed_five_times_while_it_learns_from_a_recording(name: str, tmp_path: Path):
    data = f"{tmp_path / 'data'}"
    played = [*CONFIGS["sac"], "hardware=cpu", "logger.only=[]", "num_envs=5", "total_steps=2000", "eval.every=0"]
    assert main([*played, f"record.path={data}", f"hydra.run.dir={tmp_path / 'played'}"]) == 0
    prove(tmp_path, [*RECORDED[name], f"data.path={data}", *length(4000, 250)], kills=5, while_writing=2)


@pytest.mark.slow
def test_200_kills_during_continuous_checkpointing(tmp_path: Path):
    overrides = with_defaults([*CONFIGS["sac"], *length(1500, 1)])
    warm_up(overrides)
    undisturbed(overrides, tmp_path / "a")
    report = continuous(overrides, tmp_path / "a", tmp_path / "b", kills=200)
    assert len(report.kills) == 200
    assert report.left("writing") > 20
    assert report.compared
    assert report.differences == []


def test_runs_that_differ_are_told_apart(tmp_path: Path):
    one, other = (
        [*CONFIGS["sac"], *length(150, 100), f"seed={seed}", "hardware=cpu", "logger.only=[]"] for seed in (0, 1)
    )
    assert main([*one, f"hydra.run.dir={tmp_path / 'a'}"]) == 0
    assert main([*other, f"hydra.run.dir={tmp_path / 'b'}"]) == 0
    different = {name.partition(":")[0] for name in differences_of_runs(tmp_path / "a", tmp_path / "b")}
    assert different == {"weights", "learner", "rank0", "buffer", "best", "metrics.csv", "summary.json"}
    assert differences_of_runs(tmp_path / "a", tmp_path / "a") == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([0.0]), torch.tensor([float("nan")])),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (torch.ones(1), torch.ones(2)),
        (np.ones(1), np.ones(2)),
        (np.ones(1), torch.ones(1)),
    ],
)
def test_one_bit_makes_a_difference(a: Any, b: Any):
    assert differences({"x": a}, {"x": b}) == ["x"]
    assert differences({"x": a}, {}) == differences({}, {"x": a}) == ["x"]
    assert differences({"x": b}, {"x": copy.deepcopy(b)}) == []


def test_a_kill_that_breaks_a_checkpoint_is_told(tmp_path: Path):
    """As it would be seen if files were not written beside their final name."""
    overrides = with_defaults([*CONFIGS["sac"], *length(5000, 50)])
    warm_up(overrides)
    process = Process(tmp_path / "run", overrides)
    assert process.wait(lambda: bool(checkpoints(tmp_path / "run")))
    os.kill(process.pid, signal.SIGSTOP)
    newest = checkpoints(tmp_path / "run")[0]
    with (newest / "weights.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(RunError, match=r"incomplete checkpoint under a final name: .* was altered: weights"):
        process.kill()


def test_a_run_that_fails_is_told(tmp_path: Path):
    overrides = with_defaults([*CONFIGS["sac"], *length(300, 100), "eval.episodes=0"])
    process = Process(tmp_path / "run", overrides)
    with pytest.raises(RunError, match=r"ended with exit code 2:\nrlplug: eval\.episodes"):
        process.wait()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=sax"], "kill: algo"),
        (["--kills", "1", "algo=sac"], "--while-writing is some of --kills"),
        (["--folder", "{}", "algo=sac", "env=pendulum"], "holds runs already; choose another folder"),
    ],
)
def test_bad_input_of_the_command(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "disturbed").mkdir()
    try:
        code = kill.main([word.format(tmp_path) for word in words])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "disturbed"]
