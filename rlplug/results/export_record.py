"""Recording of a policy in its environment: the inputs and outputs that an export has to reproduce."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Job, VecEnv
from rlplug.collection.play import Player
from rlplug.context import EnvShard, RunContext
from rlplug.envs.spaces import joined
from rlplug.results.export_policy import NEXT, Policy, flat
from rlplug.types import Batch, EnvSpec

EXPORT = 3  # separates the seeds of these episodes from training's and evaluations'
AT_ONCE = 4  # episodes of the first job; further jobs double it


@dataclass(frozen=True)
class Record:
    """Steps of one environment, episode after episode; arrays ``[steps, ...]`` by the names of the policy's fields.

    Args:
        start: first of the discrete actions.
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    start: np.ndarray
    episodes: int

    @property
    def steps(self) -> int:
        return len(self.outputs["action"])

    def save(self, path: Path) -> None:
        """Write the file that ``export_replay`` reads."""
        arrays: dict[str, Any] = {f"in.{name}": x for name, x in self.inputs.items()} | {
            f"to.{k}": x for k, x in self.outputs.items()
        }
        np.savez(path, start=self.start, **arrays)


def record(policy: Policy, ctx: RunContext, make: Callable[[EnvShard], VecEnv], steps: int) -> Record:
    """Play ``steps`` steps of greedy episodes, and compute the policy's outputs row by row.

    The actions are those that the environment executed. The last episode may be cut.
    """
    rows, firsts = _played(policy, ctx, make, steps)
    inputs = {name: np.asarray(rows[name]) for name in rows if name not in ("action", "reward_after")}
    for name, start in policy.starts.items():
        inputs[name] = inputs[name] + start
    wanted = {x.name: x for x in policy.inputs}
    if "reward" in wanted:
        inputs["reward"] = np.where(firsts, 0, np.roll(rows["reward_after"], 1)).astype(np.float32)
    if "is_first" in wanted:
        inputs["is_first"] = firsts
    inputs = {name: x.astype(wanted[name].dtype, copy=False) for name, x in inputs.items()}
    memory = {x.name: np.zeros((steps, *x.shape), x.dtype) for x in policy.inputs if x.name.startswith("carry.")}
    outputs: dict[str, list[np.ndarray]] = {x.name: [] for x in policy.outputs}
    with torch.inference_mode():
        carry = {name: torch.from_numpy(x[:1]) for name, x in memory.items()}
        for t in range(steps):
            for name, x in carry.items():
                memory[name][t] = x[0]
            row = {name: torch.from_numpy(np.ascontiguousarray(x[t : t + 1])) for name, x in inputs.items()}
            out = policy(row | carry)
            carry = {name: out[f"{NEXT}{name}"] for name in memory}
            for name, x in out.items():
                outputs[name].append(x[0].numpy())
    found = {name: np.stack(x) for name, x in outputs.items()}
    found["action"] = rows["action"]
    return Record(inputs | memory, found, policy.start, int(firsts.sum()))


def _played(
    policy: Policy, ctx: RunContext, make: Callable[[EnvShard], VecEnv], steps: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return observations, masks, native actions and rewards ``[steps, ...]``, and where episodes begin."""
    pieces: list[dict[str, np.ndarray]] = []
    firsts: list[np.ndarray] = []
    native = joined(_native(ctx.spec).action)
    keys = ("obs", "action", *(("action_mask",) if "action_mask" in ctx.spec.extras else ()))
    player = Player(make, policy.algorithm, ctx, "eval", (ctx.seed, EXPORT), keys, policy.normalize, name="an export")
    with closing(player):
        number, missing = 0, steps
        while missing > 0:
            episodes = min(AT_ONCE << number, 32)
            (batch,) = player.play([Job(number, episodes=episodes, mode="greedy", max_steps=steps)])
            for b, length in enumerate(batch["length"].tolist()):
                rows: Batch = tree.take({key: batch[key] for key in (*keys, "reward")}, (slice(length), b))
                rows = tree.map(lambda x: x.cpu().numpy(), rows)
                piece = flat(rows["obs"]) | {"action": native(rows["action"]), "reward_after": rows["reward"]}
                pieces.append(piece | ({"action_mask": rows["action_mask"]} if "action_mask" in rows else {}))
                firsts.append(np.arange(length) == 0)
                missing -= length
            number += 1
    whole: dict[str, Any] = {name: np.concatenate([x[name] for x in pieces])[:steps] for name in pieces[0]}
    return whole, np.concatenate(firsts)[:steps]


def _native(spec: EnvSpec) -> Any:
    (group,) = (spec.native_spaces or spec.groups).values()
    return group
