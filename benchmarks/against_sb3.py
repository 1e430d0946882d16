"""Environment steps per second beside Stable-Baselines3: equal hyper-parameters, one thread each, steady state.

    pip install "stable-baselines3==2.9.*"
    python benchmarks/against_sb3.py                   # PPO and DQN on CartPole-v1, SAC on Pendulum-v1
    python benchmarks/against_sb3.py ppo --rounds 9
    python benchmarks/against_sb3.py sac --override hardware.float32_matmul_precision=medium

The two take turns, each round in a process of its own, so that a busy machine disturbs both alike. Set-up, warm-up
(the first 30 % of the steps) and evaluation are not measured. Results go to ``results/against_sb3.json``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

WARM_UP = 0.3
STEPS = {"ppo": 60 * 1024, "sac": 3000, "dqn": 30_000}
OVERRIDES = {
    "ppo": [
        *("algo=ppo", "env=cartpole", "model=mlp", "model.hidden=[64,64]", "model.activation=tanh"),
        *("num_envs=8", "rollout_fragment_length=128", "algo.num_sgd_iter=4", "algo.sgd_minibatch_size=256"),
        *("algo.vf_share_layers=false", "algo.lr=3e-4", "log.every=3072"),
    ],
    "sac": [
        *("algo=sac", "env=pendulum", "model=mlp256", "model.hidden=[256,256]", "model.activation=relu"),
        *("num_envs=1", "rollout_fragment_length=1", "train_batch_size=256", "replay_ratio=1"),
        *("num_steps_sampled_before_learning_starts=100", "algo.n_step=1"),
        *("algo.actor_lr=3e-4", "algo.critic_lr=3e-4", "algo.alpha_lr=3e-4", "log.every=100"),
    ],
    "dqn": [
        *("algo=dqn", "env=cartpole", "model=mlp", "model.hidden=[64,64]", "model.activation=relu"),
        *("model.layer_norm=false", "algo.hiddens=[]", "algo.double_q=false", "algo.dueling=false", "algo.n_step=1"),
        *("num_envs=1", "rollout_fragment_length=4", "train_batch_size=32", "replay_ratio=0.25"),
        *("num_steps_sampled_before_learning_starts=100", "buffer=replay", "buffer.capacity=50_000"),
        *("exploration=[epsilon_greedy]", "exploration.epsilon_greedy.epsilon=0.1", "algo.td_error_loss_fn=huber"),
        *(
            "algo.lr=1e-4",
            "algo.grad_clip=10.0",
            "algo.tau=1.0",
            "algo.target_network_update_freq=2500",
            "log.every=1000",
        ),
    ],
}
COMMON = [
    "tuned=none",
    "hardware=cpu",
    "hardware.threads=1",
    "compile=false",
    "logger=[]",
    "eval.every=0",
    "eval.episodes=1",
]


def steady(stamps: list[tuple[int, float]], total: int) -> float:
    """Steps per second between the end of the warm-up and the last stamp, from (steps, seconds)."""
    warm = [stamp for stamp in stamps if stamp[0] >= WARM_UP * total]
    (first, began), (last, ended) = warm[0], warm[-1]
    return (last - first) / (ended - began)


def measure_rlplug(algo: str, overrides: list[str]) -> float:
    import torch

    import rlplug
    from rlplug.run.launch import train

    torch.set_num_threads(1)
    chosen = [*OVERRIDES[algo], *COMMON, f"total_steps={STEPS[algo]}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        train(rlplug.compose(chosen), Path(folder), chosen)
        with (Path(folder) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["time/wall_s"]]  # an evaluation's row has none
    return steady([(int(row["step"]), float(row["time/wall_s"])) for row in rows], STEPS[algo])


def measure_sb3(algo: str) -> float:
    import torch
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)

    class Stamps(BaseCallback):
        """When each round of collection begins: the update of the round before is over."""

        stamps: list[tuple[int, float]]

        def _init_callback(self) -> None:
            self.stamps = []

        def _on_rollout_start(self) -> None:
            self.stamps.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self) -> bool:
            return True

    if algo == "ppo":
        envs = make_vec_env("CartPole-v1", n_envs=8)  # a DummyVecEnv
        model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, learning_rate=3e-4, device="cpu")
    elif algo == "dqn":
        options = {"batch_size": 32, "learning_starts": 100, "buffer_size": 50_000, "train_freq": 4}
        options |= {"exploration_initial_eps": 0.1, "exploration_final_eps": 0.1, "target_update_interval": 10_000}
        model = DQN("MlpPolicy", make_vec_env("CartPole-v1", n_envs=1), learning_rate=1e-4, device="cpu", **options)
    else:
        env = make_vec_env("Pendulum-v1", n_envs=1)
        model = SAC("MlpPolicy", env, batch_size=256, learning_starts=100, learning_rate=3e-4, device="cpu")
    callback = Stamps()
    model.learn(STEPS[algo], callback=callback)
    return steady(callback.stamps, STEPS[algo])


def turn(who: str, algo: str, overrides: list[str]) -> float:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, algo, "--measure", who, *(f"--override={o}" for o in overrides)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def compare(algo: str, rounds: int, overrides: list[str]) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"rlplug": [], "sb3": []}
    for number in range(1, rounds + 1):
        for who, measured in speeds.items():
            measured.append(round(turn(who, algo, overrides), 1))
        ours, theirs = (measured[-1] for measured in speeds.values())
        load = os.getloadavg()[0]
        print(
            f"{algo} round {number}: rlplug {ours:8.1f}  sb3 {theirs:8.1f}  {ours / theirs:5.2f} x  load {load:.1f}",
            flush=True,
        )
    medians = {who: statistics.median(measured) for who, measured in speeds.items()}
    ratio = medians["rlplug"] / medians["sb3"]
    print(f"{algo} median : rlplug {medians['rlplug']:8.1f}  sb3 {medians['sb3']:8.1f}  {ratio:5.2f} x", flush=True)
    return {
        "unit": "environment steps per second",
        "rounds": speeds,
        "median": medians,
        "ratio": round(ratio, 3),
        "steps": STEPS[algo],
        "overrides": [*OVERRIDES[algo], *COMMON, *overrides],
        "versions": {name: metadata.version(name) for name in ("rlplug", "stable-baselines3", "torch", "gymnasium")},
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algo", nargs="*", metavar="algo", help="ppo, sac, dqn; all if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--override", action="append", default=[], help="a further override for rlplug")
    parser.add_argument("--measure", choices=("rlplug", "sb3"), help="one measurement, in this process")
    args = parser.parse_args()
    algos = args.algo or list(STEPS)
    if unknown := set(algos) - set(STEPS):
        parser.error(f"nothing to compare for {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if args.measure:
        (algo,) = algos
        print(measure_rlplug(algo, args.override) if args.measure == "rlplug" else measure_sb3(algo))
        return
    out = Path(__file__).parent / "results" / "against_sb3.json"
    out.parent.mkdir(exist_ok=True)
    for algo in algos:
        known = json.loads(out.read_text()) if out.exists() else {}
        out.write_text(json.dumps(known | {algo: compare(algo, args.rounds, args.override)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
