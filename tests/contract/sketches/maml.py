# pyright: strict
"""MAML: Model-Agnostic Meta-Learning, Finn et al. 2017 (arXiv:1703.03400), for REINFORCE (section 5.3).

Loop ``meta``: collect with the meta-policy, adapt to each task, collect with what came of it, update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType, reportPrivateImportUsage]

from rlplug import tree
from rlplug.api import Algorithm, Context, Losses, Needs, Optim, Run
from rlplug.nn.distributions import Categorical
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights


class Adaptive(Protocol):
    """Candidate for api: what the loop ``meta`` asks of an algorithm beyond ``Algorithm``."""

    def adapt(self, weights: Weights, batch: Batch) -> Weights:
        """The weights ``weights`` becomes on one task's data ``[T+1, M]``, detached; ``prepare`` is called inside."""
        ...


class MAML(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        inner_lr: PositiveFloat = option("Step size of the adaptation.")
        inner_steps: PositiveInt = option("Steps of the adaptation.")
        lr: PositiveFloat = option("Adam's step size.")
        hidden: PositiveInt = option("Width of the policy.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        assert group.obs.shape
        actions = int(group.action.n)
        self.policy = nn.Sequential(
            nn.Linear(group.obs.shape[0], cfg.hidden), nn.Tanh(), nn.Linear(cfg.hidden, actions)
        )

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if "tasks" not in spec.offers:
            raise ConfigError("env", "maml needs an environment that offers tasks")
        return Needs(keys=("obs", "action", "reward", "terminated", "truncated"))

    def logits(self, weights: Weights, obs: Tensor) -> Tensor:
        return functional_call(self.policy, weights, (obs,))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        policy = Categorical(self.policy(step["obs"]))
        return {
            "action": policy.mode() if mode == "greedy" else policy.sample(self.ctx.rand(len(policy.params), 1))
        }, carry

    def prepare(self, batch: Batch) -> Batch:
        """``{"pre", "post"}`` with leaves ``[K, T+1, M]``. A row of the whole is a task: ``valid [K]``."""
        parts: Batch = {name: self.advantages(batch[name]) for name in ("pre", "post")}
        return parts | {"valid": parts["pre"]["valid"].flatten(1).any(1)}

    def advantages(self, rows: Batch) -> Batch:
        """Reward to go less a linear baseline fitted to each task: ``[K, T+1, M]``."""
        reward, over = rows["reward"], rows["terminated"] | rows["truncated"]
        ret = torch.zeros_like(reward)
        for t in reversed(range(reward.shape[1] - 1)):
            ret[:, t] = (reward[:, t] + self.cfg.gamma * ret[:, t + 1] * ~over[:, t]) * rows["valid"][:, t]
        keep = rows["valid"].flatten(1).unsqueeze(-1)
        obs: Tensor = rows["obs"].flatten(1, 2)
        x = torch.cat([obs, obs.square(), torch.ones_like(obs[..., :1])], -1) * keep
        ridge = 1e-3 * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        w = (x.mT @ x + ridge).inverse() @ x.mT @ ret.flatten(1).unsqueeze(-1)
        return rows | {"advantage": ret - (x @ w).view_as(ret)}

    def surrogate(self, weights: Weights, rows: Batch) -> Tensor:
        """0-d: the mean over one task's valid rows."""
        logp = Categorical(self.logits(weights, rows["obs"])).logp(rows["action"])
        keep = rows["valid"].to(logp.dtype)
        return -(logp * rows["advantage"] * keep).sum() / keep.sum().clamp(min=1)

    def inner(self, weights: Weights, rows: Batch, create_graph: bool) -> Weights:
        for _ in range(self.cfg.inner_steps):
            grads = torch.autograd.grad(self.surrogate(weights, rows), [*weights.values()], create_graph=create_graph)
            weights = {name: w - self.cfg.inner_lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return weights

    def adapt(self, weights: Weights, batch: Batch) -> Weights:
        rows = tree.map(lambda x: x[0], self.advantages(tree.map(lambda x: x[None], batch)))
        with torch.enable_grad():
            start = {name.removeprefix("policy."): w.detach().requires_grad_() for name, w in weights.items()}
            return {f"policy.{name}": w.detach() for name, w in self.inner(start, rows, False).items()}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        start: Weights = dict(self.policy.named_parameters())
        terms: list[Tensor] = []
        for k in range(len(batch["valid"])):
            pre, post = (tree.map(lambda x, k=k: x[k], batch[name]) for name in ("pre", "post"))
            terms.append(self.surrogate(self.inner(start, pre, True), post))
        return Losses({"policy": torch.stack(terms)})  # [K]

    def optimizers(self) -> dict[str, Optim]:
        return {"policy": Optim(torch.optim.Adam(self.policy.parameters(), lr=self.cfg.lr))}


def iteration(run: Run, algorithm: MAML, tasks: Sequence[Any], rows: int) -> Losses:
    """One step of the loop ``meta``: a segment for each task, before and after the adaptation."""
    weights: Weights = {name: w.detach() for name, w in algorithm.policy.named_parameters(prefix="policy")}
    names = [str(k) for k in range(len(tasks))]
    pre = [*run.collector.collect(rows, dict.fromkeys(names, weights), tasks)]
    adapted = {name: algorithm.adapt(weights, segment) for name, segment in zip(names, pre, strict=True)}
    post = [*run.collector.collect(rows, adapted, tasks)]
    return run.update({"pre": stacked(pre), "post": stacked(post)})


def stacked(segments: Sequence[Batch]) -> Batch:
    """Segments ``[T+1, M]`` of K tasks as one batch ``[K, T+1, M]``."""
    return tree.map(lambda *rows: torch.stack(rows), *segments)


PROTOCOLS: Sequence[type[Adaptive]] = (MAML,)  # pyright checks that MAML is one
