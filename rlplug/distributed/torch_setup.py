"""What a run decides about torch in its process."""

from __future__ import annotations

import os

import torch

from rlplug.plan import Plan


def set_up_torch(plan: Plan, deterministic: bool) -> None:
    """Threads, precision and determinism of this process."""
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision(plan.float32_matmul_precision)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
