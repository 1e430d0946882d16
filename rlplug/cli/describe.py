"""Description of a run, printed by ``check``."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Dict, Tuple
from torch.nn import Module

from rlplug.envs.spaces import in_words
from rlplug.nn import ActorCritic
from rlplug.script import name_of
from rlplug.terminal import size
from rlplug.trainer.trainer import Trainer

SMALL = 64
"""rows per rank, below which the all-reduce of gradients takes longer than their computation"""


def describe(trainer: Trainer) -> str:
    """Return a table of spaces, modules, memory, devices and planned updates."""
    config, plan, spec, policy = trainer.config, trainer.resolved.plan, trainer.resolved.spec, trainer.policy
    limit = f"at most {spec.max_episode_steps} steps an episode" if spec.max_episode_steps else "no step limit"
    table = [("env", f"{name_of(config.raw['env'])}, {config.num_envs} at a time, {limit}")]
    for name, group in spec.groups.items():
        of = f"{name} x {len(group.agents)}: " if group.agents else f"{name}: " if spec.has_agents else ""
        obs, action = (in_words(space) for space in (group.obs, group.action))
        native = spec.native_spaces.get(name, group).action
        action += f", the parts of {in_words(native)}" if isinstance(native, Dict | Tuple) else ""
        table += [("  agents", f"{name}: {', '.join(group.agents)}")] if group.agents else []
        table += [("  obs", of + obs), ("  action", of + action)]
    explorations = [("exploration", name, extra) for name, extra in policy.exploration.items()]
    for kind, name, module in (("algo", config.algo.name, policy.algorithm), *explorations):
        table.append((kind, f"{name}, {_count(module):,} parameters"))
        table += [line for part, inner in module.named_children() for line in _parts(f"  {part}", inner)]
    table += (
        [("curriculum", f"{config.curriculum.name}, tasks: {in_words(spec.tasks)}")]
        if config.curriculum and spec.tasks
        else []
    )
    row, threads = trainer.collector.spec.row, _many(plan.threads, "thread")
    table += [
        ("buffer", f"{config.buffer.name}, {size(trainer.buffer.nbytes(row))}"),
        ("  a row", ", ".join(f"{key} {_shape(leaf)}" for key, leaf in row.items())),
        *_loop(trainer),
        ("hardware", f"{plan.world_size} x {plan.accelerator}, {plan.precision}, {threads} of torch"),
        *_ranks(trainer),
        *_actors(trainer),
        ("  products", f"float32 at {plan.float32_matmul_precision} precision"),
        ("logger", ", ".join(config.logger)),
    ]
    width = max(len(key) for key, _ in table)
    return "\n".join(f"{key:<{width}} {value}" for key, value in table)


def facts(trainer: Trainer) -> dict[str, Any]:
    """Return the same as numbers and names, with the resolved configuration."""
    config, plan, spec, policy = trainer.config, trainer.resolved.plan, trainer.resolved.spec, trainer.policy
    round_steps = config.rollout_fragment_length * config.num_envs
    steps = config.total_steps // round_steps * round_steps
    counted = trainer.loop.unit == "updates"
    return {
        "env": {
            "name": name_of(config.raw["env"]),
            "num_envs": config.num_envs,
            "max_episode_steps": spec.max_episode_steps,
            "spaces": {
                name: {
                    "agents": len(group.agents) or 1,
                    "names": list(group.agents),
                    "obs": in_words(group.obs),
                    "action": in_words(group.action),
                }
                for name, group in spec.groups.items()
            },
        },
        "algo": {"name": config.algo.name, "parameters": _count(policy.algorithm)},
        "exploration": {name: {"parameters": _count(extra)} for name, extra in policy.exploration.items()},
        "curriculum": config.curriculum and config.curriculum.name,
        "buffer": {"name": config.buffer.name, "bytes": trainer.buffer.nbytes(trainer.collector.spec.row)},
        "loop": {
            "name": config.loop.name,
            "env_steps": None if counted else steps,
            "updates": config.total_steps if counted else trainer.loop.updates(steps) or None,  # None: not known before
        },
        "hardware": {
            "ranks": plan.world_size,
            "accelerator": plan.accelerator,
            "precision": plan.precision,
            "threads": plan.threads,
            "actors": plan.actors.count if plan.actors else 0,
        },
        "config": config.raw,
    }


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _loop(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the numbers of planned rounds and updates."""
    config, loop = trainer.config, trainer.loop
    if loop.unit == "updates":
        return [("loop", config.loop.name), ("  updates", f"total_steps={config.total_steps:,}")]
    if loop.plays:
        return [("loop", config.loop.name), ("  steps", f"total_steps={config.total_steps:,}, in whole episodes")]
    round_steps = config.rollout_fragment_length * config.num_envs
    rounds = config.total_steps // round_steps
    return [
        ("loop", f"{config.loop.name}, {rounds:,} rounds of {_many(round_steps, 'step')}"),
        ("  steps", f"{rounds * round_steps:,} of total_steps={config.total_steps:,}"),
        ("  updates", f"about {loop.updates(rounds * round_steps):,}"),
    ]


def _ranks(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the share of each rank, if there are several."""
    num_envs, ranks = trainer.config.num_envs, trainer.resolved.plan.world_size
    if ranks == 1:
        return []
    envs = f"{len(trainer.ctx.env_ids)} environments"
    if num_envs % ranks:
        envs = f"num_envs={num_envs} is not divisible by {ranks}: rank 0 collects for all"
    ctx = trainer.ctx
    rows = (ctx.batch_size if ctx.needs.data != "rollout" else ctx.rollout_length * num_envs) // ranks
    small = "; too few: ranks wait longer for each other than they compute" if rows < SMALL else ""
    return [("  a rank", envs), ("", f"{rows} rows of an update{small}")]


def _actors(trainer: Trainer) -> list[tuple[str, str]]:
    """Return the Ray actors, if any."""
    actors, ray = trainer.resolved.plan.actors, trainer.resolved.plan.ray
    if actors is None or ray is None:
        return []
    lines = [
        ("  actors", f"{actors.count} in Ray, {trainer.config.num_envs // actors.count} environments each"),
        ("", f"of {ray.address}" if ray.address else "started on this machine for the run"),
    ]
    return [*lines, ("", f"{actors.evaluation} more run evaluations during training")] if actors.evaluation else lines


def _parts(name: str, module: Module) -> list[tuple[str, str]]:
    """Return the size of a part of an algorithm, and of the networks of an actor-critic below it."""
    inner = module.named_children() if isinstance(module, ActorCritic) else ()
    line = (name, f"{type(module).__name__}, {_count(module):,}")
    return [line, *[line for part, network in inner for line in _parts(f"  {name[:2]}{part}", network)]]


def _count(module: Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shape(leaf: Any) -> str:
    if isinstance(leaf, dict):
        return "{" + ", ".join(f"{key} {_shape(inner)}" for key, inner in leaf.items()) + "}"
    return f"{list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"
