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
    """Check a simulator on rows of its environment; one that ``hides`` the state from them cannot be checked.

    Args:
        env: the environment, possibly closed: the simulator must still work.
        model: the result of its method ``simulator``.
        rows: copies of its rows, each with the preceding action, of synchronous columns.

    Raises:
        AssertionError: the simulator's transitions differ, it is not a pure function of its columns, or an ended state
            does not stay.
    """
    require("env_state" in env.spec.extras, "an environment with a simulator has its state as the extra 'env_state'")
    said = "an environment with a simulator has one group of agents, and resets after the step that ends an episode"
    require(not env.spec.nested and env.autoreset is AutoresetMode.NEXT_STEP, said)
    device = env.traits.device or torch.device("cpu")
    made = [_made(env, *one, *two) for one, two in itertools.pairwise(rows)]
    whole = tree.map(lambda *leaves: torch.as_tensor(np.concatenate(leaves), device=device), *made)
    state, action, expected = whole["env_state"], whole["action"], whole["expected"]
    require(len(action), "the simulator could not be compared: there was no transition")
    given = tree.map(torch.clone, {"state": state, "action": action})
    said = _stepped(model, state, action)
    require(not differences(given, {"state": state, "action": action}), "simulator().step() changes its argument")
    again = differences(said, _stepped(model, state, action))
    require(not again, "simulator().step() gives different results in two calls")
    last = tree.map(lambda x: x[-1:], {"state": state, "action": action, "said": said})
    _same(last["said"], _stepped(model, last["state"], last["action"]), "for a single column gives")
    after = {"next_obs": said["obs"], "next_env_state": said["env_state"]}
    for key in ("reward", "terminated"):
        _agrees(model, key, {"obs": whole["obs"], "env_state": state, "action": action} | after, said[key])
    over = _over(said)
    ended = tree.map(lambda x: x[over], said)
    early = said.pop("truncated").bool() & ~expected.pop("truncated")  # a time limit need not be part of the state
    require(not early.any(), "simulator().step() truncates where the environment does not")
    _same({key: said[key] for key in expected}, expected, "differs from a step of the environment: it gives")
    ended["reward"] = torch.zeros_like(ended["reward"])
    _same(_stepped(model, ended["env_state"], action[over]), ended, "from an ended state, which stays, gives")


def _over(row: Batch) -> Any:
    """Return which columns ``[B]`` have ended: for agents, those in which none goes on."""
    over = row["terminated"] | row["truncated"]
    return over if over.ndim == 1 else over.all(-1) if "alive" not in row else ~row["alive"].any(-1)


def _agrees(model: Any, name: str, rows: Batch, expected: Any) -> None:
    """Check that ``reward`` or ``terminated`` equals what ``step`` gives for the transitions, without side effects."""
    given = tree.map(torch.clone, rows)
    found = getattr(model, name)(rows)
    require(not differences(given, rows), f"simulator().{name}() changes its argument")
    shape = [*getattr(found, "shape", ())]
    require(shape == [*expected.shape], f"simulator().{name}() gives shape {shape}, not {[*expected.shape]}")
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=CLOSE, atol=CLOSE)
    pairs = [(a, b) for a, b in zip(found[wrong].tolist()[:1], expected[wrong].tolist()[:1], strict=True)]
    require(not pairs, f"simulator().{name}() differs from the {name} of step(): {pairs}, which should be equal")


def _made(env: VecEnv, row: Batch, _: Any, after: Batch, action: Any) -> Batch:
    """Return the transitions of columns that continued: observation, state, action and outcome."""
    going = np.flatnonzero(~_over(row) if "terminated" in row else np.ones(len(action), np.bool_))
    expected = {key: after[key] for key in RESULT}
    return tree.map(
        lambda x: x[going],
        {"obs": row["obs"], "env_state": row["env_state"], "action": action, "expected": expected},
    )


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
