"""What holds for the whole process."""

from __future__ import annotations

import ctypes

import pytest
import torch

from rlplug.distributed.torch_setup import set_up_torch
from rlplug.plan import Plan

resource = pytest.importorskip("resource")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_of_freed_tensors_is_used_again_without_touching_its_pages_anew():
    set_up_torch(Plan(), deterministic=False)

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def update() -> None:
        kept = [torch.ones(512, 1024) for _ in range(8)]  # 2 MiB each, as the activations of an update
        del kept

    for _ in range(3):
        update()
    before = faults()
    for _ in range(100):
        update()
    assert faults() - before < 8 * 512  # 8 tensors of 512 pages: not even one update of 100 touched them all
