"""Options with which algorithms learn a probe quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVERYWHERE: dict[str, Any] = {
    "hidden": [32],
    "hiddens": [32],
    "activation": "tanh",
    "lr": 5e-3,
    "actor_lr": 3e-3,
    "critic_lr": 5e-3,
    "value_lr": 5e-3,
    "alpha_lr": None,
    "initial_alpha": 1e-3,
    "opt_type": "adam",
    "entropy_coeff": 0.0,
    "initial_log_std": -1.0,
    "vf_loss_coeff": 1.0,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 4,
    "grad_clip": None,
    "clip_param": 0.3,
    "td_error_loss_fn": "mse",
    "max_seq_len": 4,
    "sequence_length": 6,
    "burn_in": 2,
    "stride": 2,
    "bc_iters": 100,
    "conservative_weight": 0.1,
    "moving_average_sqd_adv_norm_start": 1.0,
    "free_nats": 0.0,
    "kl_scale": 0.01,
    "rep_scale": 0.01,
    "explore_noise": 1.0,
    "model_lr": 5e-3,
    "num_rollouts": 8,
    "rollouts_used": 8,
    "sgd_stepsize": 0.02,
    "episodes_per_batch": 16,
    "population": 16,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {
        "total_steps": 10**7,
        "num_envs": 8,
        "rollout_fragment_length": 16,
        "train_batch_size": 64,
        "num_steps_sampled_before_learning_starts": 256,
        "replay_ratio": 0.25,
    },
    "algo": EVERYWHERE | {"beta": 10.0},
    "model": EVERYWHERE,
    "critic_model": EVERYWHERE,
    "buffer": {"capacity": 4096, "alpha": 1.0, "beta": 1.0},
}
"""common options, set if a run, its algorithm or its models have and use them"""


def set_options(node: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Change options in place; disabled options stay disabled."""
    for key, value in node.items():
        if isinstance(value, dict):
            set_options(value, values)
        elif key == "tau" and 0.0 < value < 1.0:
            node[key] = 0.1
        elif key in ("target_network_update_freq", "target_update_period") and node.get("tau") == 1.0:
            node[key] = min(value, 10)
        elif key in values and value:
            wanted = values[key]
            node[key] = wanted[0] if isinstance(wanted, list) and not isinstance(value, list) else wanted
