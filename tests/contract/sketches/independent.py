# pyright: strict
"""Independent learners, Tan 1993: every agent runs an algorithm of its own.

``Independent`` contains algorithms and knows nothing of what they are: it cuts views and merges results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from rlplug import tree
from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Segment
from rlplug.settings import option, settings
from rlplug.types import Batch, EnvSpec, Group, Mode


class Chosen(Protocol):
    """Candidate for api: a component inside a ``Config``, checked and with its class, but not built."""

    @property
    def cls(self) -> type[Any]: ...
    @property
    def cfg(self) -> Any: ...
    def build(self, ctx: Context) -> Any: ...


SHARED = {"is_first", "valid", "truncated", "index", "sample_prob", "state", "task"}
"""The keys that have no agent axis; see ``rlplug.types``."""


def view(batch: Batch, agent: int, axis: int) -> Batch:
    """What one agent sees of its group's rows: ``[T+1, B, N] -> [T+1, B]``; rows without it are not valid."""
    own: Batch = {key: leaf for key, leaf in batch.items() if key not in SHARED}
    out = {key: batch[key] for key in SHARED if key in batch} | tree.map(lambda x: x.select(axis, agent), own)
    if "valid" in out and "alive" in out:
        out["valid"] = out["valid"] & out["alive"]
    return out


class Independent(Algorithm):
    @settings
    class Config:
        algo: Any = option("The algorithm of every agent.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx = ctx
        self.names = self.agents(ctx.spec)
        self.of: dict[str, Algorithm] = {}
        chosen: Chosen = cfg.algo
        for name, spec in self.names.items():
            child: Algorithm = chosen.build(ctx.child(spec))
            self.of[name] = child
            self.add_module(name, child)

    @staticmethod
    def agents(spec: EnvSpec) -> dict[str, EnvSpec]:
        (group,) = spec.groups.values()
        one = EnvSpec({"agent": Group(group.obs, group.action)}, {}, spec.max_episode_steps)
        return dict.fromkeys(group.agents, one)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        chosen: Chosen = cfg.algo
        (one, *_) = cls.agents(spec).values()
        wanted: Needs = chosen.cls.needs(chosen.cfg, one)
        return replace(wanted, keys=(*wanted.keys, "alive"))

    def views(self, batch: Batch, axis: int = 2) -> Iterable[tuple[str, Algorithm, Batch]]:
        return ((name, child, view(batch, i, axis)) for i, (name, child) in enumerate(self.of.items()))

    def initial_carry(self, n: int) -> Batch:
        return {name: child.initial_carry(n) for name, child in self.of.items()}

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        outs = {name: child.act(rows, carry[name], mode) for name, child, rows in self.views(step, axis=1)}
        first = next(iter(outs.values()))[0]
        joint: Batch = {key: torch.stack([out[key] for out, _ in outs.values()], 1) for key in first}
        return joint, {name: after for name, (_, after) in outs.items()}

    def observe(self, segment: Segment, learner: Learner) -> None:
        for _, child, rows in self.views(segment.batch):
            child.observe(replace(segment, batch=rows), learner)

    def prepare(self, batch: Batch) -> Batch:
        return {name: child.prepare(rows) for name, child, rows in self.views(batch)}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Each child updates itself, with its own optimizers, epochs and stops."""
        joint = Losses({})
        for name, child in self.of.items():
            losses = child.update(batch[name], learner)
            joint.terms |= {f"{name}/{key}": value for key, value in losses.terms.items()}
            joint.metrics |= {f"{name}/{key}": value for key, value in losses.metrics.items()}
        return joint

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(f"{name}.{key}" for name, child in self.of.items() for key in child.actor_keys())
