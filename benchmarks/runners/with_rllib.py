"""RLlib, by its own algorithms, with environment runners as Ray actors where the case has actors."""

from __future__ import annotations

import logging
import math
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import ray
import torch
from cases import Stamps, run
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

torch.set_num_threads(1)
PONG = "PongNoFrameskip-v4"


def pong(_: Any) -> gym.Env[Any, Any]:
    """Make the game as RLlib's own examples do: grey, 84 x 84, four frames, signs of rewards."""
    gym.register_envs(ale_py)
    env = wrap_atari_for_new_api_stack(gym.make(PONG), dim=84, frameskip=4, framestack=4)
    return gym.wrappers.TransformReward(env, np.sign)


def measure(config: AlgorithmConfig, case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    """Train; the learner is in this process, and a result comes about every ``train_batch_size`` steps."""
    actors = case.get("actors", 0)
    model = DefaultModelConfig(
        fcnet_hiddens=[*case["hidden"]], fcnet_activation="tanh", head_fcnet_hiddens=[], vf_share_layers=False
    )
    if case["env"] == PONG:
        register_env(PONG, pong)
        model = DefaultModelConfig(  # the last convolution is the dense layer; a head's would be one for each output
            conv_filters=[
                [32, 8, 4, "valid"],
                [64, 4, 2, "valid"],
                [64, 3, 1, "valid"],
                [case["hidden"][0], 7, 1, "valid"],
            ],
            conv_activation="relu",
            head_fcnet_hiddens=[],
            vf_share_layers=True,
        )
    config.environment(case["env"]).rl_module(model_config=model).learners(num_learners=0, num_gpus_per_learner=0)
    config.env_runners(
        num_env_runners=actors,
        num_envs_per_env_runner=case["envs"] // max(1, actors),
        rollout_fragment_length=case["rollout"],
        num_cpus_per_env_runner=0.5,
    )
    config.training(gamma=case["gamma"], lr=case["lr"], grad_clip=case["grad_clip"], grad_clip_by="global_norm")
    halves = 2.0 if isinstance(config, IMPALAConfig) else 1.0  # its value loss is half of the squared error
    config.training(vf_loss_coeff=halves * case["value_coeff"], entropy_coeff=case["entropy_coeff"])
    config.reporting(min_time_s_per_iteration=0, metrics_num_episodes_for_smoothing=5)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm = config.build_algo()
    while stamps.steps < steps:
        seen = algorithm.train()["env_runners"]
        stamps.count(int(seen.get("num_env_steps_sampled_lifetime", 0)) - stamps.steps)
        if not math.isnan(episodes := seen.get("episode_return_mean", math.nan)):  # NaN until one has ended
            stamps.returns = [float(episodes)]
    algorithm.stop()
    ray.shutdown()


def ppo(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    rows = case["envs"] * case["rollout"]
    config = PPOConfig().training(
        train_batch_size_per_learner=rows,
        minibatch_size=rows // case["minibatches"],
        num_epochs=case["epochs"],
        lambda_=case["lambda"],
        clip_param=case["clip"],
        vf_clip_param=float("inf"),
        use_kl_loss=False,
    )
    measure(config, case, steps, stamps)


def impala(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    measure(IMPALAConfig().training(train_batch_size_per_learner=case["batch"]), case, steps, stamps)


if __name__ == "__main__":
    run({"ppo": ppo, "impala": impala}, ("ray", "torch", "gymnasium"))
