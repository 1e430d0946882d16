"""Check a model's outputs against its declared attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch


def model_misfit(model: Any, x: Any, members: int, generators: Mapping[str, torch.Generator]) -> tuple[str, str] | None:
    """Run a model on rows ``x`` without side effects; return the wrong member and the reason, or None.

    Args:
        members: number of members on a leading axis.
        generators: restored afterwards, like torch's own.
    """
    if not isinstance(getattr(model, "out_dim", None), int):
        return "out_dim", "is missing; set it in __init__ to the size of the features"
    states = {role: generator.get_state() for role, generator in generators.items()}
    modes = [(part, part.training) for part in model.modules()]
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = tree.map(lambda leaf: leaf.to(where), x)
    with torch.no_grad(), torch.random.fork_rng([] if where.type == "cpu" else None):
        if not isinstance(carry := model.initial_carry(2), dict):
            return "initial_carry", f"returned {tree.what(carry)}; return a dict"
        returned = model.eval()(x, carry, torch.ones(2, dtype=torch.bool, device=where))
    for part, training in modes:
        part.training = training
    for role, state in states.items():
        generators[role].set_state(state)
    if why := pair_misfit(returned, "features", Tensor):
        return "forward", why
    shape = (*((members,) if members > 1 else ()), 2, model.out_dim)
    if (features := returned[0]).shape != shape:
        said = f"returned features of shape {[*features.shape]} for 2 rows; with out_dim={model.out_dim} they have"
        return "forward", f"{said} {[*shape]}"
    if type(model).recurrent != bool(carry):
        said = "nothing" if type(model).recurrent else f"the carry {', '.join(carry)}"
        return "initial_carry", f"returned {said}; the class declares recurrent =  {type(model).recurrent}"
    if _shapes(returned[1]) != _shapes(carry):
        return "forward", f"returned the carry {_shapes(returned[1])}; initial_carry gives {_shapes(carry)}"
    return None


def pair_misfit(returned: Any, first: str, cls: type[Any]) -> str | None:
    """Return what is wrong with a value that should be ``(first, carry)``, or None."""
    pair = isinstance(returned, tuple) and len(returned) == 2
    if pair and isinstance(returned[0], cls) and isinstance(returned[1], dict):
        return None
    got = f"({', '.join(map(tree.what, returned))})" if pair else tree.what(returned)
    return f"returned {got}; return ({first}, a dict with the carry)"


def _shapes(carry: Batch) -> str:
    return ", ".join(
        f"{key} {[*leaf.shape] if isinstance(leaf, Tensor) else tree.what(leaf)}" for key, leaf in carry.items()
    )
