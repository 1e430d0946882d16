"""rlplug by its defaults, but for the hyper-parameters of the case."""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import Stamps, run

import rlplug
from rlplug.run.launch import train

ENVS = {"CartPole-v1": "cartpole", "Acrobot-v1": "acrobot", "Pendulum-v1": "pendulum", "HalfCheetah-v5": "halfcheetah"}
ENVS |= {"PongNoFrameskip-v4": "pong", "simple_spread_v3": "simple_spread"}
AGENTS = 3
"""of simple_spread, whose rows are all minibatched"""


def words(case: dict[str, Any], steps: int) -> list[str]:
    """Return the command line."""
    env = ENVS[case["env"]]
    said = [f"algo={case['algo']}", f"env={env}", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0"]
    said += ["eval.episodes=1", f"total_steps={steps}", f"num_envs={case['envs']}", f"algo.gamma={case['gamma']}"]
    hidden = f"model.hidden={[*case['hidden']]}".replace(" ", "")
    mlp = ["model=mlp", hidden, "model.activation=tanh", "algo.vf_share_layers=false"]
    cnn = ["model=nature_cnn", "algo.vf_share_layers=true", "preprocess.clip_reward=sign"]
    torso = cnn if env == "pong" else mlp
    if case["algo"] == "ppo":
        rows = case["envs"] * case["rollout"]
        said += [*torso, f"algo.lr={case['lr']}"]
        said += [f"rollout_fragment_length={case['rollout']}", f"algo.num_sgd_iter={case['epochs']}"]
        said += [f"algo.sgd_minibatch_size={rows // case['minibatches']}", f"algo.lambda_={case['lambda']}"]
        said += [f"algo.clip_param={case['clip']}", f"algo.vf_loss_coeff={case['value_coeff']}"]
        said += [f"algo.entropy_coeff={case['entropy_coeff']}", f"algo.grad_clip={case['grad_clip']}"]
        return [*said, f"log.every={3 * rows}"]
    if case["algo"] == "mappo":
        rows = case["envs"] * case["rollout"] * AGENTS
        said += [hidden, "model.activation=tanh", f"algo.lr={case['lr']}", f"algo.critic_lr={case['lr']}"]
        said += [f"rollout_fragment_length={case['rollout']}", f"algo.num_sgd_iter={case['epochs']}"]
        said += [f"algo.sgd_minibatch_size={rows // case['minibatches']}", f"algo.lambda_={case['lambda']}"]
        said += [f"algo.clip_param={case['clip']}", f"algo.entropy_coeff={case['entropy_coeff']}"]
        said += [f"algo.grad_clip={case['grad_clip']}", "env.global_state=false", "algo.critic_sees=observations"]
        return [*said, f"log.every={rows // AGENTS}"]
    if case["algo"] == "impala":
        said += [*torso, f"algo.lr={case['lr']}"]
        said += [f"rollout_fragment_length={case['rollout']}", f"train_batch_size={case['batch']}"]
        said += [f"algo.vf_loss_coeff={case['value_coeff']}", f"algo.entropy_coeff={case['entropy_coeff']}"]
        said += [f"algo.grad_clip={case['grad_clip']}", f"hardware.actors.count={case['actors']}"]
        return [*said, "hardware.actors.num_cpus=0.5", "log.every=2_000"]
    start = f"num_steps_sampled_before_learning_starts={case['learning_starts']}"
    said += [start, f"train_batch_size={case['batch']}", f"buffer.capacity={case['capacity']}", "algo.n_step=1"]
    if case["algo"] == "sac":
        said += ["model=mlp256", hidden, "model.activation=relu", "rollout_fragment_length=1", "replay_ratio=1"]
        said += [f"algo.{part}_lr={case['lr']}" for part in ("actor", "critic", "alpha")]
        return [*said, f"algo.tau={case['tau']}", "log.every=100"]
    every = case["train_every"]
    said += ["model=mlp", hidden, "model.activation=relu", "model.layer_norm=false", "algo.hiddens=[]"]
    said += ["algo.double_q=false", "algo.dueling=false", "algo.td_error_loss_fn=huber", f"algo.lr={case['lr']}"]
    said += [f"rollout_fragment_length={every}", f"replay_ratio={1 / every}", f"algo.grad_clip={case['grad_clip']}"]
    said += ["exploration=[epsilon_greedy]", f"exploration.epsilon_greedy.epsilon={case['epsilon']}", "algo.tau=1.0"]
    if "alpha" in case:
        said += ["buffer=prioritized", f"buffer.alpha={case['alpha']}", f"buffer.beta={case['beta']}"]
    return [*said, f"algo.target_update_period={case['target_every'] // every}", "log.every=500"]


def measure(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    own = [argument for argument in sys.argv[2:] if "=" in argument]
    chosen = [*words(case, steps), *own]
    with tempfile.TemporaryDirectory() as folder:
        train(rlplug.compose(chosen), Path(folder), chosen)
        with (Path(folder) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["time/wall_s"]]  # an evaluation's row has none
    stamps.times = [(int(row["step"]), float(row["time/wall_s"])) for row in rows]
    stamps.returns = [float(row["episode/return"]) for row in rows if row.get("episode/return")][-3:]


if __name__ == "__main__":
    run(dict.fromkeys(("ppo", "dqn", "sac", "impala", "mappo"), measure), ("rlplug", "torch", "gymnasium"))
