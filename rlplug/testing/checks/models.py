"""Checks of models: shapes, recurrence over streams, ensemble members, state."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import functional_call

from rlplug import tree
from rlplug.config import choose
from rlplug.context import RunContext
from rlplug.testing.checks.causes import random_layers, require_own_rows
from rlplug.testing.checks.exports import check_model_export
from rlplug.testing.checks.runs import flat, node_of, option_of, require
from rlplug.testing.context import box
from rlplug.types import Batch, ConfigError, EnvSpec

T, B = 6, 3
VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
SMALL = spaces.Box(0, 255, (7, 7, 3), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "a vector": VECTOR,
    "a choice": spaces.Discrete(5),
    "choices": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(4),
    "a dict": spaces.Dict({"obs": VECTOR, "action": box(2)}),
    "an image": spaces.Box(0, 255, (3, 84, 84), np.uint8),
    "a small image": SMALL,
    "a dict with an image": spaces.Dict(
        {"inner": spaces.Dict({"image": SMALL, "way": spaces.Discrete(4)}), "0": VECTOR},
    ),
}


def check_model(name: str, option: str | None = None, **changes: Any) -> None:
    """Check a model on every kind of input that it accepts, at least one."""
    node = node_of("model", option or option_of("model", name), **changes)
    chosen = choose("model", "model", node)
    require(hasattr(chosen.cls, "batched"), "set batched = True (it computes ctx.ensemble_size itself) or False")
    served = []
    for what, space in SPACES.items():
        torch.manual_seed(0)
        ctx = RunContext(spec=EnvSpec({}), slots={"model": chosen})
        try:
            alone, several = ctx.build("model", space), ctx.build("model", space, ensemble_size=3)
        except ConfigError:
            continue
        _check_rows(alone, space, what)
        if not served:  # one space is enough
            check_model_export(alone, space, what)
        served.append(what)
        _check_shapes(alone, (), space, what)
        _check_shapes(several, (3,), space, what)
        _check_members(several, space, what)
        _check_state(ctx, alone, space, what)
        recurrent = getattr(chosen.cls, "recurrent", None)
        require(recurrent == bool(alone.initial_carry(B)), "set recurrent = True (it has a carry) or False")
    require(served, f"{name} accepts none of {', '.join(SPACES)}: pass a space to check_model")


def _check_rows(model: Any, space: spaces.Space[Any], what: str) -> None:
    """Check that features depend only on a row and its stream."""
    x, carry, is_first = inputs(space, T), model.initial_carry(B), _beginnings()
    (first, _), (again, _) = model(x, carry, is_first), model(x, carry, is_first)
    why = random_layers(model) or "draw nothing in forward()"
    require(torch.equal(first, again), f"{what}: two calls on the same rows give different features: {why}")
    for column in range(B):
        copies = tree.map(lambda leaf: leaf[:, [column] * B], x)  # noqa: B023
        alike, _ = model(copies, carry, is_first[:, [column] * B])
        said = f"{what}: forward() gives a row different features"
        require_own_rows(first[..., column, :], alike[..., column, :], said, model)


def inputs(space: spaces.Space[Any], rows: int) -> Any:
    """Return random inputs ``[rows, B, ...]``."""
    space.seed(0)
    picks = [space.sample() for _ in range(rows * B)]
    return tree.map(lambda *x: torch.as_tensor(np.stack(x)).unflatten(0, (rows, B)), *picks)


def _check_shapes(model: Any, lead: tuple[int, ...], space: spaces.Space[Any], what: str) -> None:
    x = inputs(space, T)
    is_first = _beginnings()
    carry: Batch = model.initial_carry(B)
    for key, leaf in flat(carry).items():
        require(len(leaf) == B, f"initial_carry(n) has {key} of shape {list(leaf.shape)}; its leaves are [n, ...]")
    out, last = model(x, carry, is_first)
    _shaped(out, (*lead, T, B, model.out_dim), f"{what} [T, B, ...]", lead)
    require(flat(last).keys() == flat(carry).keys(), "the new carry has different keys than initial_carry")

    at, steps = carry, []
    for t in range(T):
        features, at = model(tree.take(x, t), at, is_first[t])
        _shaped(features, (*lead, B, model.out_dim), f"{what} [B, ...]", lead)
        for key, leaf in flat(at).items():
            wanted = flat(carry)[key]
            same = (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
            require(same, f"the carry {key} becomes {leaf.dtype} {list(leaf.shape)}, unlike initial_carry")
        steps.append(features)
    by_row = torch.stack(steps, len(lead))
    _same(by_row, out, f"row by row {what} gives different features than [T, B, ...] at once")
    for key, leaf in flat(at).items():
        close = torch.allclose(leaf, flat(last)[key], 1e-3, 1e-3)
        require(close, f"row by row the carry {key} ends differently than after [T, B, ...] at once")
    if carry:
        stale = tree.map(lambda leaf: leaf + 1.0, last)
        fresh, _ = model(tree.take(x, 0), carry, is_first[0])
        again, _ = model(tree.take(x, 0), stale, is_first[0])
        require(torch.equal(fresh, again), "the carry is not cleared where is_first")
        _check_streams(model, lead, x, out, what)

    model.zero_grad()
    if any(p.requires_grad for p in model.parameters()):
        out.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    require(not without, f"the features do not depend on the parameters {', '.join(without)}")


def _check_streams(model: Any, lead: tuple[int, ...], x: Any, out: Tensor, what: str) -> None:
    """Check that one unroll over several episodes equals an unroll of each episode."""
    zeros, none = model.initial_carry(B), torch.zeros(T, B, dtype=torch.bool)
    out = out.movedim(len(lead), 0)
    for start, column in _beginnings().nonzero().tolist():
        end = next((t for t in range(start + 1, T) if _beginnings()[t, column]), T)
        rows = tree.take(x, slice(start, end))
        alone, _ = model(rows, zeros, none[start:end])
        alone = alone.movedim(len(lead), 0)
        _same(
            alone[..., column, :],
            out[start:end, ..., column, :],
            f"{what}: a single episode gives different features than inside [T, B, ...]",
        )
    empty, _ = model(x, {}, _beginnings())
    _same(empty.movedim(len(lead), 0), out, "an empty carry is not what initial_carry gives")


def _check_state(ctx: RunContext, model: Any, space: spaces.Space[Any], what: str) -> None:
    """Check that features depend only on ``state_dict()``, and on the weights of a functional call."""
    x, carry, is_first = inputs(space, T), model.initial_carry(B), _beginnings()
    expected, _ = model(x, carry, is_first)
    other = ctx.build("model", space)
    given = {name: value.detach() for name, value in model.state_dict().items()}
    called, _ = functional_call(other, given, (x, carry, is_first))
    require(torch.equal(called, expected), f"{what}: under functional_call it does not use the given weights")
    require(not called.requires_grad, f"{what}: under functional_call it also uses other weights")
    other.load_state_dict(given)
    require(torch.equal(other(x, carry, is_first)[0], expected), f"{what}: state_dict() is incomplete")
    copy = pickle.loads(pickle.dumps(model))
    require(torch.equal(copy(x, carry, is_first)[0], expected), f"{what}: a pickled copy gives different features")


def _beginnings() -> Tensor:
    """Return ``is_first [T, B]`` with columns that start together and end at different rows."""
    is_first = torch.zeros(T, B, dtype=torch.bool)
    is_first[0], is_first[3, 1], is_first[4, 1], is_first[5, 2] = True, True, True, True
    return is_first


def _same(a: Tensor, b: Tensor, message: str) -> None:
    scale = max(1.0, b.detach().abs().max().item())
    torch.testing.assert_close(a, b, atol=1e-4 * scale, rtol=1e-3, msg=lambda m: f"{message}: {m}")


def _shaped(features: Tensor, shape: tuple[int, ...], what: str, lead: tuple[int, ...]) -> None:
    of = f" with ctx.ensemble_size={lead[0]}" if lead else ""
    require(tuple(features.shape) == shape, f"{what} gives features {list(features.shape)}{of}; expected {list(shape)}")
    require(features.is_floating_point(), f"{what} gives features of type {features.dtype}")
    require(torch.isfinite(features).all(), f"{what} gives features that are not finite")


def _check_members(model: Any, space: spaces.Space[Any], what: str) -> None:
    x = inputs(space, 1)
    out, _ = model(tree.take(x, 0), model.initial_carry(B), torch.ones(B, dtype=torch.bool))
    same = [i for i in range(1, len(out)) if torch.equal(out[0], out[i])]
    alone = not list(model.parameters())  # nothing to initialize
    require(alone or not same, f"members of ctx.ensemble_size are equal on {what}: initialize each of them by itself")
