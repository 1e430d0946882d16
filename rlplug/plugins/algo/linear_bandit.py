"""Contextual bandits with linear rewards, in closed form: LinUCB, Li et al. 2010 (arXiv:1003.0146), and Thompson
sampling, Agrawal and Goyal 2013 (arXiv:1209.3352), with epsilon-greedy as their baseline.

A row is a round: a context, an arm, its reward. The learned parameters are sums over rounds, in double precision:
``A = lambda I + sum x x^T`` and ``b = sum r x``. There is no gradient, and the order of rounds changes only rounding.
Ranks gather their rounds and add them in one order, so results are bit-identical for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import Tensor
from torch.nn.functional import one_hot

from rlplug.api import Algorithm, Context, Job, Learner, Losses, Needs, Play
from rlplug.functional.returns import episode_metrics
from rlplug.functional.td import forbid, gather_action, greedy
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode

EXPECTED, LOGGED = "expected_reward", "logged_action"
"""extras of some environments: the mean reward of every arm, and the arm of a logged round"""


class LinearBandit(Algorithm):
    """Estimates ``theta = A^-1 b`` of every arm, or one shared by all. A subclass defines exploration.

    ``A`` and ``root``, the inverse of its Cholesky factor, are ``[thetas, d, d]``; ``b`` and ``theta`` ``[thetas, d]``.
    """

    noise = ""  # the exploration module that it requires
    A: Tensor
    b: Tensor
    theta: Tensor
    root: Tensor
    totals: Tensor

    @settings
    class Config:
        disjoint: bool | None = option("Separate theta per arm; null: if arms have no features.")
        lambda_: PositiveFloat = option("Ridge penalty: A starts as lambda I.")

    @classmethod
    def needs(cls, cfg: Any, spec: EnvSpec) -> Needs:
        arms, _, per_arm = sizes(spec)
        if "bandit" not in spec.offers and spec.max_episode_steps != 1:
            said = "supports only bandits, but an action in this environment affects later rows"
            ways = "use env=linear_bandit or env=logged_bandit; env.max_episode_steps=1 makes every step a round"
            raise ConfigError("env", f"{cls.__name__} {said}; {ways}")
        if cfg.disjoint is False and not per_arm:
            said = f"one theta cannot distinguish {arms} arms by one context; it needs features of every arm, [arms, d]"
            raise ConfigError("algo.disjoint", f"{said}; use null")
        keys = ("obs", "action", "action_mask", *(key for key in (EXPECTED, LOGGED) if key in spec.extras))
        return Needs(data="rollout", off_policy=True, perturbable=True, noise=cls.noise, keys=keys)

    def __init__(self, cfg: Any, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.arms, dim, self.per_arm = sizes(ctx.spec)
        self.disjoint = not self.per_arm if cfg.disjoint is None else cfg.disjoint
        many, eye = self.arms if self.disjoint else 1, torch.eye(dim, dtype=torch.float64)
        self.register_buffer("A", (cfg.lambda_ * eye).repeat(many, 1, 1))
        self.register_buffer("b", torch.zeros(many, dim, dtype=torch.float64))
        self.register_buffer("theta", torch.zeros_like(self.b))
        self.register_buffer("root", (eye / cfg.lambda_**0.5).repeat(many, 1, 1))
        self.register_buffer("totals", torch.zeros(4, dtype=torch.float64))  # rounds, rounds that count, reward, regret

    def actor_keys(self) -> tuple[str, ...]:
        return "theta", "root"

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        mask = step.get("action_mask")
        if mode == "random":
            return {"action": greedy(self.ctx.rand(len(step["is_first"]), self.arms), mask)}, carry
        x = self.contexts(step["obs"])
        scores = self.optimistic(x) if mode == "explore" else self.estimates(x)
        return {"action": greedy(scores, mask), "q": scores.float()}, carry

    def contexts(self, obs: Any) -> Tensor:
        """Return the features ``[..., arms, d]`` of every arm; a single context is repeated for all arms."""
        x = (obs["item"] if isinstance(obs, Mapping) else obs).double()
        return x if self.per_arm else x.unsqueeze(-2).expand(*x.shape[:-1], self.arms, -1)

    def estimates(self, x: Tensor) -> Tensor:
        """Estimate the mean reward ``[..., arms]`` of every arm from its features ``[..., arms, d]``."""
        return (x * self.theta).sum(-1)

    def optimistic(self, x: Tensor) -> Tensor:
        """Return scores ``[B, arms]``, whose maximum is the arm to explore, from features ``[B, arms, d]``."""
        return self.estimates(x)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Add collected rounds to ``A`` and ``b``, and solve for ``theta``: Li et al., algorithm 1."""
        rounds = self.rounds(batch)
        if len(self.ctx.env_ids) < self.ctx.num_envs:  # the other environments belong to other ranks
            rounds = learner.gather(rounds)
        (arm, reward, counts, regret), x = rounds[:, :4].unbind(-1), rounds[:, 4:]
        own = one_hot(arm.long(), self.arms) if self.disjoint else torch.ones_like(arm)[:, None]
        weighted = (own * counts[:, None]).unsqueeze(-1) * x.unsqueeze(1)  # [n, thetas, d]
        self.A += torch.einsum("nai,nj->aij", weighted, x)
        self.b += torch.einsum("nai,n->ai", weighted, reward)
        lower = torch.linalg.cholesky(self.A)
        self.theta.copy_(torch.cholesky_solve(self.b.unsqueeze(-1), lower).squeeze(-1))
        self.root.copy_(torch.linalg.solve_triangular(lower, torch.eye(x.shape[1]).to(lower), upper=False))
        self.totals += torch.stack([torch.ones_like(counts), counts, counts * reward, regret], -1).sum(0)
        return Losses({}, self.measured(regret))

    def rounds(self, batch: Batch) -> Tensor:
        """Return the valid rows of ``batch [T+1, B]``, column by column, ``[n, 4 + d]``.

        They are the arm, its reward, 1 if the round counts, else 0, the regret (0 if the optimum is unknown), and the
        features. A logged round counts if the chosen arm is the logged one: Li et al. 2011 (arXiv:1003.5956),
        algorithm 2.
        """
        action = batch["action"]
        x = self.contexts(batch["obs"]).gather(-2, action[..., None, None].expand(*action.shape, 1, self.A.shape[-1]))
        counts = action == batch[LOGGED] if LOGGED in batch else torch.ones_like(action)
        regret = torch.zeros_like(batch["reward"])
        if EXPECTED in batch:
            expected = batch[EXPECTED]
            regret = forbid(expected, batch.get("action_mask")).amax(-1) - gather_action(expected, action)
        numbers = torch.stack([part.double() for part in (action, batch["reward"], counts, regret)], -1)
        return torch.cat([numbers, x.squeeze(-2)], -1)[:-1].transpose(0, 1)[batch["valid"][:-1].T]

    def measured(self, regret: Tensor) -> dict[str, Tensor]:
        """Return the metrics: the mean ``regret [n]`` of an update's rounds, if there are any, and of all rounds."""
        many, counted, reward, total = self.totals.clone().unbind()
        found, keys = {"mean_reward": reward / counted.clamp(min=1.0)}, self.ctx.needs.keys
        found |= {"accepted": counted / many.clamp(min=1.0)} if LOGGED in keys else {}
        found |= {"cumulative_regret": total} if EXPECTED in keys else {}
        return found | ({"regret": regret.mean()} if EXPECTED in keys and len(regret) else {})

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Evaluate greedily; add the mean reward of rounds that count, and the regret, to the usual metrics."""
        ((_, batch),) = play([Job(0, episodes=episodes, mode="greedy")])
        _, reward, counts, regret = self.rounds(batch)[:, :4].unbind(-1)
        found = {"eval/mean_reward": float((counts * reward).sum() / counts.sum())} if counts.any() else {}
        return episode_metrics(batch) | found | ({"eval/regret": float(regret.mean())} if EXPECTED in batch else {})


class LinUCB(LinearBandit):
    """Takes the arm with the highest upper confidence bound: Li et al. 2010, equation 5."""

    @settings
    class Config(LinearBandit.Config):
        alpha: Scheduled[NonNegativeFloat] = option("Width of the confidence bound, in standard deviations.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg, ctx)
        self.alpha = ctx.schedule(cfg.alpha)

    def optimistic(self, x: Tensor) -> Tensor:
        """Compute ``x^T theta + alpha sqrt(x^T A^-1 x)``, where ``x^T A^-1 x = |root x|^2``."""
        width = torch.einsum("aij,baj->bai", self.root.expand(self.arms, -1, -1), x).norm(dim=-1)
        return self.estimates(x) + self.alpha * width


class LinTS(LinearBandit):
    """Samples ``theta`` from the posterior and takes the best arm for it: Agrawal and Goyal 2013, algorithm 1."""

    @settings
    class Config(LinearBandit.Config):
        v: Scheduled[NonNegativeFloat] = option(
            "Scale of the posterior's standard deviation, relative to that of A^-1."
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(cfg, ctx)
        self.v = ctx.schedule(cfg.v)

    def optimistic(self, x: Tensor) -> Tensor:
        """Sample from ``N(theta, v^2 A^-1)``, ``A^-1 = root^T root``, in every column, and estimate rewards with it."""
        noise = self.ctx.randn(len(x), self.theta.numel()).double().view(len(x), *self.theta.shape)
        drawn = self.theta + self.v * torch.einsum("aji,baj->bai", self.root, noise)
        return (x * drawn).sum(-1)


class LinGreedy(LinearBandit):
    """Takes the arm with the highest estimate; explores by a module, epsilon_greedy or boltzmann."""

    noise = "epsilon_greedy"


def sizes(spec: EnvSpec) -> tuple[int, int, bool]:
    """Return the number of arms, the number of features, and whether every arm has its own features, ``[arms, d]``.

    Raises:
        ConfigError: the spaces do not fit a linear bandit.
    """
    group = spec.single_agent
    if not isinstance(group.action, Discrete):
        raise ConfigError("env", f"a linear bandit chooses one of several arms, but the actions are {group.action}")
    arms, space = int(group.action.n), group.obs
    item: Any = space["item"] if isinstance(space, Dict) and [*space.spaces] == ["item"] else space
    if isinstance(item, Box) and (len(item.shape) == 1 or (len(item.shape) == 2 and item.shape[0] == arms)):
        return arms, item.shape[-1], len(item.shape) == 2
    served = f"a vector of features [d], or one of every arm [{arms}, d], also as the only entry 'item' of a Dict"
    raise ConfigError("env", f"a linear bandit observes {served}, not {space}; env.flatten=true makes one vector")
