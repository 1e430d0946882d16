"""Base of algorithms that consist of policies, each of which is an algorithm and plays some of the agents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlplug.agents.rows import Agent, fold, merge, unfold, view
from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Segment, Trainable
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


@dataclass(frozen=True)
class Policy:
    """A policy, the agents that it plays, and the environment as one of them sees it."""

    algo: Any  # chosen algorithm
    agents: Sequence[Agent]
    spec: EnvSpec
    models: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """chosen models of its own, by slot"""
    learns: bool = True

    @property
    def needs(self) -> Needs:
        needs: Needs = self.algo.needs(self.spec)
        return self.algo.recurrent(needs) if any(model.cls.recurrent for model in self.models.values()) else needs


class Policies(Algorithm):
    """Runs one algorithm per policy, on the rows of its agents.

    A policy is a submodule of ``learners``. Its carry is stored as ``{policy: leaves [B, N, ...]}``. The priority of a
    row is the mean over the agents that act on it.
    """

    traceable = True

    @classmethod
    def policies(cls, cfg: Any, spec: EnvSpec) -> dict[str, Policy]:
        """Return the policies by name. Raises ``ConfigError`` if one cannot play its agents."""
        raise NotImplementedError(f"{cls.__name__}.policies")

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> Needs:
        if not spec.has_agents:
            raise ConfigError("env", f"{cls.__name__.lower()} needs several agents, but gets one; use algo=ppo for one")
        return joint(cls.policies(cfg, spec))

    @classmethod
    def recurrent(cls, cfg: Any, needs: Needs) -> Needs:
        """Return the needs if the policies without a model of their own are recurrent."""
        every = [algo.recurrent(needs) for algo in cls.sharing(cfg)] or [needs]
        for its in every:
            if its.window != every[0].window and needs.data == "windows":
                raise ConfigError("algo.policies", "have recurrent models with sequences of different lengths")
        keys = tuple(dict.fromkeys(key for its in every for key in its.keys))
        return replace(every[0], keys=keys)

    @classmethod
    def sharing(cls, cfg: Any) -> list[Any]:
        """Return the algorithms of the policies that use the run's models."""
        return [cfg.algo]

    def __init__(self, cfg: Any, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.table = self.policies(cfg, ctx.spec)
        self.players = {name: policy.agents for name, policy in self.table.items()}
        self.learners = nn.ModuleDict()
        named = {module_name(name): name for name in self.table}
        for name, policy in self.table.items():
            if (other := named[module_name(name)]) != name:
                raise ConfigError("algo", f"the policies {name!r} and {other!r} differ in punctuation only; rename one")
            options = {"agents": len(policy.agents), "models": policy.models}
            slots, needs = ctx.child(policy.spec, **options).slots, policy.algo.needs(policy.spec)
            if any(model.cls.recurrent for model in slots.values()):
                needs = policy.algo.recurrent(needs)
            needs = replace(needs, recorded=ctx.needs.recorded)
            self.learners[module_name(name)] = policy.algo.build(ctx.child(policy.spec, needs, **options))
            if type(self.named_policy(name)).postprocess is not Algorithm.postprocess:
                raise ConfigError(
                    policy.algo.key, f"{policy.algo.name} changes segments, which has several agents here"
                )
            if not policy.learns:
                self.named_policy(name).requires_grad_(False)

    def named_policy(self, name: str) -> Algorithm:
        """Return the algorithm of a policy.

        Raises:
            ConfigError: there is no such policy.
        """
        if name not in self.table:
            raise ConfigError("", f"there is no policy {name!r}; the policies are {', '.join(self.table)}")
        return cast(Algorithm, self.learners[module_name(name)])

    def adopt(self, policy: str, other: Algorithm) -> None:
        if not policy:
            policies = ", ".join(self.table)
            raise ConfigError("", f"name the policy that the other run plays, as in against.<policy>: {policies}")
        own, its = self.named_policy(policy), other.named_policy(policy)
        own.load_state_dict(its.state_dict())

    def episode_metrics(self, batch: Batch) -> dict[str, float]:
        """Also return the mean return of every policy's agents."""
        metrics = super().episode_metrics(batch)
        for name, agents in self.players.items():
            rows = view(batch, self.ctx.spec, agents)
            returns = torch.where(rows["valid"], rows["reward"].double(), 0.0).sum(0)
            metrics[f"eval/return/{name}"] = returns.mean().item()
        return metrics

    def view(self, batch: Batch, name: str) -> Batch:
        """Return the rows of a policy's agents, as columns of a single agent.

        Rows that the opponent of a league played, whose ``mine`` is false, are not valid.
        """
        rows = view(batch, self.ctx.spec, self.players[name])
        if "mine" in rows:
            rows["valid"] = rows["valid"] & rows["mine"]
        if "carry" in batch:
            rows["carry"] = fold(batch["carry"].get(name, {}), 1)
        return rows

    def _views(self, batch: Batch) -> Iterator[tuple[str, Algorithm, Batch]]:
        """Yield name, algorithm and rows of the policies that learn."""
        for name, policy in self.table.items():
            if policy.learns:
                yield name, self.named_policy(name), self.view(batch, name)

    def initial_carry(self, n: int) -> Batch:
        found = {
            name: (self.named_policy(name).initial_carry(n * len(own)), len(own)) for name, own in self.players.items()
        }
        return {name: unfold(carry, agents) for name, (carry, agents) in found.items() if carry}

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        outs, after = dict[str, Batch](), dict[str, Any]()
        for name, policy in self.table.items():
            how: Mode = mode if policy.learns or mode == "greedy" else "explore"
            outs[name], found = self.named_policy(name).act(self.view(step, name), fold(carry.get(name, {})), how)
            after |= {name: unfold(found, len(policy.agents))} if found else {}
        return merge(outs, self.players, self.ctx.spec), after

    def observe(self, segment: Segment, learner: Learner) -> None:
        low, high, _ = segment.columns.indices(len(self.ctx.env_ids))
        for name, child, rows in self._views(segment.batch):
            if type(child).observe is not Trainable.observe:
                agents = len(self.players[name])
                child.observe(replace(segment, batch=rows, columns=slice(low * agents, high * agents)), learner)

    def prepare(self, batch: Batch) -> Batch:
        return {name: child.prepare(rows) for name, child, rows in self._views(batch)}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Let each policy update itself, with its own optimizers, epochs and early stopping."""
        whole, feedback = Losses({}), dict[str, tuple[Batch, Tensor | None]]()
        for name, rows in batch.items():
            losses = self.named_policy(name).update(rows, learner)
            whole.terms |= {f"{name}/{key}": value for key, value in losses.terms.items()}
            whole.metrics |= {f"{name}/{key}": value for key, value in losses.metrics.items()}
            feedback[name] = losses.feedback, rows.get("valid")
        whole.feedback = self._feedback(feedback)
        return whole

    def _feedback(self, given: Mapping[str, tuple[Batch, Tensor | None]]) -> Batch:
        """Return the mean priority ``[B]`` of the agents with a valid row, and the carries of all policies."""
        found: Batch = {}
        priorities = {name: back["priority"] for name, (back, _) in given.items() if "priority" in back}
        if priorities:
            valid = {name: given[name][1] for name in priorities}
            masks = {
                name: torch.ones_like(x, dtype=torch.bool)
                if (mask := valid[name]) is None
                else mask.reshape(-1, len(x)).any(0)
                for name, x in priorities.items()
            }
            found["priority"] = self._mean(priorities, masks, 0)
        carries = {name: back["carry"] for name, (back, _) in given.items() if "carry" in back}
        if carries:
            found["carry"] = {name: unfold(x, len(self.players[name]), 1) for name, x in carries.items()}
        return found

    def _mean(self, values: Mapping[str, Tensor], masks: Mapping[str, Tensor], axis: int) -> Tensor:
        """Return the mean over agents of values ``[..., B*N]``, ``[..., B]``; 0 where no agent counts."""
        each = [unfold(x, len(self.players[name]), axis) for name, x in values.items()]
        counts = [unfold(masks[name], len(self.players[name]), axis) for name in values]
        value, count = torch.cat(each, -1), torch.cat(counts, -1)
        return torch.where(count, value, 0.0).sum(-1) / count.sum(-1).clamp(min=1)

    def initial_priorities(self, batch: Batch) -> Tensor:
        rows = {name: (child, seen) for name, child, seen in self._views(batch)}
        values = {name: child.initial_priorities(seen) for name, (child, seen) in rows.items()}
        return self._mean(values, {name: seen["valid"][:-1] for name, (_, seen) in rows.items()}, 1)

    def actor_keys(self) -> tuple[str, ...]:
        own = [(module_name(name), self.named_policy(name)) for name in self.table]
        return tuple(f"learners.{name}.{key}" for name, child in own for key in child.actor_keys())


def module_name(name: str) -> str:
    """Return the name of a policy's submodule, without dots and different from the attributes of every module."""
    plain = re.sub(r"\W", "_", name)
    return f"{plain}_" if hasattr(nn.ModuleDict, plain) or plain == "training" else plain


def require_batches(algo: Any) -> None:
    """Raise ``ConfigError`` if an algorithm learns from results of jobs, which its own loop plays, not from rows."""
    if any(hasattr(getattr(algo, "cls", None), member) for member in ("ask", "rounds")):  # of its loop
        raise ConfigError(algo.key, f"{algo.name} trains a single policy, by a loop of its own; use ppo or dqn here")


def joint(policies: Mapping[str, Policy]) -> Needs:
    """Return the needs of policies that learn from the same data.

    Raises:
        ConfigError: two of them learn from different data, or one does not support the masks of its agents.
    """
    (first, *_), every = policies.items(), {name: policy.needs for name, policy in policies.items()}
    needs, algo = every[first[0]], first[1].algo
    for name, its in every.items():
        other = policies[name].algo
        for what, value in (("data", its.data), ("off_policy", its.off_policy), ("window", its.window)):
            mine = getattr(needs, what)
            if mine != value and (what != "window" or needs.data == "windows"):
                said = f"{other.name} learns from {_text(what, value)}, but {algo.name} of {first[0]!r} from"
                raise ConfigError(other.key, f"{said} {_text(what, mine)}; the policies of a run share its data")
        require_batches(other)
        if its.gradients:
            raise ConfigError(other.key, f"{other.name}'s actors compute gradients, which is for one policy")
        if ("priority" in its.keys) != ("priority" in needs.keys):
            raise ConfigError(other.key, "either all policies compute initial priorities, or none does")
        if policies[name].spec.has_masks and "action_mask" not in its.keys:
            said = f"{other.name} does not support the action masks of {policies[name].agents[0].name}"
            raise ConfigError(other.key, f"{said}; use an algorithm that does")
    return replace(
        needs,
        window=max((its.window for its in every.values()), key=lambda window: window.stride),
        rewards=any(its.rewards for its in every.values()),
        perturbable=all(its.perturbable for its in every.values()),
        noise=next((its.noise for its in every.values() if its.noise), ""),
        keys=tuple(dict.fromkeys([key for its in every.values() for key in its.keys] + ["agent_is_first"])),
    )


def _text(what: str, value: Any) -> str:
    if what == "window":
        return f"windows of {value.burn_in} + {value.length} steps"
    if what == "off_policy":
        return "data of older policies" if value else "data of its own"
    return {
        "rollout": "the last round",
        "segments": "segments in order",
        "windows": "windows of older data",
        "episodes": "whole episodes",
    }[value]
