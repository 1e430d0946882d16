"""Model-Based Meta-Policy Optimization, Clavera et al. 2018 (arXiv:1809.05214)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from gymnasium.spaces import Box
from pydantic import Field
from torch import Tensor

from rlplug.api import Algorithm, Clip, Context, Job, Learner, Losses, Needs, Optim, Play, Segment, Window
from rlplug.functional.meta import adapt_kl_coeffs, adapted, meta_objective, task_advantages
from rlplug.functional.returns import metrics_of_jobs
from rlplug.nn import Activation, Adam, Flatten, as_executed
from rlplug.nn.adaptation import AdaptivePolicy
from rlplug.nn.dynamics import Dynamics
from rlplug.settings import (
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights

STARTS = 256
"""first observations that are kept, from which imagined episodes begin"""

HIGHER = 1.5
"""factor of the first epoch's error in the moving average, so that noise does not end the training at once"""


class MBMPO(Algorithm):
    """Learns to adapt to each network of an ensemble of learned dynamics, and plays with the adapted policies."""

    @settings
    class Config(PolicyOptions):
        ensemble_size: Annotated[int, Field(ge=2)] = option("Networks of the dynamics, each of which is a task.")
        fc_net_hiddens: list[PositiveInt] = option("Hidden layers of the dynamics.")
        fc_net_activation: Activation = option("Nonlinearity of the dynamics.")
        dynamics_lr: PositiveFloat = option("Adam's step size for the dynamics.")
        train_epochs: PositiveInt = option("Maximum epochs over all transitions in an update.")
        valid_split_ratio: Annotated[float, Field(ge=0.01, le=0.9)] = option("Share of the transitions held out.")
        valid_average: UnitFloat = option("Weight of older epochs in the moving average of the held-out error.")
        normalize_data: bool = option("Normalize observations, actions and changes of observations.")
        num_maml_steps: PositiveInt = option("Meta-updates of the policy in an update.")
        horizon: PositiveInt = option("Maximum steps of an imagined episode.")
        imagined_episodes: PositiveInt = option("Imagined episodes of each network, before and after each adaptation.")
        inner_adaptation_steps: PositiveInt = option("Gradient steps of an adaptation.")
        inner_lr: PositiveFloat = option("Step size of the adaptation.")
        first_order: bool = option("Treat the gradient of an adaptation as a constant.")
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("GAE's lambda, over a linear baseline per network.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size for the policy.")
        maml_optimizer_steps: PositiveInt = option("Gradient steps of a meta-update, on the same episodes.")
        clip_param: NonNegativeFloat = option("Epsilon of the clipped surrogate, after the adaptation.")
        entropy_coeff: NonNegativeFloat = option("Weight of the entropy bonus, after the adaptation.")
        kl_coeff: NonNegativeFloat = option("Initial weight of the KL penalty of each adaptation step; 0: off.")
        kl_target: PositiveFloat = option("Target KL divergence, to which each weight adapts.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(obs := spec.single_agent.obs, Box) or len(obs.shape) != 1 or spec.has_masks:
            said = f"mbmpo predicts vectors, and no masks of actions, but observations are {obs}"
            raise ConfigError("env", f"{said}; use another environment")
        keys = ("obs", "action", "held_out")
        return Needs(Window(1), data="windows", off_policy=True, rewards=False, simulates=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        assert isinstance(group.obs, Box)
        self.lr = ctx.schedule(cfg.lr)
        self.policy = AdaptivePolicy(ctx.build("model", group.obs), group.action, cfg)
        self.flat, self.simulator, size = Flatten(group.action), ctx.simulator(), Flatten(group.obs).size
        net = cfg.fc_net_hiddens, cfg.fc_net_activation, cfg.ensemble_size, cfg.normalize_data
        self.dynamics = Dynamics(size, self.flat.size, *net)
        self.kl_coeff: Tensor
        self.bounds: Tensor  # of observations, [2, obs]
        self.starts: Tensor
        self.started: Tensor
        self.register_buffer("kl_coeff", torch.full((cfg.inner_adaptation_steps * (cfg.kl_coeff > 0),), cfg.kl_coeff))
        self.register_buffer("bounds", torch.from_numpy(np.stack([group.obs.low, group.obs.high])), persistent=False)
        self.register_buffer("starts", torch.zeros(STARTS, size))
        self.register_buffer("started", torch.tensor(0))  # episodes so far
        try:
            self._imagined(self.policy.initial(cfg.ensemble_size), 1)
        except (KeyError, NotImplementedError) as error:
            said = "mbmpo needs the reward of imagined observations, which this environment's simulator does not offer"
            raise ConfigError("env", f"{said}; use cartpole_torch or pendulum_torch") from error

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        out, carry = self.policy.act(step, carry, mode, self.ctx)
        if mode == "greedy":
            return out, carry
        return out | {"held_out": self.ctx.rand(len(step["is_first"])) < self.cfg.valid_split_ratio}, carry

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("policy."))

    def optimizers(self) -> dict[str, Optim]:
        dynamics = Adam(self.dynamics.parameters(), lr=self.cfg.dynamics_lr)
        policy = Adam(self.policy.parameters(), lr=self.lr)
        clip = self.cfg.grad_clip, self.cfg.grad_clip_by
        return {"dynamics": Optim(dynamics), "policy": Optim(policy, *clip, lr=self.lr)}

    # ---- real episodes -----------------------------------------------------------------------------------------------

    def rounds(self, play: Play, episodes: int, first: int) -> None:
        """Play with the policy adapted to each network; before the first update, with the policy itself."""
        for _ in play(*self._jobs(episodes, first, "explore")):
            pass

    def _jobs(self, episodes: int, first: int, mode: Mode) -> tuple[list[Job], dict[str, Weights]]:
        """Adapt the policy to each network; return a job for each, numbered from ``first``, and the weights."""
        members, of_all = range(self.cfg.ensemble_size), self._adapted([]) if self.started else {}
        weights = {str(k): {f"policy.{name}": w[k] for name, w in of_all.items()} for k in members if of_all}
        return [Job(first + k, {"": str(k)} if weights else {}, episodes=episodes, mode=mode) for k in members], weights

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Evaluate the policies of the next real episodes, one for each network, and in addition the policy itself.

        ``eval/return_mean`` is of the former, and ``eval/policy_return_mean`` of the latter. The run's random numbers
        do not change.
        """
        with self.ctx.apart():
            jobs, weights = self._jobs(episodes, 0, "greedy")
        jobs.append(Job(len(jobs), episodes=episodes, mode="greedy"))
        *each, last = (batch for _, batch in play(jobs, weights))
        return metrics_of_jobs(each) | {"eval/policy_return_mean": float(last["return"].mean())}

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Keep first observations, and moments of the transitions that are not held out."""
        batch, valid = segment.batch, segment.batch["valid"][:-1]
        obs, action, next_obs = batch["obs"][:-1], self._flat(batch["action"][:-1]), batch["obs"][1:]
        kept = valid & ~batch["held_out"][:-1]
        obs_, action_, next_ = (x[kept].to(self.ctx.device) for x in (obs, action, next_obs))
        self.dynamics.observe(obs_, action_, next_, learner.gather)
        begun = learner.gather(obs[valid & batch["is_first"][:-1]].to(self.ctx.device))
        place = (int(self.started) + torch.arange(len(begun), device=begun.device)) % STARTS
        self.starts[place] = begun
        self.started += len(begun)

    def _flat(self, action: Tensor) -> Tensor:
        return self.flat(as_executed(self.ctx.spec.single_agent.action, action))

    # ---- imagined episodes -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _imagined(self, weights: Weights, horizon: int) -> Batch:
        """Return episodes ``[E, horizon + 1, N, ...]`` of each network's dynamics and policy, in stream rows."""
        members, n = self.cfg.ensemble_size, self.cfg.imagined_episodes
        many = (members, n)
        draw = self.ctx.rand if self.policy.policy.noise_kind == "uniform" else self.ctx.randn
        noise = draw(horizon + 1, *many, self.policy.policy.noise_size, rows=False)
        known = max(1, min(int(self.started), STARTS))
        obs = self.starts[self.ctx.randint(known, members * n, rows=False)].view(*many, -1)
        alive, rows = torch.ones(many, dtype=torch.bool, device=obs.device), list[Batch]()
        for t in range(horizon + 1):
            row = {"obs": obs} | self.policy.sample(weights, {"obs": obs, "noise": noise[t]})
            after = self.dynamics.step(obs, self._flat(row["action"])).clamp(*self.bounds)
            moved = {"obs": obs, "action": row["action"], "next_obs": after}
            flat = {key: x.flatten(0, 1) for key, x in moved.items()}
            reward, over = self.simulator.reward(flat).view(many), self.simulator.terminated(flat).view(many)
            valid = alive & torch.tensor(t < horizon, device=obs.device)
            over = over | ~after.isfinite().all(-1)
            rows.append(row | {"reward": reward.float(), "terminated": over & valid, "valid": valid})
            alive = alive & ~over
            obs = torch.where(alive.unsqueeze(-1), after, obs)
        batch = {key: torch.stack([row[key] for row in rows], 1) for key in rows[0]}
        return batch | {"advantage": task_advantages(batch, self.cfg.gamma, self.cfg.lambda_)}

    def _adapted(self, rounds: list[Batch]) -> Weights:
        """Return each network's adapted weights ``[E, ...]``; add the episodes before each step to ``rounds``."""
        with torch.enable_grad():
            weights = self.policy.initial(self.cfg.ensemble_size)
            for _ in range(self.cfg.inner_adaptation_steps):
                rounds.append(self._imagined(weights, self.cfg.horizon))
                weights, _ = adapted(self.policy.evaluate, weights, rounds[-1], self.cfg.inner_lr, create_graph=False)
                weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
        return {name: w.detach() for name, w in weights.items()}

    # ---- learning ----------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """Return transitions ``[B, ...]``; the held-out ones are not ``valid``, but ``held_out``."""
        now, held = {key: x[0] for key, x in batch.items() if key in ("obs", "action", "valid")}, batch["held_out"][0]
        action = self._flat(now["action"])
        rows = {"obs": now["obs"], "action": action, "next_obs": batch["obs"][1]}
        return rows | {"valid": now["valid"] & ~held, "held_out": now["valid"] & held}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the error of the dynamics, ``[B]``, or the loss of the policy after each adaptation, ``[E]``."""
        if "dynamics" in parts:
            return Losses({"dynamics": self.dynamics.errors(batch["obs"], batch["action"], batch["next_obs"])})
        cfg, rounds = self.cfg, [batch[str(step)] for step in range(self.cfg.inner_adaptation_steps + 1)]
        start = self.policy.initial(len(batch["valid"]))
        options = cfg.inner_lr, cfg.first_order, cfg.clip_param, self.kl_coeff, cfg.entropy_coeff
        return Losses(*meta_objective(self.policy.evaluate, start, rounds, *options))

    def update(self, batch: Batch, learner: Learner) -> Losses:
        metrics = self._fit(batch, learner)
        losses = Losses({})
        for i in range(self.cfg.num_maml_steps):
            rounds = list[Batch]()
            rounds.append(self._imagined(self._adapted(rounds), self.cfg.horizon))
            for j, rows in enumerate(rounds):
                total = torch.where(rows["valid"], rows["reward"], 0.0).sum(1).mean()
                metrics[f"MAMLIter{i}_DynaTrajInner_{j}_episode_reward_mean"] = total
            given: Batch = {str(step): rows for step, rows in enumerate(rounds)}
            given["valid"] = torch.ones(self.cfg.ensemble_size, dtype=torch.bool, device=self.ctx.device)
            for _ in range(self.cfg.maml_optimizer_steps):
                losses = learner.minimize(given, self, ("policy",))
            if len(self.kl_coeff) and losses.metrics:
                kl = torch.stack([losses.metrics[f"kl_{step}"] for step in range(len(self.kl_coeff))])
                self.kl_coeff.copy_(adapt_kl_coeffs(self.kl_coeff, kl, self.cfg.kl_target))
                losses.metrics["kl_coeff"] = self.kl_coeff.mean()
        return Losses(losses.terms, losses.metrics | metrics)

    def _fit(self, batch: Batch, learner: Learner) -> dict[str, Tensor]:
        """Train the dynamics until the moving average of the error on held-out transitions rises."""
        self.dynamics.commit()
        rows = learner.progress.env_steps * (1.0 - self.cfg.valid_split_ratio)
        steps, average, found = math.ceil(rows / self.ctx.batch_size), np.inf, dict[str, Tensor]()
        for epoch in range(self.cfg.train_epochs):
            errors, held = list[Tensor](), list[Tensor]()
            for _ in range(steps):
                with torch.no_grad():
                    errors.append(self.dynamics.errors(batch["obs"], batch["action"], batch["next_obs"]))
                    held.append(batch["held_out"])
                learner.minimize(batch, self, ("dynamics",))
                batch = self.prepare(learner.sample()[0])
            error = learner.reduce(torch.cat(errors), "mean", torch.cat(held))
            found = {"dynamics_valid_error": error, "dynamics_epochs": torch.tensor(epoch + 1.0)}
            before, share = average, self.cfg.valid_average
            average = HIGHER * float(error) if np.isinf(before) else share * before + (1.0 - share) * float(error)
            if average > before:
                break
        return found
