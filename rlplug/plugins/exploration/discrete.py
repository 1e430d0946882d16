"""Exploration with discrete actions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug import host
from rlplug.api import Context, Exploration
from rlplug.nn import choices_of
from rlplug.settings import NonNegativeFloat, PositiveFloat, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError


def best(scores: Tensor, mask: Tensor | None, sizes: list[int], like: Tensor) -> Tensor:
    """Return the allowed choice with the highest score in every part of an action.

    Args:
        scores: ``[B, sum(sizes)]``, part by part, without NaN.
        mask: shaped like ``scores``; allows at least one choice in every part.
        like: actions ``[B, ...]`` with the shape and dtype of the result.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.stack([part.argmax(-1) for part in scores.split(sizes, -1)], -1).view(like.shape).to(like.dtype)


class EpsilonGreedy(Exploration):
    """With probability epsilon, samples all parts of an action uniformly from the allowed ones.

    With ``ape_x_alpha``, environment ``i`` of ``N`` has ``epsilon^(1 + alpha i / (N - 1))``
    (Horgan et al. 2018, arXiv:1803.00933, section 4).

    Raises:
        ConfigError: actions are not discrete, or ``ape_x_alpha`` is set for one environment.
    """

    traceable = True

    @settings
    class Config:
        epsilon: Scheduled[UnitFloat] = option("The optimizer's epsilon, added outside the square root.")
        ape_x_alpha: NonNegativeFloat | None = option("Spread of epsilon over the environments; null: the same in all.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        space = ctx.spec.single_agent.action
        sizes = choices_of(space)
        if sizes is None:
            raise ConfigError(
                "exploration.epsilon_greedy", f"chooses among discrete actions, but the actions are {space}"
            )
        if cfg.ape_x_alpha is not None and ctx.num_envs == 1:
            said = "1 environment would get the largest of Ape-X's epsilons and always explore; use 2 or more"
            raise ConfigError("num_envs", said)
        self.ctx, self.sizes, self.alpha = ctx, sizes, cfg.ape_x_alpha
        self.epsilon = ctx.schedule(cfg.epsilon)

    def noise_by_env(self) -> Tensor | None:
        if self.alpha is None:
            return None
        return self.epsilon ** (1.0 + self.alpha * torch.linspace(0.0, 1.0, self.ctx.num_envs, device=self.ctx.device))

    def epsilons(self) -> Tensor:
        """Return epsilon of every environment, ``[B]``; 0-d if they are equal."""
        every = self.noise_by_env()
        return self.epsilon if every is None else every[[*self.ctx.env_ids]]

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action = out["action"]
        noise = self.ctx.rand(len(action), 1 + sum(self.sizes))
        explores = noise[:, 0] < self.epsilons()
        if host.reads_freely(explores) and not explores.any():
            return out, carry
        random = best(noise[:, 1:], step.get("action_mask"), self.sizes, action)
        explores = explores.view(-1, *(1 for _ in action.shape[1:]))
        return out | {"action": torch.where(explores, random, action)}, carry


class Boltzmann(Exploration):
    """Samples allowed actions with probabilities ``softmax(q / temperature)`` (Sutton 1990).

    For algorithms whose ``act`` returns ``q [B, A]``, in the layout of ``action_mask``. It returns ``logp`` of its
    actions, too.
    """

    traceable = True
    overrides_action = True

    @settings
    class Config:
        temperature: Scheduled[PositiveFloat] = option("Temperature in units of q; towards 0: greedy.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        space = ctx.spec.single_agent.action
        sizes = choices_of(space)
        if sizes is None:
            raise ConfigError("exploration.boltzmann", f"chooses among discrete actions, but the actions are {space}")
        self.ctx, self.sizes = ctx, sizes
        self.temperature = ctx.schedule(cfg.temperature)

    def perturb(self, out: Batch, step: Batch, carry: Batch) -> tuple[Batch, Batch]:
        action, size = out["action"], sum(self.sizes)
        q: Tensor | None = out.get("q")
        if q is None or q.shape != (len(action), size):
            said = "gives none" if q is None else f"gives {list(q.shape[1:])} of them"
            raise ConfigError(
                "exploration.boltzmann",
                f"draws by the values of {size} actions, but this algorithm {said}; use algo=dqn",
            )
        noise = self.ctx.rand(len(action), size).clamp_min(torch.finfo(q.dtype).tiny)
        gumbel = -(-noise.log()).clamp_min(torch.finfo(q.dtype).tiny).log()
        scores = q / self.temperature
        if (mask := step.get("action_mask")) is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        action = best(scores + gumbel, None, self.sizes, action)
        chosen = action.reshape(len(action), -1, 1).long().unbind(1)
        parts = zip(scores.split(self.sizes, -1), chosen, strict=True)
        logp = torch.stack([part.log_softmax(-1).gather(-1, choice) for part, choice in parts]).sum((0, -1))
        return out | {"action": action, "logp": logp}, carry
