"""Find the layers that make rows depend on random numbers or on each other, to name them in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from rlplug import tree
from rlplug.api import Trainable
from rlplug.functional.minibatches import column_axis
from rlplug.testing.checks.runs import flat, require
from rlplug.types import Batch


def layers(root: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> str:
    """Return the names of the submodules of a kind: ``policy.1 (Dropout)``; empty if there is none."""
    return ", ".join(f"{name} ({type(m).__name__})" for name, m in root.named_modules() if isinstance(m, kind))


def random_layers(root: nn.Module) -> str:
    """Suggest a fix for layers that drop values at random; empty if there is none."""
    found = layers(root, (_DropoutNd, nn.RReLU))
    return found and f"{found} drops random values, so ranks, repeats and resumed runs differ: remove it"


def mixing_layers(root: nn.Module) -> str:
    """Suggest a fix for layers that compute batch statistics; empty if there is none."""
    found = layers(root, _BatchNorm)
    return found and f"{found} mixes the rows of a batch: use LayerNorm"


def require_own_rows(alone: Any, among: Any, what: str, root: nn.Module) -> None:
    """Require equal results, up to rounding, for the same rows in different batches.

    Raises:
        AssertionError: they differ; the message begins with ``what``, and names a known responsible layer.
    """
    one, two = flat(alone), flat(among)
    same = one.keys() == two.keys() and all(
        torch.allclose(one[key].double(), two[key].double(), rtol=1e-3, atol=1e-4, equal_nan=True) for key in one
    )
    why = mixing_layers(root) or "look for a mean, a maximum or a normalization over the batch"
    require(same, f"{what} when the batch has other rows: {why}")


def counted(batch: Batch, term: Tensor) -> Tensor | None:
    """Return which elements of a term count: valid rows, and alive agents if it has an agent axis.

    None: all of them.
    """
    valid, alive = batch.get("valid"), batch.get("alive")
    if alive is not None and term.ndim == alive.ndim:
        valid = alive if valid is None else valid[..., None] & alive
    return valid[: len(term)] if valid is not None and term.ndim else None


def check_rows(who: Trainable, batch: Batch, parts: Sequence[str]) -> None:
    """Check that a column's terms do not change when copies of it replace all other columns."""
    axis, terms = column_axis(batch), who.forward(batch, parts).terms
    rows = next((term for term in terms.values() if term.ndim > axis), None)
    if rows is None or (columns := rows.shape[axis]) < 2:
        return
    valid = batch.get("valid", torch.ones(columns, dtype=torch.bool))
    column = int((valid[:-1].any(0) if axis else valid).float().argmax())
    where = [column] * columns
    copies = tree.map(lambda x: x[:, where] if axis and x.ndim > 1 else x[where], batch)
    alone = who.forward(copies, parts).terms
    for name, term in terms.items():
        if term.ndim > axis:
            index = (slice(None),) * axis + (column,)
            mask = counted(batch, term)
            where = ... if mask is None or not axis else mask[index]
            one, other = (x.detach()[index][where] for x in (term, alone[name]))
            require_own_rows(one, other, f"forward() gives the term {name!r} of a row a different value", who)
