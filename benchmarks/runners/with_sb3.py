"""Stable-Baselines3, and with ``--jax`` its twin SBX."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
from cases import Stamps, run
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

JAX = "--jax" in sys.argv
if JAX:
    from sbx import DQN, PPO, SAC
else:
    import torch
    from stable_baselines3 import DQN, PPO, SAC

    torch.set_num_threads(1)


class Rounds(BaseCallback):
    """Stamps when each round of collection begins: the update of the round before is over."""

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.stamps = stamps

    def _on_rollout_start(self) -> None:
        self.stamps.count(self.num_timesteps - self.stamps.steps)

    def _on_step(self) -> bool:
        return True


def measure(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    options: dict[str, Any] = {"learning_rate": case["lr"], "gamma": case["gamma"]} | ({} if JAX else {"device": "cpu"})
    if images := "NoFrameskip" in case["env"]:
        import ale_py

        gymnasium.register_envs(ale_py)
        env: Any = VecFrameStack(make_vec_env(case["env"], n_envs=case["envs"], wrapper_class=AtariWrapper), 4)
    else:
        env = make_vec_env(case["env"], n_envs=case["envs"])  # a DummyVecEnv
        options["policy_kwargs"] = {"net_arch": [*case["hidden"]]}
    policy = "CnnPolicy" if images else "MlpPolicy"
    if case["algo"] == "ppo":
        rows = case["envs"] * case["rollout"]
        options |= {"n_steps": case["rollout"], "batch_size": rows // case["minibatches"], "n_epochs": case["epochs"]}
        options |= {"gae_lambda": case["lambda"], "clip_range": case["clip"], "vf_coef": case["value_coeff"]}
        model = PPO(policy, env, ent_coef=case["entropy_coeff"], max_grad_norm=case["grad_clip"], **options)
    else:
        options |= {"batch_size": case["batch"], "buffer_size": case["capacity"]}
        options |= {"learning_starts": case["learning_starts"]}
        if case["algo"] == "sac":
            model = SAC("MlpPolicy", env, tau=case["tau"], **options)
        else:
            options |= {"exploration_initial_eps": case["epsilon"], "exploration_final_eps": case["epsilon"]}
            options |= {"target_update_interval": case["target_every"], "train_freq": case["train_every"]}
            options |= {} if JAX else {"max_grad_norm": case["grad_clip"]}
            model = DQN("MlpPolicy", env, **options)
    model.learn(steps, callback=Rounds(stamps))
    stamps.returns = [float(episode["r"]) for episode in model.ep_info_buffer or ()]


if __name__ == "__main__":
    packages = ("sbx-rl", "jax") if JAX else ("stable-baselines3", "torch")
    run(dict.fromkeys(("ppo", "dqn", "sac"), measure), (*packages, "gymnasium"))
