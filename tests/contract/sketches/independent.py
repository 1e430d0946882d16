# pyright: strict
"""Independent learners (Tan 1993), each a small PPO (Schulman et al. 2017, arXiv:1707.06347).

``Independent`` contains algorithms and knows nothing of what they are: it cuts views and merges results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim
from rlplug.functional.policy_gradient import clipped_surrogate
from rlplug.functional.returns import gae
from rlplug.nn.distributions import Categorical
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode, map_leaves


class Chosen(Protocol):
    """Candidate for api: a component inside a ``Config``, checked and with its class, but not built."""

    @property
    def cls(self) -> type[Any]: ...
    @property
    def cfg(self) -> Any: ...
    def build(self, ctx: Context) -> Any: ...


class PPO(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda.")
        clip: PositiveFloat = option("Epsilon of the clipped surrogate.")
        epochs: PositiveInt = option("Passes over a rollout.")
        minibatch: PositiveInt = option("Rows per gradient step, over all ranks.")
        target_kl: PositiveFloat = option("KL that ends the epochs.")
        lr: PositiveFloat = option("Adam's step size.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.sole
        assert isinstance(group.action, Discrete)
        self.torso: Model = ctx.build("model", group.obs)
        self.policy, self.value = nn.Linear(self.torso.out_dim, int(group.action.n)), nn.Linear(self.torso.out_dim, 1)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(spec.sole.action, Discrete):
            raise ConfigError("algo.name", "this ppo needs discrete actions")
        return Needs(keys=("obs", "action", "logp"))

    def evaluate(self, obs: Any) -> tuple[Categorical, Tensor]:
        features, _ = self.torso(obs, {}, None)
        return Categorical(self.policy(features)), self.value(features).squeeze(-1)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        policy, _ = self.evaluate(step["obs"])
        action = policy.mode() if mode == "greedy" else policy.sample(self.ctx.rand(len(step["is_first"]), 1))
        return {"action": action, "logp": policy.logp(action)}, carry

    def prepare(self, batch: Batch) -> Batch:
        _, value = self.evaluate(batch["obs"])
        advantage, ret = gae(
            batch["reward"], value, batch["terminated"], batch["valid"], self.cfg.gamma, self.cfg.lambda_
        )
        return batch | {"advantage": advantage, "ret": ret}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses = Losses({})
        for _ in range(self.cfg.epochs):
            for rows in learner.minibatches(batch, self.cfg.minibatch, "row"):
                a = rows["advantage"]
                rows["advantage"] = (a - learner.reduce(a, "mean")) / (learner.reduce(a, "std") + 1e-8)
                losses = learner.minimise(rows, self)
            if not losses.terms or losses.metrics["kl"] > self.cfg.target_kl:
                break  # nobody has rows, or the global mean says enough: every rank stops here
        return losses

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        policy, value = self.evaluate(batch["obs"])
        log_ratio = policy.logp(batch["action"]) - batch["logp"]
        ratio = log_ratio.exp()
        terms = {
            "policy": -clipped_surrogate(ratio, batch["advantage"], self.cfg.clip),
            "value": 0.5 * (value - batch["ret"]).square(),
        }
        return Losses(terms, {"kl": (ratio - 1 - log_ratio).detach()})

    def optimizers(self) -> dict[str, Optim]:
        return {"ppo": Optim(torch.optim.Adam(self.parameters(), lr=self.cfg.lr), grad_clip=0.5)}


SHARED = {"is_first", "valid", "truncated", "env_id", "version", "index", "prob", "state", "task"}
"""The keys that have no agent axis; see ``rlplug.types``."""


def view(batch: Batch, agent: int, axis: int) -> Batch:
    """What one agent sees of its group's rows: ``[T+1, B, N] -> [T+1, B]``; rows without it are not valid."""
    own: Batch = {key: leaf for key, leaf in batch.items() if key not in SHARED}
    out = {key: batch[key] for key in SHARED if key in batch} | map_leaves(lambda x: x.select(axis, agent), own)
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

    def observe(self, segment: Batch, learner: Learner) -> None:
        for _, child, rows in self.views(segment):
            child.observe(rows, learner)

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
