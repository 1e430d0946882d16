"""Rows of some agents as columns of a single agent, and the results of single agents as rows of all.

``N`` agents of ``B`` columns become ``B * N`` columns, in which the agents of a column are adjacent. The share of a
rank or of an actor is therefore contiguous, and the order of rows does not depend on how many ranks or actors there
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Tree

BY_ROW = ("is_first", "valid")
BY_COLUMN = ("index", "sample_prob", "weight", "version")
OF_EPISODE = ("return", "length", "success", "metrics")
OF_COLUMN = frozenset({*BY_ROW, *BY_COLUMN, *OF_EPISODE, "task", "carry", "priority", "gradients"})
"""keys without an agent axis, in addition to the environment's extras"""


class Agent(NamedTuple):
    """An agent of an environment."""

    group: str
    name: str  # the group's name, if the group is a single agent without an axis
    place: int | None  # on the agent axis of its group; None: there is no axis


def agents_of(spec: EnvSpec) -> list[Agent]:
    """Return all agents, in the order of groups and places."""
    return [
        Agent(name, agent or name, place if agent else None)
        for name, group in spec.groups.items()
        for place, agent in enumerate(group.agents or ("",))
    ]


def of_groups(agents: Sequence[Agent]) -> dict[str, list[Agent]]:
    """Return agents by group, each in the order of its place."""
    groups = dict.fromkeys(agent.group for agent in agents)
    return {name: [agent for agent in agents if agent.group == name] for name in groups}


def spec_of(spec: EnvSpec, agents: Sequence[Agent], who: str = "") -> EnvSpec:
    """Return the environment as seen by a single agent whose rows are those of ``agents``.

    Args:
        who: name of what the agents share, for the message.

    Raises:
        ConfigError: their spaces differ.
    """
    found = [_alone(spec, agent.group) for agent in agents]
    for agent, own in zip(agents, found, strict=True):
        if own != found[0]:
            one, other = f"{agents[0].name} ({_spaces(found[0])})", f"{agent.name} ({_spaces(own)})"
            raise ConfigError(who, f"plays agents of different spaces: {one} and {other}; give each its own policy")
    return found[0]


def _alone(spec: EnvSpec, name: str) -> EnvSpec:
    group, own = spec.groups[name], spec.extras if len(spec.groups) == 1 else spec.groups[name].extras
    extras = {key: own[key] for key in ("action_mask",) if key in own}
    native = {name: Group(spec.native_spaces[name].obs, spec.native_spaces[name].action)} if spec.native_spaces else {}
    return EnvSpec({name: Group(group.obs, group.action)}, extras, spec.max_episode_steps, native_spaces=native)


def _spaces(spec: EnvSpec) -> str:
    (group,) = spec.groups.values()
    return f"{group.obs}, {group.action}" + ", with masks" * spec.has_masks


def fold(tree_: Tree, axis: int = 0) -> Tree:
    """Turn columns x agents into columns: leaves ``[..., B, N, ...]``, ``B`` on ``axis``, to ``[..., B*N, ...]``."""
    return tree.map(lambda x: x.flatten(axis, axis + 1), tree_)


def unfold(tree_: Tree, agents: int, axis: int = 0) -> Tree:
    """Undo ``fold``: leaves ``[..., B*N, ...]`` to ``[..., B, N, ...]``."""
    return tree.map(lambda x: x.unflatten(axis, (-1, agents)), tree_)


