"""Sides of a game: a learner plays some of them, and opponents play the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.agents.policies import Policies, require_batches
from rlplug.agents.rows import Agent, agents_of, fold, of_groups, spec_of, unfold, view
from rlplug.api import Algorithm, Context, Needs
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Tree


class Sides:
    """Sides of a game with equal agents, each of which is a side. An algorithm of a single agent plays any of them.

    Attributes:
        agents: of every side, by the side's name; filled by ``build``.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.players, self.agents = ctx, agents_of(ctx.spec), dict[str, Sequence[Agent]]()

    @staticmethod
    def needs(algo: Any, spec: EnvSpec) -> Needs:
        """Return the needs of the learner.

        Raises:
            ConfigError: it cannot play the sides of this game.
        """
        require_batches(algo)
        players, names = _players(spec), ", ".join(agent.name for agent in agents_of(spec))
        if _accepts(algo, spec):
            said = f"{algo.name} learns for all agents at once, but a league trains one side against another"
            raise ConfigError(algo.key, f"{said}; use an algorithm of a single agent, independent, shared or mappo")
        if len(spec.groups) > 1:
            said = f"has the agents {names}, but {algo.name} in a league needs players with equal spaces"
            raise ConfigError("env", f"{said}; independent, shared and mappo have a policy for each group")
        return algo.needs(spec_of(spec, players, "env"))

    def build(self, algo: Any, needs: Needs) -> Algorithm:
        """Return the learner."""
        self.agents = {player.name: [player] for player in self.players}
        return algo.build(self.ctx.child(spec_of(self.ctx.spec, self.players), needs, agents=len(self.players)))

    def initial_carry(self, learner: Algorithm, n: int) -> Batch:
        return unfold(learner.initial_carry(n * len(self.players)), len(self.players))

    def act(
        self,
        learner: Algorithm,
        step: Batch,
        carry: Batch,
        mode: Mode,
        mine: Tensor,
        opponents: Sequence[tuple[Tensor, Any]],
    ) -> tuple[Batch, Batch]:
        """Act for all agents, the learner on the sides where ``mine`` ``[B, sides]`` is true.

        Args:
            opponents: columns ``[n]``, and the policy that plays the other sides in them. It explores as it did when it
                was copied, even if the learner is greedy, and acts at random if the learner does. It draws the same
                numbers as the learner in these columns, so draws do not depend on which of them plays.
        """
        rows, memory, acted = self._rows(step), self._memory(carry), list[tuple[Tensor, tuple[Batch, Batch]]]()
        explore: Mode = "random" if mode == "random" else "explore"
        for columns, policy in opponents:
            index = self._index(columns)
            with self.ctx.apart(columns.tolist()):
                theirs = policy.act(*(tree.take(x, index) for x in (rows, memory)), explore)
            acted.append((index, theirs))
        (out, after), masks = learner.act(rows, memory, mode), self._masks(mine)
        for index, theirs in acted:
            out, after = (_replaced(*each, index) for each in zip((out, after), theirs, masks, strict=True))
        return self._joint(out, after)

    def rows(self, batch: Batch) -> Batch:
        """Return the rows that the learner learns from, in which those of opponents are not valid."""
        rows = self._rows(batch)
        if "carry" in batch:
            rows["carry"] = fold(batch["carry"]["policy"], 1)
        return rows | {"valid": rows["valid"] & rows["mine"]}

    def spread(self, **values: Tensor) -> Batch:
        """Return values of sides ``[B, sides]`` as keys of all agents, nested by group if there are several."""
        each = {name: {key: x[:, i] for key, x in values.items()} for name, i in self._side_of.items()}
        return each if self.ctx.spec.nested else next(iter(each.values()))

    def gather(self, batch: Batch, key: str) -> Tensor:
        """Return by side, ``[..., B, sides]``, the values that ``spread`` returned by agent."""
        return self._each(batch, key)[..., [places[0] for places in self._places]]

    def mean(self, batch: Batch, key: str) -> Tensor:
        """Return the mean over the agents of every side, ``[..., B, sides]``."""
        each = self._each(batch, key)
        return torch.stack([each[..., places].mean(-1) for places in self._places], -1)

    @cached_property
    def _places(self) -> list[list[int]]:
        """Return the positions of every side's agents among all agents."""
        return [[*map(self.players.index, agents)] for agents in self.agents.values()]

    @cached_property
    def _side_of(self) -> dict[str, Tensor]:
        """Return the side of every agent of a group, ``[N]``; 0-d of a group without an agent axis."""
        side = {agent: i for i, own in enumerate(self.agents.values()) for agent in own}
        found = dict[str, Tensor]()
        for name, own in of_groups(self.players).items():
            sides = torch.tensor([side[agent] for agent in own], device=self.ctx.device)
            found[name] = sides if own[0].place is not None else sides[0]
        return found

    def _each(self, batch: Batch, key: str) -> Tensor:
        """Return the values of a key for all agents, ``[..., B, agents]``."""
        groups = [batch[name] for name in self.ctx.spec.groups] if self.ctx.spec.nested else [batch]
        axes = batch["is_first"].ndim
        return torch.cat([x if x.ndim > axes else x.unsqueeze(-1) for x in (part[key] for part in groups)], -1)

    def _rows(self, batch: Batch) -> Batch:
        return view(batch, self.ctx.spec, self.players)

    def _memory(self, carry: Batch) -> Batch:
        return fold(carry)

    def _index(self, columns: Tensor) -> Tensor:
        """Return the places of columns in ``_rows`` and ``_memory``."""
        n = len(self.players)
        return (columns[:, None] * n + torch.arange(n, device=columns.device)).flatten()

    def _masks(self, mine: Tensor) -> tuple[Tree, Tree]:
        """Return where the learner acts: masks for what it returns, and for its carry."""
        return mine.flatten(), mine.flatten()

    def _joint(self, out: Batch, carry: Batch) -> tuple[Batch, Batch]:
        return unfold(out, len(self.players)), unfold(carry, len(self.players))


