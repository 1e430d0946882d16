"""Process-wide settings of torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlplug.plan import Plan

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def set_up_torch(plan: Plan, deterministic: bool) -> None:
    """Set threads, memory allocation, matrix-multiplication precision and determinism of this process."""
    torch.set_num_threads(plan.threads)
    _keep_freed_memory()
    torch.set_float32_matmul_precision(plan.float32_matmul_precision)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it would import the compiler
        torch.use_deterministic_algorithms(deterministic)


def _keep_freed_memory() -> None:
    """Set glibc to keep up to 1 GiB of freed memory, and to mmap only blocks of at least 32 MiB.

    By default it returns the tensors of an update to the system, and the next update faults every page again: 350 page
    faults per update of SAC with networks of 256, 6 % of its time, and 50,000 of IMPALA with images, nearly a third.
    Peak memory grows by 1 to 2 %. With another C library, this does nothing.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Flush denormal numbers (below 1e-38) to zero in this thread and in threads that it starts.

    The optimizer's moments of weights without gradients decay to denormals, which slow a CPU down about twenty times.
    """
    flushed = (torch.full((1,), 1e-39) * 1).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
