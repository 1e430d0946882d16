"""Stable-Baselines3's PPO on Pong, to lay beside ``experiment=ppo_pong``: the mean return of its last 100 episodes.

    pip install "stable-baselines3==2.9.*" opencv-python-headless
    python benchmarks/pong_sb3.py --steps 2_000_000
    python -m rlplug plot runs/<date>/<time> --smooth 100 --metric episode/return --metric eval/return_mean \\
        --compare 'Stable-Baselines3=benchmarks/results/pong_sb3.csv' --width 6.4 --out docs/img/ppo_pong.svg

Settings are those of RL Zoo for Atari, whose schedules go to 0 at the end of these steps; the environment is that of
``env=pong``: 4 frames to a step, no sticky actions, stacks of 4. It takes hours, and begins again where it was ended.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from pathlib import Path

import ale_py
import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

RESULT = Path(__file__).parent / "results" / "pong_sb3.csv"
EVERY = 20_000  # steps


class Log(BaseCallback):
    """Writes a row and the weights every so many steps."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.weights, self.last = weights, 0

    def _on_step(self) -> bool:
        if self.num_timesteps - self.last >= EVERY and self.model.ep_info_buffer:
            self.last = self.num_timesteps
            mean = np.mean([episode["r"] for episode in self.model.ep_info_buffer])
            with RESULT.open("a", newline="") as file:
                csv.writer(file).writerow([self.num_timesteps, f"{mean:.2f}"])
            written = self.weights.with_name(f"new-{self.weights.name}")
            self.model.save(written)
            os.replace(written, self.weights)
        return True


def to_zero(value: float) -> Callable[[float], float]:
    return lambda left: left * value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", type=Path, default=Path("runs/pong_sb3.zip"), help="kept here, to go on from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gymnasium.register_envs(ale_py)
    single = make_vec_env("PongNoFrameskip-v4", n_envs=8, seed=args.seed, wrapper_class=AtariWrapper)
    env = VecFrameStack(single, 4)
    if args.weights.exists():
        model = PPO.load(args.weights, env=env, device="cpu")
    else:
        args.weights.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text("step,return\n")
        schedules = {"learning_rate": to_zero(2.5e-4), "clip_range": to_zero(0.1)}
        sizes = {"n_steps": 128, "n_epochs": 4, "batch_size": 256, "vf_coef": 0.5, "ent_coef": 0.01}
        model = PPO("CnnPolicy", env, seed=args.seed, device="cpu", **schedules, **sizes)
    done = model.num_timesteps
    model.learn(args.steps - done, callback=Log(args.weights), reset_num_timesteps=not done)


if __name__ == "__main__":
    main()