class Teams(Sides):
    """Sides that the policies of a multi-agent learner play, which may have different spaces.

    Every policy is a side. If the learner has one policy for all agents, every agent is a side.
    """

    policies: Mapping[str, Sequence[Agent]]

    @staticmethod
    def needs(algo: Any, spec: EnvSpec) -> Needs:
        _players(spec)
        return algo.needs(spec)

    def build(self, algo: Any, needs: Needs) -> Algorithm:
        learner: Policies = algo.build(self.ctx.child(self.ctx.spec, needs))
        if frozen := [name for name, policy in learner.table.items() if not policy.learns]:
            raise ConfigError(
                f"{algo.key}.train", f"leaves out {', '.join(frozen)}, but all policies of a league learn"
            )
        self.policies = learner.players
        self.agents = self.policies if len(self.policies) > 1 else {agent.name: [agent] for agent in self.players}
        return learner

    def initial_carry(self, learner: Algorithm, n: int) -> Batch:
        return learner.initial_carry(n)

    def rows(self, batch: Batch) -> Batch:
        return batch | ({"carry": batch["carry"]["policy"]} if "carry" in batch else {})

    def _rows(self, batch: Batch) -> Batch:
        return batch

    def _memory(self, carry: Batch) -> Batch:
        return carry

    def _index(self, columns: Tensor) -> Tensor:
        return columns

    def _masks(self, mine: Tensor) -> tuple[Tree, Tree]:
        of_agents = {name: mine[:, side] for name, side in self._side_of.items()}
        each = torch.cat([x.reshape(len(mine), -1) for x in of_agents.values()], -1)
        of_policies = {name: each[:, [*map(self.players.index, own)]] for name, own in self.policies.items()}
        return of_agents if self.ctx.spec.nested else next(iter(of_agents.values())), of_policies

    def _joint(self, out: Batch, carry: Batch) -> tuple[Batch, Batch]:
        return out, carry


def sides_of(algo: Any) -> type[Sides]:
    """Return how a chosen algorithm plays the sides of a game."""
    return Teams if issubclass(algo.cls, Policies) else Sides


def _players(spec: EnvSpec) -> Sequence[Agent]:
    if len(players := agents_of(spec)) < 2:
        raise ConfigError("env", "has one agent, but a league needs players for at least two sides")
    return players


def _accepts(algo: Any, spec: EnvSpec) -> bool:
    try:
        algo.needs(spec)
    except ConfigError:
        return False
    return True


def _replaced(own: Tree, other: Tree, mask: Tree, index: Tensor) -> Tree:
    """Return ``own`` with the rows of ``other`` at ``index`` where ``mask`` is false; one mask for all leaves below."""
    if isinstance(mask, dict):
        return {key: _replaced(part, other[key], mask[key], index) for key, part in own.items()}
    keep = mask[index]

    def replaced(a: Tensor, b: Tensor) -> Tensor:
        return a.index_copy(0, index, torch.where(keep.view(*keep.shape, *[1] * (b.ndim - keep.ndim)), a[index], b))

    return tree.map(replaced, own, other)
