"""The base of all parts of networks."""

from __future__ import annotations

from typing import Any

from torch import nn


class Module(nn.Module):
    """A module that is called without torch's hooks, of which it has none: looking for them takes as long as a small
    matrix product."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``forward`` of the same arguments."""
        return self.forward(*args, **kwargs)
