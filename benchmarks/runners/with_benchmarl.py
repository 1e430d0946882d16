"""BenchMARL's MAPPO: one policy that the agents share, and a critic that sees all observations."""

from __future__ import annotations

import tempfile
from contextlib import redirect_stdout
from sys import stderr
from typing import Any

import torch
from benchmarl.algorithms import MappoConfig
from benchmarl.environments import PettingZooTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from cases import Stamps, run

torch.set_num_threads(1)


class Counting(Callback):
    """Counts environment steps, in which all agents act, at the end of every rollout."""

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.stamps = stamps

    def on_batch_collected(self, batch: Any) -> None:
        ended = batch["next", "done"].squeeze(-1)
        self.stamps.returns += batch["next", "agent", "episode_reward"][ended].mean(-2).flatten().tolist()
        self.stamps.count(batch.numel())


def measure(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    rows = case["envs"] * case["rollout"]
    stamps.every = rows
    config = ExperimentConfig.get_from_yaml()
    own = {"on_policy_collected_frames_per_batch": rows, "on_policy_n_envs_per_worker": case["envs"]}
    own |= {"on_policy_n_minibatch_iters": case["epochs"], "on_policy_minibatch_size": rows // case["minibatches"]}
    own |= {"lr": case["lr"], "adam_eps": 1e-5, "gamma": case["gamma"], "clip_grad_val": case["grad_clip"]}
    own |= {"max_n_frames": steps, "evaluation": False, "render": False, "loggers": [], "create_json": False}
    own |= {"sampling_device": "cpu", "train_device": "cpu", "buffer_device": "cpu", "prefer_continuous_actions": False}
    own |= {"share_policy_params": True, "collect_with_grad": False, "checkpoint_interval": 0}
    algorithm = MappoConfig.get_from_yaml()
    chosen = {"lmbda": case["lambda"], "clip_epsilon": case["clip"], "entropy_coef": case["entropy_coeff"]}
    chosen |= {"critic_coef": case["value_coeff"], "share_param_critic": True}
    model = MlpConfig(num_cells=[*case["hidden"]], activation_class=torch.nn.Tanh, layer_class=torch.nn.Linear)
    task = PettingZooTask.SIMPLE_SPREAD.get_from_yaml()
    task.config |= {"max_cycles": 25}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(stderr):
        for target, values in ((config, own | {"save_folder": folder}), (algorithm, chosen)):
            for key, value in values.items():
                if not hasattr(target, key):
                    raise AttributeError(f"{type(target).__name__} has no {key}")
                setattr(target, key, value)
        given = {"task": task, "algorithm_config": algorithm, "model_config": model, "critic_model_config": model}
        Experiment(**given, seed=1, config=config, callbacks=[Counting(stamps)]).run()


if __name__ == "__main__":
    run({"mappo": measure}, ("benchmarl", "torchrl", "torch", "pettingzoo"))
