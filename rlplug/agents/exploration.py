"""Exploration modules of single agents in environments with several: one module per group of agents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.agents.rows import Agent, agents_of, fold, of_groups, spec_of, unfold, view
from rlplug.api import Context, Exploration, Learner, Losses, Segment, Trainable
from rlplug.types import Batch


class GroupExploration(Exploration):
    """Runs a separate module for every group, on the rows of all agents of the group.

    Args:
        chosen: the module's class and settings, ``rlplug.config.Chosen``.
    """

    traceable = True
    knows_agents = True

    def __init__(self, chosen: Any, ctx: Context) -> None:
        super().__init__()
        self.spec, self.members = ctx.spec, of_groups(agents_of(ctx.spec))
        self.num_envs = ctx.num_envs
        specs = {name: spec_of(ctx.spec, agents) for name, agents in self.members.items()}
        self.groups = nn.ModuleDict(
            {name: chosen.build(ctx.child(own, agents=len(self.members[name]))) for name, own in specs.items()}
        )

    def _each(self) -> list[tuple[str, Exploration, list[Agent]]]:
        return [(name, self.groups[name], agents) for name, agents in self.members.items()]  # type: ignore[misc]

    def _joint(self, parts: dict[str, Any]) -> Any:
        return parts if self.spec.nested else next(iter(parts.values()))

    def _folded(self, part: Any, name: str, axis: int = 0) -> Any:
        return fold(part, axis) if self.spec.groups[name].agents else part

    def _unfolded(self, part: Any, name: str, axis: int = 0) -> Any:
        agents = len(self.spec.groups[name].agents)
        return unfold(part, agents, axis) if agents else part

    def initial_carry(self, n: int) -> Batch:
        found = {name: extra.initial_carry(n * len(agents)) for name, extra, agents in self._each()}
        return {name: self._unfolded(carry, name) for name, carry in found.items() if carry}

    def noise_by_env(self) -> Tensor | None:
        """Return the mean over the agents of every environment."""
        levels = [extra.noise_by_env() for _, extra, _ in self._each()]
        found = [x.view(self.num_envs, -1) for x in levels if x is not None]
        return torch.cat(found, 1).mean(1) if found else None

    def intrinsic_reward(self, batch: Batch) -> Tensor | dict[str, Tensor] | None:
        found = {name: extra.intrinsic_reward(view(batch, self.spec, agents)) for name, extra, agents in self._each()}
        given = {name: self._unfolded(x, name, axis=1) for name, x in found.items() if x is not None}
        return self._joint(given) if given else None

    def observe(self, segment: Segment, learner: Learner) -> None:
        low, high, _ = segment.columns.indices(self.num_envs)
        for _, extra, agents in self._each():
            columns, rows = slice(low * len(agents), high * len(agents)), view(segment.batch, self.spec, agents)
            extra.observe(replace(segment, batch=rows, columns=columns), learner)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        joint = Losses({})
        for name, extra, agents in self._each():
            if type(extra).update is Trainable.update and not any(p.requires_grad for p in extra.parameters()):
                continue
            losses, prefix = extra.update(view(batch, self.spec, agents), learner), f"{name}/" * bool(self.spec.nested)
            joint.terms |= {prefix + key: value for key, value in losses.terms.items()}
            joint.metrics |= {prefix + key: value for key, value in losses.metrics.items()}
        return joint


class GroupNoise(GroupExploration):
    """A ``GroupExploration`` of modules that change actions."""

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        changed, after = dict[str, Any](), dict[str, Any]()
        for name, extra, agents in self._each():
            own = self._folded(out[name] if self.spec.nested else out, name)
            before, seen = self._folded(carry.get(name, {}), name), view(step, self.spec, agents)
            changed[name], found = extra.perturb(own, seen, before)
            changed[name] = self._unfolded(changed[name], name)
            after |= {name: self._unfolded(found, name)} if found else {}
        return self._joint(changed), after


def exploration_of(chosen: Any, ctx: Context) -> Exploration:
    """Build an exploration module; with several agents one per group, unless it supports them itself."""
    if chosen.cls.knows_agents or not ctx.spec.has_agents:
        return chosen.build(ctx)
    return (GroupExploration if chosen.cls.perturb is Exploration.perturb else GroupNoise)(chosen, ctx)


def changes_actions(extra: type[Exploration]) -> bool:
    """Return whether modules of this class change actions, and not only rewards."""
    return any(getattr(extra, what) is not getattr(Exploration, what) for what in ("perturb", "perturb_weights"))
