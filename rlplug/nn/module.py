"""The base class of network modules."""

from __future__ import annotations

from typing import Any

from torch import nn


class Module(nn.Module):
    """A module without hooks: its call skips torch's check for them, which takes as long as a small matrix product."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` with the same arguments."""
        return self.forward(*args, **kwargs)
