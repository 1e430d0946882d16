"""Model-Agnostic Meta-Learning for policy gradients, Finn et al. 2017 (arXiv:1703.03400), algorithm 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Job, Learner, Losses, Needs, Optim, Play
from rlplug.envs import sample_tasks
from rlplug.functional.meta import adapt_kl_coeffs, adapted, meta_objective, stacked, task_advantages
from rlplug.functional.returns import metrics_of_jobs
from rlplug.nn import Adam, Flatten
from rlplug.nn.adaptation import AdaptivePolicy
from rlplug.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, NamedWeights, Tree, Weights

MOST = 1000
"""maximum size of an observation to which a linear baseline is fitted"""
HELD_OUT = 2**31
"""seed of the tasks of evaluations, different from the seeds of all training tasks"""


class MAML(Algorithm):
    """Learns weights from which a few policy-gradient steps on a task's episodes lead to a good policy for it."""

    @settings
    class Config(PolicyOptions):
        meta_batch_size: PositiveInt = option("Tasks of an update.")
        inner_adaptation_steps: NonNegativeInt = option("Gradient steps of an adaptation; 0: do not adapt.")
        inner_lr: PositiveFloat = option("Step size of the adaptation.")
        first_order: bool = option("Treat the gradient of an adaptation as a constant (first-order MAML).")
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda, over a linear baseline per task.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        maml_optimizer_steps: PositiveInt = option("Gradient steps of an update, on the same episodes.")
        clip_param: NonNegativeFloat = option("Epsilon of the clipped surrogate, after the adaptation.")
        entropy_coeff: NonNegativeFloat = option("Weight of the entropy bonus, after the adaptation.")
        kl_coeff: NonNegativeFloat = option("Initial weight of the KL penalty of each adaptation step; 0: off.")
        kl_target: PositiveFloat = option("Target KL divergence, to which each weight adapts.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        eval_tasks: PositiveInt = option("Held-out tasks of an evaluation, the same in each.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        obs = spec.single_agent.obs
        if spec.tasks is None:
            said = "maml adapts to tasks, but this environment has none; use point_goals, pendulum_mass or another one"
            raise ConfigError("env", said)
        if (size := Flatten(obs).size) > MOST:
            said = f"maml fits a linear baseline to observations, of at most {MOST} numbers; {obs} has {size}"
            raise ConfigError("env", said)
        return Needs(rewards=False, raw=True, keys=("obs", "action", "logp", "dist", "action_mask"))

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        if cfg.meta_batch_size < ctx.world_size:
            said = f"{cfg.meta_batch_size} tasks leave some of {ctx.world_size} ranks without one; use {ctx.world_size}"
            raise ConfigError("algo.meta_batch_size", f"{said} or more")
        self.policy = AdaptivePolicy(ctx.build("model", group.obs), group.action, cfg)
        self.lr, self.flat = ctx.schedule(cfg.lr), Flatten(group.obs)
        self.kl_coeff: Tensor
        self.register_buffer("kl_coeff", torch.full((cfg.inner_adaptation_steps * (cfg.kl_coeff > 0),), cfg.kl_coeff))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return self.policy.act(step, carry, mode, self.ctx)

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.policy.parameters(), lr=self.lr)
        return {"policy": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    # ---- episodes ----------------------------------------------------------------------------------------------------

    def rounds(self, play: Play, episodes: int, first: int) -> Batch:
        """Draw tasks, play and adapt; return rows ``[K, L+1, M, ...]`` by the number of adaptation steps before."""
        seed = int(self.ctx.randint(HELD_OUT, 1, rows=False, host=True))
        tasks = sample_tasks(self.space, self.cfg.meta_batch_size, np.random.default_rng(seed))
        played = self._played(play, tasks, episodes, first)
        return {str(step): stacked([*of.values()]) for step, of in enumerate(played)}

    @property
    def space(self) -> Space[Any]:
        assert self.ctx.spec.tasks is not None
        return self.ctx.spec.tasks

    def _played(self, play: Play, tasks: Tree, episodes: int, first: int) -> list[Mapping[int, Batch]]:
        """Return each task's episodes, by its position, before the adaptation and after each of its steps."""
        each = [tree.take(tasks, k) for k in range(len(next(tree.leaves(tasks))))]
        played, weights = list[Mapping[int, Batch]](), dict[str, Weights]()
        for step in range(self.cfg.inner_adaptation_steps + 1):
            policies = [{"": str(k)} if step else {} for k in range(len(each))]
            jobs = [
                Job(first + step * len(each) + k, policies[k], task=task, episodes=episodes)
                for k, task in enumerate(each)
            ]
            found = {(job.number - first) % len(each): batch for job, batch in play(jobs, weights)}
            played.append({k: found[k] for k in sorted(found)})
            if step < self.cfg.inner_adaptation_steps:
                weights = self.adapt(played[-1], weights)
        return played

    def adapt(self, played: Mapping[int, Batch], weights: NamedWeights) -> dict[str, Weights]:
        """Return the weights of each task's policy after a step on its episodes, by its position.

        Args:
            played: episodes ``[L+1, M, ...]`` of each task, by its position.
            weights: the weights that played them, by the same; empty: the algorithm's own.
        """
        rows = tree.map(lambda x: x.to(self.ctx.device), self._prepared(stacked([*played.values()])))
        with torch.enable_grad():
            start = self.policy.initial(len(played))
            if weights:
                own = {name: [weights[str(k)][f"policy.{name}"] for k in played] for name in start}
                start = {name: torch.stack([*w]).requires_grad_() for name, w in own.items()}
            after, _ = adapted(self.policy.evaluate, start, rows, self.cfg.inner_lr, create_graph=False)
        return {str(k): {f"policy.{name}": w[i].detach() for name, w in after.items()} for i, k in enumerate(played)}

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Adapt to held-out tasks; ``eval/return_mean`` is the return afterwards, of exploring policies throughout."""
        tasks = sample_tasks(self.space, self.cfg.eval_tasks, np.random.default_rng(HELD_OUT))
        played = self._played(play, tasks, episodes, 0)
        returns = [torch.stack([batch["return"].double().mean() for batch in of.values()]) for of in played]
        gain = returns[-1] - returns[0]
        interval = 1.96 * float(gain.std()) / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
        found = {f"eval/{name}": float(x.mean()) for name, x in named(returns).items()}
        return metrics_of_jobs([*played[-1].values()]) | found | {"eval/adaptation_delta_ci95": interval}

    # ---- learning ----------------------------------------------------------------------------------------------------

    def _prepared(self, rows: Batch) -> Batch:
        flat = {**rows, "obs": self.flat(rows["obs"])}
        return rows | {"advantage": task_advantages(flat, self.cfg.gamma, self.cfg.lambda_)}

    def prepare(self, batch: Batch) -> Batch:
        """Compute advantages of every round. A row of the whole is a task: ``valid [K]``."""
        if "0" not in batch:
            raise ConfigError("loop", "maml learns from tasks before and after an adaptation; use loop=meta")
        rounds: Batch = {key: self._prepared(rows) for key, rows in batch.items()}
        return rounds | {"valid": rounds["0"]["valid"].flatten(1).any(1)}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the loss of every task ``[K]`` after its adaptation, through which the gradient goes."""
        cfg, rounds = self.cfg, [batch[str(step)] for step in range(self.cfg.inner_adaptation_steps + 1)]
        start = self.policy.initial(len(batch["valid"]))
        options = cfg.inner_lr, cfg.first_order, cfg.clip_param, self.kl_coeff, cfg.entropy_coeff
        terms, metrics = meta_objective(self.policy.evaluate, start, rounds, *options)
        return Losses(terms, metrics | named([rows["return"].mean(1).to(terms["policy"].dtype) for rows in rounds]))

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses = Losses({})
        for _ in range(self.cfg.maml_optimizer_steps):
            losses = learner.minimize(batch, self)
        if len(self.kl_coeff) and losses.metrics:
            kl = torch.stack([losses.metrics[f"kl_{step}"] for step in range(len(self.kl_coeff))])
            self.kl_coeff.copy_(adapt_kl_coeffs(self.kl_coeff, kl, self.cfg.kl_target))
            losses.metrics["kl_coeff"] = self.kl_coeff.mean()
        return losses


def named(returns: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the returns before the adaptation and after each of its steps, and their difference, by RLlib's names."""
    found = {
        f"episode_reward_mean_adapt_{step}" if step else "episode_reward_mean": x for step, x in enumerate(returns)
    }
    return found | {"adaptation_delta": returns[-1] - returns[0]}
