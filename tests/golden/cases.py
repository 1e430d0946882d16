"""The golden runs. Every hyper-parameter is pinned here, so that defaults may be tuned without touching a curve."""

from __future__ import annotations

import json

UPDATES = 20

ALWAYS = {
    "seed": 0,
    "total_steps": 100_000,
    "hardware": "cpu",
    "hardware.threads": 1,
    "hardware.float32_matmul_precision": "highest",
    "logger": [],
    "eval.every": 0,
    "compile": False,
    "model": "mlp",
    "model.hidden": [32, 32],
    "model.activation": "tanh",
    "model.layer_norm": False,
    "model.init": "orthogonal",
    "env.vectorization": "list",
}
ON_POLICY = {"buffer": "rollout", "loop": "alternate", "loop.replay_ratio": None, "num_envs": 4}
PPO = {
    **ON_POLICY,
    "algo": "ppo",
    "loop.rollout_fragment_length": 32,
    "algo.gamma": 0.99,
    "algo.lambda_": 0.95,
    "algo.lr": 3e-4,
    "algo.sgd_minibatch_size": 64,
    "algo.num_sgd_iter": 2,
    "algo.clip_param": 0.2,
    "algo.vf_loss_coeff": 0.5,
    "algo.vf_clip_param": 1.0,
    "algo.vf_share_layers": False,
    "algo.entropy_coeff": 0.01,
    "algo.kl_coeff": 0.2,
    "algo.kl_target": 0.01,
    "algo.kl_stop": None,
    "algo.normalize_advantage": True,
    "algo.grad_clip": 0.5,
    "algo.grad_clip_by": "global_norm",
    "algo.initial_log_std": -0.5,
}
SAC = {
    "algo": "sac",
    "env": "pendulum",
    "buffer": "replay",
    "buffer.capacity": 1000,
    "num_envs": 2,
    "loop": "alternate",
    "loop.rollout_fragment_length": 1,
    "loop.train_batch_size": 32,
    "loop.replay_ratio": 0.5,
    "loop.num_steps_sampled_before_learning_starts": 64,
    "algo.gamma": 0.98,
    "algo.n_step": 1,
    "algo.twin_q": True,
    "algo.tau": 0.05,
    "algo.target_network_update_freq": 2,
    "algo.initial_alpha": 0.5,
    "algo.target_entropy": "auto",
    "algo.actor_lr": 1e-3,
    "algo.critic_lr": 1e-3,
    "algo.alpha_lr": 1e-3,
    "algo.grad_clip": 10.0,
    "algo.grad_clip_by": "global_norm",
}
REINFORCE = {
    **ON_POLICY,
    "algo": "reinforce",
    "env": "cartpole",
    "loop.rollout_fragment_length": 32,
    "algo.gamma": 0.99,
    "algo.lr": 1e-3,
    "algo.vf_loss_coeff": 0.5,
    "algo.entropy_coeff": 0.01,
}

CASES = {
    "ppo_cartpole": {**PPO, "env": "cartpole"},
    "ppo_pendulum": {**PPO, "env": "pendulum", "algo.kl_coeff": 0.0, "algo.vf_clip_param": None},
    "sac_pendulum": SAC,
    "sac_pendulum_n_step": {**SAC, "algo.n_step": 3, "algo.twin_q": False, "algo.target_network_update_freq": 1},
    "reinforce_cartpole": REINFORCE,
}


def overrides(case: str) -> list[str]:
    """The case as words of a command line."""
    settings = {**ALWAYS, **CASES[case]}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