def with_ids(x: Tensor, agents: int) -> Tensor:
    """Append the one-hot code of every row's agent to vectors of a view, ``[..., B*N, F]`` to ``[..., B*N, F + N]``."""
    codes = torch.eye(agents, dtype=x.dtype, device=x.device).repeat(x.shape[-2] // agents, 1)
    return torch.cat([x, codes.expand(*x.shape[:-1], agents)], -1)


def view(batch: Batch, spec: EnvSpec, agents: Sequence[Agent]) -> Batch:
    """Return the rows of some agents, which have equal spaces, as columns of a single agent.

    An agent's rows obey the stream rule: ``valid`` is ``valid & alive``, and ``is_first`` is ``agent_is_first`` if the
    batch has it, so an agent that joins late or comes back begins where it is alive again. ``alive`` is kept, since
    it marks rows of agents. Where an agent that is not alive has no allowed action, all are allowed.

    Args:
        batch: rows of all agents: a step ``[B, ...]``, a segment or a sample ``[T+1, B, ...]``.

    Returns:
        Leaves ``[B*N, ...]`` or ``[T+1, B*N, ...]``.
    """
    axis, n = batch["is_first"].ndim - 1, len(agents)
    shared = OF_COLUMN | (spec.extras.keys() - {"action_mask"}) | {*spec.nested}
    parts = [_part(batch, spec, name, own, axis, shared) for name, own in of_groups(agents).items()]
    rows = parts[0] if len(parts) == 1 else tree.cat(parts, axis + 1)
    out = fold(rows, axis)
    for keys, at in ((BY_ROW, axis), (BY_COLUMN, 0)):
        out |= {key: batch[key].repeat_interleave(n, at) for key in keys if key in batch}
    if "valid" in out:
        out["valid"] = out["valid"] & out["alive"]
    if "agent_is_first" in out:
        out["is_first"] = out.pop("agent_is_first")
    if "action_mask" in out:
        mask = out["action_mask"]
        out["action_mask"] = mask | ~(mask.any(-1) | out["alive"]).unsqueeze(-1)
    return out


def _part(
    batch: Batch, spec: EnvSpec, name: str, agents: Sequence[Agent], axis: int, shared: frozenset[str] | set[str]
) -> Batch:
    """Return what belongs to some agents of a group, leaves ``[..., B, N, ...]``."""
    part = {key: leaf for key, leaf in (batch[name] if spec.nested else batch).items() if key not in shared}
    if agents[0].place is None:
        return tree.map(lambda x: x.unsqueeze(axis + 1), part)
    places = [agent.place or 0 for agent in agents]
    if places == [*range(len(spec.groups[name].agents))]:
        return part
    low, high = places[0], places[-1]
    if places == [*range(low, high + 1)]:
        return tree.map(lambda x: x.narrow(axis + 1, low, high + 1 - low), part)
    return tree.map(lambda x: x.index_select(axis + 1, torch.tensor(places, device=x.device)), part)


def merge(outs: Mapping[str, Batch], players: Mapping[str, Sequence[Agent]], spec: EnvSpec, axis: int = 0) -> Batch:
    """Return the rows of all agents from the results of policies; undoes ``view``.

    Args:
        outs: results of every policy, leaves ``[..., B*N, ...]`` with columns on ``axis``.
        players: the agents of every policy. A key that only some policies of a group return is 0 for the other agents.

    Returns:
        Leaves ``[..., B, N, ...]``, nested by group if there are several; groups that no policy plays are missing.
    """
    joint: Batch = {}
    for policy, out in outs.items():
        begin, rows = 0, unfold(out, len(players[policy]), axis)
        for name, agents in of_groups(players[policy]).items():
            own = tree.map(lambda x: x.narrow(axis + 1, begin, len(agents)), rows)  # noqa: B023  called here
            joint.setdefault(name, []).append((agents, own))
            begin += len(agents)
    for name, parts in joint.items():
        joint[name] = _joined(parts, axis)
    return joint if spec.nested else next(iter(joint.values()))


def _joined(parts: Sequence[tuple[Sequence[Agent], Batch]], axis: int) -> Batch:
    """Return the rows of a group, in the order of places."""
    agents, rows = zip(*parts, strict=True)
    if agents[0][0].place is None:
        return tree.map(lambda x: x.squeeze(axis + 1), rows[0])
    places = [agent.place or 0 for part in agents for agent in part]
    if len(rows) == 1 and places == [*range(len(places))]:
        return rows[0]
    order = sorted(range(len(places)), key=places.__getitem__)
    like = {key: leaf for part in rows for key, leaf in part.items()}
    return {
        key: _cat([part.get(key) for part in rows], [*map(len, agents)], leaf, order, axis + 1)
        for key, leaf in like.items()
    }


def _cat(parts: Sequence[Any], counts: Sequence[int], like: Tree, order: Sequence[int], axis: int) -> Tree:
    """Concatenate agents, with zeros like ``like`` for a missing part, and put them in order."""
    none = tree.map(lambda x: torch.zeros_like(x.narrow(axis, 0, 1)), like)
    full = [
        tree.map(lambda x: x.expand(*x.shape[:axis], n, *x.shape[axis + 1 :]), none) if part is None else part  # noqa: B023
        for part, n in zip(parts, counts, strict=True)
    ]
    whole = tree.cat(full, axis)
    if [*order] == [*range(len(order))]:
        return whole
    return tree.map(lambda x: x.index_select(axis, torch.tensor(order, device=x.device)), whole)
