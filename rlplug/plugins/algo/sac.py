"""Soft Actor-Critic, Haarnoja et al. 2018 (arXiv:1801.01290; with automatic temperature arXiv:1812.05905).

For discrete actions Christodoulou 2019 (arXiv:1910.07207); on sequences, with recurrent models, the separate actor and
critics of Ni et al. 2022 (arXiv:2110.05038). One ``forward`` serves all: what the action is made of stands in
``soft_value``, and where the rows come from in ``_views``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Needs, Optim
from rlplug.functional.returns import n_step
from rlplug.functional.sequences import n_step_rows
from rlplug.functional.targets import polyak_
from rlplug.nn import (
    Adam,
    Linear,
    MultiCategorical,
    MultiCategoricalHead,
    TanhGaussian,
    TanhGaussianHead,
    choices_of,
    is_image,
    precise,
)
from rlplug.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class Critic(nn.Module):
    """``ensemble_size`` independent critics in two halves: ``encode`` sees observations, ``forward`` judges actions.

    Continuous actions join a vector observation at the torso's input; behind images, dicts and the history that a
    recurrent torso sees, they join the features in one hidden layer. Discrete actions are outputs.

    Args:
        choices: the number of choices of every factor of a discrete action; None: the action is continuous.
    """

    def __init__(self, ctx: Context, size: int, choices: Sequence[int] | None, ensemble_size: int) -> None:
        super().__init__()
        obs = ctx.spec.single_agent.obs
        self.ensemble_size, self.joins, self.head_shape = ensemble_size, "behind", (1,)
        inputs: spaces.Space[Any] = obs
        if choices is None and _is_vector(obs) and not ctx.needs.carry_stride:
            self.joins = "before"
            inputs = spaces.Dict({"obs": obs, "action": spaces.Box(-1.0, 1.0, (size,))})
        self.torso = ctx.build("critic_model", inputs, ensemble_size)
        width = self.torso.out_dim
        if choices is not None:
            self.joins, self.head_shape = "nowhere", (len(choices), max(choices))
        elif self.joins == "behind":
            self.join = Linear(width + size, width, ensemble_size=ensemble_size)
        self.head = Linear(width, math.prod(self.head_shape), ensemble_size=ensemble_size)

    def encode(self, obs: Any, carry: Batch, is_first: Tensor | None) -> tuple[Any, Batch]:
        """Features ``[ensemble_size, ..., F]`` of what does not depend on the action, and the new carry."""
        return (obs, carry) if self.joins == "before" else self.torso(obs, carry, is_first)

    def forward(self, code: Any, action: Tensor | None = None) -> Tensor:
        """``Q [ensemble_size, ...]`` of ``action [..., A]``; of all discrete ones, ``[..., factors, n]``."""
        if self.joins == "before":
            code, _ = self.torso({"obs": code, "action": action}, {}, None)
        elif action is not None:
            action = action.expand(*code.shape[:-1], action.shape[-1])
            code = torch.relu(self.join(torch.cat((code, action), -1)))
        q = precise(self.head, code)
        q = q if self.ensemble_size > 1 else q.unsqueeze(0)
        return q.squeeze(-1) if self.joins != "nowhere" else q.unflatten(-1, self.head_shape)


class View(NamedTuple):
    """What the losses see of some rows."""

    dist: Any
    """the policy's distribution"""
    code: Any
    """what the critics, or the target critics, made of the observations"""


