"""``check``: the plan of a run, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rlplug.trainer.trainer import Trainer


SMALL = 64  # rows of a rank's share, below which exchanging gradients takes longer than computing them


def describe(trainer: Trainer) -> str:
    """Spaces, modules, memory, devices and updates to come."""
    config, plan, ctx = trainer.config, trainer.plan, trainer.ctx
    limit = f"at most {ctx.spec.max_episode_steps} steps an episode" if ctx.spec.max_episode_steps else "no step limit"
    table = [("env", f"{config.raw['env'].get('id', config.env.name)}, {config.num_envs} at a time, {limit}")]
    for name, group in ctx.spec.groups.items():
        agents = f"{name} x {len(group.agents)}: " if group.agents else ""
        table += [("  obs", f"{agents}{group.obs}"), ("  action", f"{agents}{group.action}")]
    for kind, name, module in (
        ("algo", config.algo.name, trainer.algorithm),
        *(("exploration", name, extra) for name, extra in trainer.exploration.items()),
    ):
        table.append((kind, f"{name}, {_count(module):,} parameters"))
        table += [
            (f"  {part}", f"{type(inner).__name__}, {_count(inner):,}") for part, inner in module.named_children()
        ]
    row = trainer.collector.example()
    rounds = config.total_steps // trainer.round_steps
    table += [
        ("buffer", f"{config.buffer.name}, {size(trainer.buffer.nbytes(row))}"),
        ("  a row", ", ".join(f"{key} {_shape(leaf)}" for key, leaf in row.items())),
        ("loop", f"{config.loop.name}, {rounds:,} rounds of {trainer.round_steps:,} steps"),
        ("  steps", f"{rounds * trainer.round_steps:,} of total_steps={config.total_steps:,}"),
        ("  updates", f"about {trainer.loop.updates(rounds * trainer.round_steps):,}"),
        (
            "hardware",
            f"{plan.world_size} x {plan.accelerator}, {plan.precision}, {plan.threads} thread(s) of torch",
        ),
        *_shares(trainer),
        *_actors(trainer),
        ("  products", f"float32 at {plan.float32_matmul_precision} precision"),
        ("logger", ", ".join(config.logger)),
    ]
    return "\n".join(f"{key:<14} {value}" for key, value in table)


def _shares(trainer: Trainer) -> list[tuple[str, str]]:
    """What each rank has of the whole."""
    ranks, batch = trainer.plan.world_size, trainer.loop.batch_size
    if ranks == 1:
        return []
    envs = f"{len(trainer.ctx.env_ids)} environments"
    if trainer.replicated:
        envs = f"num_envs={trainer.config.num_envs} does not divide by {ranks}: the first rank collects for all"
    rows = batch // ranks if trainer.buffer.off_policy else trainer.round_steps // ranks
    small = "; so few that ranks wait longer for each other than they compute" if rows < SMALL else ""
    return [("  a rank", envs), ("", f"{rows} rows of an update{small}")]


def _actors(trainer: Trainer) -> list[tuple[str, str]]:
    """Who collects, and what for."""
    actors, ray = trainer.plan.actors, trainer.plan.ray
    if actors is None or ray is None:
        return []
    lines = [
        ("  actors", f"{actors.count} of Ray, {trainer.config.num_envs // actors.count} environments each"),
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
