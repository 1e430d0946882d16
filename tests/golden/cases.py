"""The golden runs. Every hyper-parameter is pinned here, so that defaults may be tuned without touching a curve."""

from __future__ import annotations

import json

UPDATES = 20

ALWAYS = {
    "tuned": "none",
    "seed": 0,
    "total_steps": 100_000,
    "hardware": "cpu",
    "hardware.threads": 1,
    "hardware.float32_matmul_precision": "highest",
    "logger": [],
    "eval.every": 0,
    "compile": "off",
    "env.vectorization": "list",
}
MODEL = {  # of cases that choose none themselves
    "model": "mlp",
    "model.hidden": [32, 32],
    "model.activation": "tanh",
    "model.layer_norm": False,
    "model.init": "orthogonal",
}
ON_POLICY = {"buffer": "rollout", "loop": "alternate", "replay_ratio": None, "num_envs": 4}
PPO = {
    **ON_POLICY,
    "algo": "ppo",
    "rollout_fragment_length": 32,
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
    "rollout_fragment_length": 1,
    "train_batch_size": 32,
    "replay_ratio": 0.5,
    "num_steps_sampled_before_learning_starts": 64,
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
DQN = {
    "algo": "dqn",
    "env": "cartpole",
    "buffer": "replay",
    "buffer.capacity": 1000,
    "exploration": "[epsilon_greedy]",
    "exploration.epsilon_greedy.epsilon": 0.2,
    "exploration.epsilon_greedy.ape_x_alpha": None,
    "num_envs": 2,
    "loop": "alternate",
    "rollout_fragment_length": 4,
    "train_batch_size": 32,
    "replay_ratio": 0.25,
    "num_steps_sampled_before_learning_starts": 64,
    "algo.gamma": 0.98,
    "algo.n_step": 1,
    "algo.double_q": False,
    "algo.dueling": False,
    "algo.noisy": False,
    "algo.sigma0": 0.5,
    "algo.num_atoms": 1,
    "algo.v_min": 0.0,
    "algo.v_max": 50.0,
    "algo.hiddens": [16],
    "algo.td_error_loss_fn": "huber",
    "algo.tau": 1.0,
    "algo.target_network_update_freq": 5,
    "algo.lr": 1e-3,
    "algo.adam_epsilon": 1e-5,
    "algo.grad_clip": 10.0,
    "algo.grad_clip_by": "global_norm",
    "algo.value_rescaling": None,
    "algo.sequence_length": 8,
    "algo.burn_in": 4,
    "algo.stride": 4,
    "algo.eta": 0.9,
}
RAINBOW = {
    **DQN,
    "buffer": "prioritized",
    "buffer.alpha": 0.6,
    "buffer.beta": 0.4,
    "buffer.epsilon": 1e-6,
    "algo.n_step": 3,
    "algo.double_q": True,
    "algo.dueling": True,
    "algo.noisy": True,
    "algo.num_atoms": 21,
    "algo.tau": 0.5,
}
R2D2 = {
    **RAINBOW,
    "buffer": "sequence",
    "model": "lstm",
    "model.hidden": 16,
    "model.layer_norm": False,
    "model.init": "orthogonal",
    "model.torso.hidden": [16],
    "model.torso.activation": "tanh",
    "model.torso.layer_norm": False,
    "model.torso.init": "orthogonal",
    "train_batch_size": 8,
    "algo.noisy": False,
    "algo.num_atoms": 1,
    "algo.value_rescaling": 1e-3,
}
LSTM = {
    "model": "lstm",
    "model.hidden": 16,
    "model.layer_norm": False,
    "model.init": "orthogonal",
    "model.torso.hidden": [16],
    "model.torso.activation": "tanh",
    "model.torso.layer_norm": False,
    "model.torso.init": "orthogonal",
}
RECURRENT_SAC = {
    **SAC,
    **LSTM,
    "buffer": "sequence",
    "buffer.alpha": 0.6,
    "buffer.beta": 0.4,
    "buffer.epsilon": 1e-6,
    "train_batch_size": 8,
    "algo.n_step": 2,
    "algo.sequence_length": 8,
    "algo.burn_in": 4,
    "algo.stride": 4,
}
REINFORCE = {
    **ON_POLICY,
    "algo": "reinforce",
    "env": "cartpole",
    "rollout_fragment_length": 32,
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
    "ppo_cartpole_recurrent": {**PPO, **LSTM, "env": "cartpole", "algo.max_seq_len": 8},
    "sac_cartpole": {**SAC, "env": "cartpole", "algo.target_entropy_fraction": 0.5},
    "sac_pendulum_recurrent": RECURRENT_SAC,
    "dqn_cartpole": DQN,
    "dqn_cartpole_rainbow": RAINBOW,
    "dqn_cartpole_recurrent": R2D2,
    "reinforce_cartpole": REINFORCE,
}


def overrides(case: str) -> list[str]:
    """The case as words of a command line."""
    settings = {**ALWAYS, **({} if "model" in CASES[case] else MODEL), **CASES[case]}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
