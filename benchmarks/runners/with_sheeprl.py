"""SheepRL, by its command line."""

from __future__ import annotations

import sys
import tempfile
from contextlib import chdir, redirect_stdout
from typing import Any

import gymnasium
import torch
from cases import Stamps, counted, run
from sheeprl.cli import run as sheeprl

torch.set_num_threads(1)


def words(case: dict[str, Any], steps: int) -> list[str]:
    """Return the command line."""
    said = ["fabric.accelerator=cpu", "fabric.devices=1", "float32_matmul_precision=highest", "env.sync_env=True"]
    said += [f"exp={case['algo']}", f"env.id={case['env']}", f"env.num_envs={case['envs']}", "env.capture_video=False"]
    said += ["algo.run_test=False", "checkpoint.every=0", "checkpoint.save_last=False", "buffer.memmap=False"]
    said += [f"algo.total_steps={steps}", f"algo.gamma={case['gamma']}"]
    if case["algo"] == "sac":
        for part in ("actor", "critic", "alpha"):
            said += [f"algo.{part}.optimizer.lr={case['lr']}", f"algo.{part}.optimizer.eps=1e-8"]
        said += [f"algo.tau={case['tau']}", f"algo.hidden_size={case['hidden'][0]}", "algo.replay_ratio=1.0"]
        said += [f"algo.per_rank_batch_size={case['batch']}", f"buffer.size={case['capacity']}"]
        return [*said, f"algo.learning_starts={case['learning_starts']}", "buffer.checkpoint=False"]
    rows = case["envs"] * case["rollout"]
    said += [f"algo.optimizer.lr={case['lr']}", "algo.optimizer.eps=1e-5", f"algo.rollout_steps={case['rollout']}"]
    said += [f"algo.update_epochs={case['epochs']}", f"algo.per_rank_batch_size={rows // case['minibatches']}"]
    said += [f"algo.gae_lambda={case['lambda']}", f"algo.clip_coef={case['clip']}", "algo.normalize_advantages=True"]
    said += [f"algo.vf_coef={case['value_coeff']}", f"algo.ent_coef={case['entropy_coeff']}"]
    # two networks that share nothing
    return [*said, f"algo.max_grad_norm={case['grad_clip']}", "algo.encoder.mlp_layers=0"]


def measure(case: dict[str, Any], steps: int, stamps: Stamps) -> None:
    if case["algo"] == "ppo":
        stamps.every = case["envs"] * case["rollout"]  # at the end of rollouts, so that as many updates lie between
    counted(gymnasium.vector.SyncVectorEnv, stamps)
    sys.argv = [sys.argv[0], *words(case, steps)]
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(sys.stderr):
        sheeprl()


if __name__ == "__main__":
    run(dict.fromkeys(("ppo", "sac"), measure), ("sheeprl", "torch", "gymnasium"))