class SAC(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: PositiveInt = option("Rewards in the target before it bootstraps.")
        twin_q: bool = option("Two critics, of which the smaller one counts.")
        tau: UnitFloat = option("Polyak step of the target critics.")
        target_network_update_freq: PositiveInt = option("Critic steps between two moves of the target.")
        initial_alpha: PositiveFloat = option("Temperature at the start.")
        target_entropy: Literal["auto"] | float = option(
            "auto: minus the number of action dimensions; of discrete actions target_entropy_fraction."
        )
        target_entropy_fraction: UnitFloat = option("Discrete: auto is this share of the entropy of uniform actions.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the policy.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critics.")
        alpha_lr: Scheduled[NonNegativeFloat] | None = option(
            "Adam's step size of log(alpha); null: alpha stays at initial_alpha."
        )
        grad_clip: PositiveFloat | None = option("Limit of the gradient, per optimizer; null: off.")
        grad_clip_by: Clip = option("value, norm (every tensor by itself) or global_norm.")
        sequence_length: PositiveInt = option("Recurrent: rows of a sample that are learned from.")
        burn_in: NonNegativeInt = option("Recurrent: rows in front of them that only warm up the states.")
        stride: PositiveInt = option("Recurrent: rows between the beginnings of two samples.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action, keys = spec.single_agent.action, ("obs", "action", "reward", "terminated", "valid")
        match action:
            case spaces.Box():
                if not action.is_bounded():
                    raise ConfigError("algo", f"sac needs actions within bounds, but the environment's are {action}")
            case spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
                keys = (*keys, "action_mask")
            case _:
                served = "Box, Discrete, MultiDiscrete and MultiBinary"
                raise ConfigError("algo", f"sac serves {served} actions, but the environment's are {action}")
        return Needs(window=cfg.n_step, off_policy=True, perturbable=True, keys=keys)

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return replace(
            needs,
            window=cfg.sequence_length + cfg.n_step - 1,
            burn_in=cfg.burn_in,
            carry_stride=cfg.stride,
            keys=(*needs.keys, "is_first", "carry"),
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        action, ensemble_size = ctx.spec.single_agent.action, 2 if cfg.twin_q else 1
        assert action.shape is not None
        self.shape, self.size, choices = action.shape, math.prod(action.shape), choices_of(action)
        self.sequences, self.discrete = ctx.needs.carry_stride > 0, choices is not None
        self.model = ctx.build("model", ctx.spec.single_agent.obs)
        if self.sequences and not self.model.initial_carry(1):
            raise ConfigError(
                "model", "has no recurrent state, but critic_model has; sac needs both, or the first alone"
            )
        self.policy: TanhGaussianHead | MultiCategoricalHead = (
            TanhGaussianHead(self.model.out_dim, self.size)
            if choices is None
            else MultiCategoricalHead(self.model.out_dim, choices, self.shape)
        )
        self.critic = Critic(ctx, self.size, choices, ensemble_size)
        self.target = Critic(ctx, self.size, choices, ensemble_size).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())
        self.log_alpha = nn.Parameter(torch.tensor(math.log(cfg.initial_alpha)), requires_grad=cfg.alpha_lr is not None)
        self.actor_lr, self.critic_lr = ctx.schedule(cfg.actor_lr), ctx.schedule(cfg.critic_lr)
        self.alpha_lr = ctx.schedule(0.0 if cfg.alpha_lr is None else cfg.alpha_lr)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        def part(params, lr: Tensor) -> Optim:
            return Optim(Adam(params, lr=lr), self.cfg.grad_clip, self.cfg.grad_clip_by, lr=lr)

        parts = {
            "critic": part(self.critic.parameters(), self.critic_lr),
            "actor": part([*self.model.parameters(), *self.policy.parameters()], self.actor_lr),
        }
        return parts | ({"alpha": part([self.log_alpha], self.alpha_lr)} if self.cfg.alpha_lr is not None else {})

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("model.", "policy.")))

    # ---- acting ---------------------------------------------------------------------------------------------------

    def initial_carry(self, n: int) -> Batch:
        return self.model.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        n = len(step["is_first"])
        features, carry = self.model(step["obs"], carry, step["is_first"])
        dist = self.policy(features, step.get("action_mask"))
        if mode == "greedy":
            action = dist.mode()
        elif mode == "explore":
            action = dist.sample(self.policy.noise(self.ctx, n))
        elif isinstance(dist, MultiCategorical):
            uniform = MultiCategorical(torch.zeros_like(dist.log_probs), _allowed(dist), dist.event)
            action = uniform.sample(self.policy.noise(self.ctx, n))
        else:
            action = self.ctx.rand(n, *self.shape) * 2.0 - 1.0
        return {"action": action.view(n, *self.shape)}, carry

    # ---- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """Fold ``n_step`` rewards, and draw the noise of both reparameterised actions."""
        out = self._sequence(batch) if self.sequences else self._transition(batch)
        out["action"] = out["action"].flatten(out["returns"].ndim) if self.shape else out["action"].unsqueeze(-1)
        if not self.discrete:
            columns = out["returns"].shape[-1]
            lead = out["returns"].shape[:-1]  # a rank's share of the noise is that of its columns
            for name in ("noise", "next_noise"):
                out[name] = self.ctx.randn(columns, *lead, self.size).transpose(0, len(lead))
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def _transition(self, batch: Batch) -> Batch:
        """Row 0 of a window, and the row that its target bootstraps from; ``[B, ...]``."""
        ret, discount, last = n_step(batch["reward"], batch["terminated"], batch["valid"], self.cfg.gamma)
        columns = torch.arange(len(ret), device=ret.device)
        seen = {key: batch[key] for key in ("obs", "action_mask") if key in batch}
        now = tree.map(lambda x: x[0], seen | {"action": batch["action"]})
        later = {f"next_{key}": x for key, x in tree.map(lambda x: x[last, columns], seen).items()}
        return now | later | {"returns": ret, "discount": discount}

    def _sequence(self, batch: Batch) -> Batch:
        """All rows ``[burn_in + L + n, B, ...]``, of which the ``L`` behind the burn-in have action and target."""
        burn, length = self.cfg.burn_in, self.cfg.sequence_length
        reward, terminated, valid = (batch[key][burn:] for key in ("reward", "terminated", "valid"))
        ret, discount, last = n_step_rows(reward, terminated, valid, self.cfg.gamma, self.cfg.n_step)
        seen = {key: batch[key] for key in ("obs", "is_first", "carry", "action_mask") if key in batch}
        own = {"action": batch["action"][burn : burn + length], "valid": valid[:length]}
        return seen | own | {"returns": ret, "discount": discount, "last": last}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """All three losses in one graph; every parameter gets the gradient of its own loss alone."""
        now, later = self._unrolled(batch) if self.sequences else self._rows(batch, parts)
        alpha = self.log_alpha.exp().detach()
        losses = Losses({}, {"temperature": alpha})
        if "critic" in parts:  # 1812.05905, equations 5 and 6
            with torch.no_grad():
                next_value, _ = self.soft_value(self.target, later, batch.get("next_noise"), alpha)
                target = batch["returns"] + batch["discount"] * next_value
            q = self.q(now.code, batch["action"])
            error = q - target
            loss = 0.5 * error.square().sum(0)
            losses.terms["critic"] = loss * batch["weight"] if "weight" in batch else loss
            losses.metrics["q"] = q[0].detach()
            losses.feedback["priority"] = self._priority(error.detach().abs().mean(0), batch)
        if "actor" in parts or "alpha" in parts:
            still = {name: p.detach() for name, p in self.critic.named_parameters()}

            def critic(*inputs: Tensor) -> Tensor:
                return functional_call(self.critic, still, inputs)

            view = View(now.dist, now.code if self.critic.joins == "before" else now.code.detach())
            value, logp = self.soft_value(critic, view, batch.get("noise"), alpha)
            if "actor" in parts:  # equation 9, through critics that stand still
                losses.terms["actor"] = -value
            if "alpha" in parts:  # equation 18, on log(alpha)
                losses.terms["alpha"] = -self.log_alpha * (logp.detach() + self.target_entropy(now.dist))
            losses.metrics["logp"] = logp.detach()
        return losses

    def _rows(self, batch: Batch, parts: Sequence[str]) -> tuple[View, View]:
        """Views of the sampled rows and of those that their targets bootstrap from."""
        dist = later = None
        if "actor" in parts or "alpha" in parts:
            dist = self.dist(batch["obs"], batch.get("action_mask"))
        if "critic" in parts:
            with torch.no_grad():
                code, _ = self.target.encode(batch["next_obs"], {}, None)
                later = View(self.dist(batch["next_obs"], batch.get("next_action_mask")), code)
        code, _ = self.critic.encode(batch["obs"], {}, None)
        return View(dist, code), later or View(None, None)

    def _unrolled(self, batch: Batch) -> tuple[View, View]:
        """The same by one unroll of each network: the policy's from the stored state, the critics' from zeros."""
        last, length = batch["last"], len(batch["returns"])
        columns = torch.arange(last.shape[1], device=last.device)
        mask: Tensor | None = batch["action_mask"][self.cfg.burn_in :] if "action_mask" in batch else None
        features = self._unroll(self.model, batch, tree.map(lambda x: x[0], batch["carry"]))
        code = self._unroll(self.critic.encode, batch, {})
        now = View(self.policy(features[:length], None if mask is None else mask[:length]), code[..., :length, :, :])
        with torch.no_grad():
            next_code = self._unroll(self.target.encode, batch, {})[..., last, columns, :]
            next_dist = self.policy(features[last, columns], None if mask is None else mask[last, columns])
        return now, View(next_dist, next_code)

    def _unroll(self, torso: Callable[..., tuple[Tensor, Batch]], batch: Batch, carry: Batch) -> Tensor:
        """Features ``[..., L + n, B, F]`` of the rows behind the burn-in, which has no gradient."""
        burn = self.cfg.burn_in
        rows = {"obs": batch["obs"]}
        if burn:
            with torch.no_grad():
                _, carry = torso(tree.map(lambda x: x[:burn], rows)["obs"], carry, batch["is_first"][:burn])
        features, _ = torso(tree.map(lambda x: x[burn:], rows)["obs"], carry, batch["is_first"][burn:])
        return features

    def dist(self, obs: Any, mask: Tensor | None) -> Any:
        features, _ = self.model(obs, {}, None)
        return self.policy(features, mask)

    def soft_value(
        self, critic: Callable[..., Tensor], view: View, noise: Tensor | None, alpha: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``V = E[min Q - alpha log pi]`` and ``E[log pi]``, ``[...]``.

        Of continuous actions by one sample: 1812.05905, equation 3. Of discrete ones exactly: 1910.07207, equation
        10, where with several factors ``Q`` is a sum over them and ``pi`` their product.
        """
        dist = view.dist
        if isinstance(dist, TanhGaussian):
            assert noise is not None
            action, logp = dist.sample_and_logp(noise)
            return critic(view.code, action).amin(0) - alpha * logp, logp
        p = dist.log_probs.exp()
        logp = (p * dist.log_probs).sum((-2, -1))
        return (p * critic(view.code).amin(0)).sum((-2, -1)) - alpha * logp, logp

    def q(self, code: Any, action: Tensor) -> Tensor:
        """``Q(s, a) [ensemble_size, ...]`` of ``action [..., A]``; of discrete ones the sum over the factors."""
        if not self.discrete:
            return self.critic(code, action)
        q = self.critic(code)
        index = action.long().expand(len(q), *action.shape).unsqueeze(-1)
        return q.gather(-1, index).squeeze(-1).sum(-1)

    def target_entropy(self, dist: Any) -> Tensor | float:
        """Of every row: what is allowed may differ."""
        if self.cfg.target_entropy != "auto":
            return self.cfg.target_entropy
        if not self.discrete:
            return -float(self.size)
        return self.cfg.target_entropy_fraction * _allowed(dist).sum(-1).log().sum(-1)

    def _priority(self, error: Tensor, batch: Batch) -> Tensor:
        """``[B]``: a sequence's is the mean of its valid rows."""
        if not self.sequences:
            return error
        valid = batch["valid"]
        return torch.where(valid, error, 0.0).sum(0) / valid.sum(0).clamp(min=1)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "critic" in parts:
            self.steps += 1
            if self.cfg.target_network_update_freq == 1 or self.steps % self.cfg.target_network_update_freq == 0:
                polyak_(self.target, self.critic, self.cfg.tau)


def _allowed(dist: MultiCategorical) -> Tensor:
    """``[..., factors, n]``: forbidden choices, and those that only pad, have the lowest number there is."""
    return dist.log_probs > 0.5 * torch.finfo(dist.log_probs.dtype).min


def _is_vector(obs: spaces.Space[Any]) -> bool:
    return not isinstance(obs, spaces.Dict | spaces.Tuple) and not is_image(obs)
