"""What the host may look at while a device computes."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling


def reads_freely(x: Tensor) -> bool:
    """Return whether reading ``x [...]`` costs the host nothing: it does not wait for a device, and traces nothing.

    A function that takes a shortcut after such a look also serves where it is compiled or recorded.
    """
    return x.is_cpu and not is_compiling()
