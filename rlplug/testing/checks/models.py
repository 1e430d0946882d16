"""Models: shapes, recurrence over streams, members."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug.config import choose
from rlplug.testing.checks.runs import flat, node_of, option_of, require
from rlplug.testing.context import box
from rlplug.trainer.context import RunContext
from rlplug.types import Batch, ConfigError, EnvSpec, map_leaves

T, B = 6, 3
SPACES: dict[str, spaces.Space[Any]] = {
    "a vector": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "a choice": spaces.Discrete(5),
    "a dict": spaces.Dict({"obs": spaces.Box(-np.inf, np.inf, (4,), np.float32), "action": box(2)}),
    "an image": spaces.Box(0, 255, (3, 84, 84), np.uint8),
}


def check_model(name: str, option: str | None = None, **changes: Any) -> None:
    """On every kind of input that it accepts; one at least."""
    node = node_of("model", option or option_of("model", name), **changes)
    chosen = choose("model", "model", node)
    require(hasattr(chosen.cls, "batched"), "the class says batched = True (it computes ctx.copies itself) or False")
    served = []
    for what, space in SPACES.items():
        torch.manual_seed(0)
        ctx = RunContext(spec=EnvSpec({}), slots={"model": chosen})
        try:
            alone, several = ctx.build("model", space), ctx.build("model", space, copies=3)
        except ConfigError:
            continue
        served.append(what)
        _check_shapes(alone, (), space, what)
        _check_shapes(several, (3,), space, what)
        _check_members(several, space, what)
    require(served, f"{name} accepts none of {', '.join(SPACES)}: tell it a space with check_model")


def inputs(space: spaces.Space[Any], rows: int) -> Any:
    """``[rows, B, ...]``."""
    space.seed(0)
    picks = [[_tensors(space.sample()) for _ in range(B)] for _ in range(rows)]
    return _stack([_stack(row) for row in picks])


def _tensors(x: Any) -> Any:
    return {key: _tensors(part) for key, part in x.items()} if isinstance(x, dict) else torch.as_tensor(np.asarray(x))


def _stack(trees: list[Any]) -> Any:
    if isinstance(trees[0], dict):
        return {key: _stack([tree[key] for tree in trees]) for key in trees[0]}
    return torch.stack(trees)


def _row(x: Any, t: Any) -> Any:
    return map_leaves(lambda leaf: leaf[t], x) if isinstance(x, dict) else x[t]


def _check_shapes(model: Any, lead: tuple[int, ...], space: spaces.Space[Any], what: str) -> None:
    x = inputs(space, T)
    is_first = torch.zeros(T, B, dtype=torch.bool)
    is_first[0], is_first[3, 1] = True, True
    carry: Batch = model.initial_carry(B)
    for key, leaf in flat(carry).items():
        require(len(leaf) == B, f"initial_carry(n) has {key} of shape {list(leaf.shape)}; its leaves are [n, ...]")
    out, last = model(x, carry, is_first)
    _shaped(out, (*lead, T, B, model.out_dim), f"{what} [T, B, ...]", lead)
    require(flat(last).keys() == flat(carry).keys(), "the new carry has other keys than initial_carry")

    at, steps = carry, []
    for t in range(T):
        features, at = model(_row(x, t), at, is_first[t])
        _shaped(features, (*lead, B, model.out_dim), f"{what} [B, ...]", lead)
        steps.append(features)
    torch.testing.assert_close(
        torch.stack(steps, len(lead)),
        out,
        atol=1e-3 * max(1.0, out.abs().max().item()),  # an image is up to 255, unscaled
        rtol=1e-3,
        msg=lambda m: f"row by row {what} gives other features than [T, B, ...] at once: {m}",
    )
    for key, leaf in flat(at).items():
        close = torch.allclose(leaf, flat(last)[key], 1e-3, 1e-3)
        require(close, f"row by row the carry {key} ends elsewhere than after [T, B, ...] at once")
    if carry:
        stale = map_leaves(lambda leaf: leaf + 1.0, last)
        fresh, _ = model(_row(x, 0), carry, is_first[0])
        again, _ = model(_row(x, 0), stale, is_first[0])
        require(torch.equal(fresh, again), "the carry is not cleared where is_first")

    model.zero_grad()
    out.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    require(not without, f"the features do not depend on the parameters {', '.join(without)}")


def _shaped(features: Tensor, shape: tuple[int, ...], what: str, lead: tuple[int, ...]) -> None:
    of = f" with ctx.copies={lead[0]}" if lead else ""
    require(tuple(features.shape) == shape, f"{what} gives features {list(features.shape)}{of}; wanted {list(shape)}")
    require(features.is_floating_point(), f"{what} gives features of type {features.dtype}")
    require(torch.isfinite(features).all(), f"{what} gives features that are not finite")


def _check_members(model: Any, space: spaces.Space[Any], what: str) -> None:
    x = inputs(space, 1)
    out, _ = model(_row(x, 0), model.initial_carry(B), torch.ones(B, dtype=torch.bool))
    same = [i for i in range(1, len(out)) if torch.equal(out[0], out[i])]
    require(not same, f"members of ctx.copies are equal on {what}: initialise each of them by itself")
