"""Settings of torch that hold for a whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlplug.plan import Plan


def set_up_torch(plan: Plan, deterministic: bool) -> None:
    """Set the threads, the matrix-product precision and the determinism of this process."""
    torch.set_num_threads(plan.threads)
    torch.set_float32_matmul_precision(plan.float32_matmul_precision)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat numbers below 1e-38 as zero in this thread and in those that it starts.

    The optimizer's moments of weights without gradients decay to such numbers, which slow a processor down some twenty
    times.
    """
    flushed = (torch.full((1,), 1e-39) * 1).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
