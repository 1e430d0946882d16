"""``check``: the plan of a run, in words."""

from __future__ import annotations

from typing import Any

import torch

from rlplug.api import Buffer, Collector
from rlplug.context import ResolvedRun
from rlplug.trainer.policy import Policy

SMALL = 64
"""rows of a rank's share, below which exchanging gradients takes longer than computing them"""


def describe(resolved: ResolvedRun, policy: Policy, buffer: Buffer, collector: Collector) -> str:
    """Return a table of spaces, modules, memory, devices and updates to come."""
    config, plan, spec = resolved.config, resolved.plan, resolved.spec
    round_steps = resolved.loop.rollout_length * config.num_envs
    limit = f"at most {spec.max_episode_steps} steps an episode" if spec.max_episode_steps else "no step limit"
    table = [("env", f"{config.raw['env'].get('id', config.env.name)}, {config.num_envs} at a time, {limit}")]
    for name, group in spec.groups.items():
        agents = f"{name} x {len(group.agents)}: " if group.agents else ""
        table += [("  obs", f"{agents}{group.obs}"), ("  action", f"{agents}{group.action}")]
    for kind, name, module in (
        ("algo", config.algo.name, policy.algorithm),
        *(("exploration", name, extra) for name, extra in policy.exploration.items()),
    ):
        table.append((kind, f"{name}, {_count(module):,} parameters"))
        table += [
            (f"  {part}", f"{type(inner).__name__}, {_count(inner):,}") for part, inner in module.named_children()
        ]
    row = collector.example()
    rounds = config.total_steps // round_steps
    table += [
        ("buffer", f"{config.buffer.name}, {size(buffer.nbytes(row))}"),
        ("  a row", ", ".join(f"{key} {_shape(leaf)}" for key, leaf in row.items())),
        ("loop", f"{config.loop.name}, {rounds:,} rounds of {round_steps:,} steps"),
        ("  steps", f"{rounds * round_steps:,} of total_steps={config.total_steps:,}"),
        ("  updates", f"about {resolved.loop.updates(rounds * round_steps):,}"),
        (
            "hardware",
            f"{plan.world_size} x {plan.accelerator}, {plan.precision}, {plan.threads} thread(s) of torch",
        ),
        *_shares(resolved, policy, buffer),
        *_actors(resolved),
        ("  products", f"float32 at {plan.float32_matmul_precision} precision"),
        ("logger", ", ".join(config.logger)),
    ]
    return "\n".join(f"{key:<14} {value}" for key, value in table)


def _shares(resolved: ResolvedRun, policy: Policy, buffer: Buffer) -> list[tuple[str, str]]:
    """What each rank has of the whole."""
    num_envs, ranks, batch = resolved.config.num_envs, resolved.plan.world_size, resolved.loop.batch_size
    if ranks == 1:
        return []
    envs = f"{len(policy.ctx.env_ids)} environments"
    if num_envs % ranks:
        envs = f"num_envs={num_envs} does not divide by {ranks}: the first rank collects for all"
    rows = batch // ranks if buffer.off_policy else resolved.loop.rollout_length * num_envs // ranks
    small = "; so few that ranks wait longer for each other than they compute" if rows < SMALL else ""
    return [("  a rank", envs), ("", f"{rows} rows of an update{small}")]


def _actors(resolved: ResolvedRun) -> list[tuple[str, str]]:
    """Who collects, and what for."""
    actors, ray = resolved.plan.actors, resolved.plan.ray
    if actors is None or ray is None:
        return []
    lines = [
        ("  actors", f"{actors.count} of Ray, {resolved.config.num_envs // actors.count} environments each"),
        ("", f"of {ray.address}" if ray.address else "started on this machine for the run"),
    ]
    if actors.evaluation:
        lines.append(("", f"{actors.evaluation} more play evaluations meanwhile"))
    return lines


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shape(leaf: Any) -> str:
    if isinstance(leaf, dict):
        return "{" + ", ".join(f"{key} {_shape(inner)}" for key, inner in leaf.items()) + "}"
    return f"{list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"


def size(n: float) -> str:
    """Bytes, in the unit that a person would choose."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"
