"""Settings of torch that hold for a whole process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlplug.plan import Plan

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def set_up_torch(plan: Plan, deterministic: bool) -> None:
    """Set the threads, the memory allocation, the matrix-product precision and the determinism of this process."""
    torch.set_num_threads(plan.threads)
    _keep_freed_memory()
    torch.set_float32_matmul_precision(plan.float32_matmul_precision)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
        torch.use_deterministic_algorithms(deterministic)


def _keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB that was freed, and map only blocks of 32 MiB and more by themselves.

    By default it gives the tensors of an update back to the system, and the next update touches every page anew: 350
    page faults for an update of SAC with networks of 256, 6 % of its time, and 50,000 for one of IMPALA with images,
    nearly a third. Peak memory grows by 1 to 2 %. Where the C library is another one, nothing changes.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


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
