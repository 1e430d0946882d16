"""Check that an environment's simulator gives the environment's transitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import VecEnv
from rlplug.testing.checks.runs import differences, flat, require, some
from rlplug.types import Batch

CLOSE = 1e-4  # relative to the size of a number, and absolute near zero
RESULT = ("obs", "reward", "terminated", "truncated", "env_state")


def check_simulator(env: VecEnv, model: Any, rows: Sequence[tuple[Batch, Any]]) -> None:
    """Check a simulator on rows of its environment.

    Args:
        env: the environment, possibly closed: the simulator must still work.
        model: the result of its method ``simulator``.
        rows: copies of its rows, each with the preceding action, of synchronous columns.

    Raises:
        AssertionError: the simulator's transitions differ, or it is not a pure function of its columns.
    """
    device = env.traits.device or torch.device("cpu")
    made = [_made(env, *one, *two) for one, two in itertools.pairwise(rows)]
    whole = tree.map(lambda *leaves: torch.as_tensor(np.concatenate(leaves), device=device), *made)
    state, action, expected = whole["state"], whole["action"], whole["expected"]
    require(len(action), "the simulator could not be compared: there was no transition")
    given = tree.map(torch.clone, {"state": state, "action": action})
    said = _stepped(model, state, action)
    require(not differences(given, {"state": state, "action": action}), "simulator().step() changes its argument")
    again = differences(said, _stepped(model, state, action))
    require(not again, "simulator().step() gives different results in two calls")
    last = tree.map(lambda x: x[-1:], {"state": state, "action": action, "said": said})
    _same(last["said"], _stepped(model, last["state"], last["action"]), "for a single column gives")
    _pays(model, {**said, "action": action})
    early = said.pop("truncated").bool() & ~expected.pop("truncated")  # a time limit is not part of the state
    require(not early.any(), "simulator().step() truncates where the environment does not")
    _same({key: said[key] for key in expected}, expected, "differs from a step of the environment: it gives")


def _pays(model: Any, rows: Batch) -> None:
    """Check that ``reward`` equals the rewards of ``step`` for the same transitions, and has no side effects."""
    expected = rows.pop("reward")
    given = tree.map(torch.clone, rows)
    paid = model.reward(rows)
    require(not differences(given, rows), "simulator().reward() changes its argument")
    shape = [*getattr(paid, "shape", ())]
    require(shape == [*expected.shape], f"simulator().reward() gives shape {shape}, not {[*expected.shape]}")
    wrong = ~torch.isclose(paid.double(), expected.double(), rtol=CLOSE, atol=CLOSE)
    pairs = [(a, b) for a, b in zip(paid[wrong].tolist()[:1], expected[wrong].tolist()[:1], strict=True)]
    require(not pairs, f"simulator().reward() differs from the reward of step(): {pairs}, which should be equal")


def _made(env: VecEnv, row: Batch, _: Any, after: Batch, action: Any) -> Batch:
    """Return the transitions of columns that continued: state, action and outcome."""
    none = np.zeros(len(action), np.bool_)
    over = row.get("terminated", none) | row.get("truncated", none)
    going = np.flatnonzero(~over | (env.autoreset is not AutoresetMode.NEXT_STEP))
    final, ends = after.get("final_obs", after["obs"]), after["terminated"] | after["truncated"]
    obs = tree.map(lambda x, y: np.where(ends.reshape(-1, *[1] * (x.ndim - 1)), y, x), after["obs"], final)
    expected = {"obs": obs} | {key: after[key] for key in ("reward", "terminated", "truncated")}
    if "env_state" in after and env.autoreset is AutoresetMode.NEXT_STEP:
        expected["env_state"] = after["env_state"]
    state = row["env_state" if "env_state" in row else "obs"]
    return tree.map(lambda x: x[going], {"state": state, "action": action, "expected": expected})


def _stepped(model: Any, state: Any, action: Any) -> Batch:
    said = model.step(state, action)
    missing = [key for key in RESULT if key not in said]
    require(not missing, f"simulator().step() gives no {some(missing)}")
    return {key: said[key] for key in RESULT}


def _same(found: Batch, expected: Batch, said: str) -> None:
    """Check that two batches are equal up to rounding, else raise with ``said``."""
    one, two = flat(found), flat(expected)
    require(one.keys() == two.keys(), f"simulator().step() {said} {some(sorted(one.keys() ^ two.keys()))}")
    for name, right in two.items():
        x = one[name]
        require(x.shape == right.shape, f"simulator().step() {said} {name} of shape {[*x.shape]}, not {[*right.shape]}")
        close = torch.isclose(x.double(), right.double(), rtol=CLOSE, atol=CLOSE)
        wrong = [(a, b) for a, b in zip(x[~close].tolist()[:1], right[~close].tolist()[:1], strict=True)]
        require(not wrong, f"simulator().step() {said} {name} {wrong[:1]}, which should be equal")
