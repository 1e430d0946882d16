# pyright: strict
"""DreamerV3: Mastering Diverse Domains through World Models, Hafner et al. 2023 (arXiv:2301.04104).

The state of a row is ``deter [B, D]`` and ``stoch [B, S, C]``. Heads regress symlog values where the paper has two-hot.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.nn.distributions import Categorical
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


def symlog(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    return x.sign() * x.abs().expm1()


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """One-hot draw ``[..., S, C]`` with the straight-through gradient, from 1 % uniform and 99 % ``logits``."""
    mixed = 0.99 * logits.softmax(-1) + 0.01 / logits.shape[-1]
    return one_hot(Categorical(mixed.log()).sample(noise), logits.shape[-1]) + mixed - mixed.detach()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of categorical logits ``[..., S, C]``, at least 1 nat: ``[...]``."""
    terms = p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))
    return terms.sum((-2, -1)).clamp(min=1.0)


class DreamerV3(Algorithm):
    spread: Tensor

    @settings
    class Config:
        window: PositiveInt = option("Transitions of a sample.")
        deter: PositiveInt = option("Size of the deterministic state.")
        stoch: PositiveInt = option("Categorical variables of the stochastic state.")
        classes: PositiveInt = option("Classes of each of them.")
        horizon: PositiveInt = option("Imagined steps.")
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("Lambda of the imagined returns.")
        entropy: PositiveFloat = option("Weight of the policy's entropy.")
        tau: UnitFloat = option("Step of the slow critic.")
        lr: PositiveFloat = option("Adam's step size.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        assert group.obs.shape
        self.actions, code = int(group.action.n), cfg.stoch * cfg.classes
        self.encoder: Model = ctx.build("model", group.obs)
        self.cell = nn.GRUCell(code + self.actions, cfg.deter)
        self.prior = nn.Linear(cfg.deter, code)
        self.posterior = nn.Linear(cfg.deter + self.encoder.out_dim, code)
        self.decoder = nn.Linear(cfg.deter + code, group.obs.shape[0])
        self.reward, self.cont, self.critic = (nn.Linear(cfg.deter + code, 1) for _ in range(3))
        self.actor = nn.Linear(cfg.deter + code, self.actions)
        self.slow = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("spread", torch.ones(()))

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(spec.single_agent.action, Discrete):
            raise ConfigError("algo.name", "this dreamerv3 needs discrete actions")
        keys = ("obs", "prev_action", "prev_reward", "terminated", "carry")
        return Needs(Window(cfg.window, stride=1), data="windows", off_policy=True, perturbable=True, keys=keys)

    def initial_carry(self, n: int) -> Batch:
        return {"deter": torch.zeros(n, self.cfg.deter), "stoch": torch.zeros(n, self.cfg.stoch, self.cfg.classes)}

    def dream(self, carry: Batch, action: Tensor) -> tuple[Tensor, Tensor]:
        """The next deterministic state, and the logits of the prior ``[B, S, C]``."""
        x = torch.cat([carry["stoch"].flatten(-2), one_hot(action, self.actions)], -1)
        deter: Tensor = self.cell(x, carry["deter"])
        return deter, self.prior(deter).unflatten(-1, (self.cfg.stoch, self.cfg.classes))

    def see(self, carry: Batch, row: Batch, features: Tensor, noise: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """The state of a row from the state before it; logits of its prior and posterior."""
        keep = ~row["is_first"]
        carry = {"deter": carry["deter"] * keep[:, None], "stoch": carry["stoch"] * keep[:, None, None]}
        deter, prior = self.dream(carry, row["prev_action"])
        posterior = self.posterior(torch.cat([deter, features], -1)).view_as(prior)
        return {"deter": deter, "stoch": draw(posterior, noise)}, prior, posterior

    @staticmethod
    def join(state: Batch) -> Tensor:
        return torch.cat([state["deter"], state["stoch"].flatten(-2)], -1)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        features, _ = self.encoder(step["obs"], {}, None)
        state, _, _ = self.see(carry, step, features, self.ctx.rand(len(features), self.cfg.stoch, 1))
        policy = Categorical(self.actor(self.join(state)) * (mode != "random"))
        action = policy.mode() if mode == "greedy" else policy.sample(self.ctx.rand(len(features), 1))
        return {"action": action}, state

    def prepare(self, batch: Batch) -> Batch:
        """Noise for every row and every imagined step; every row, a final observation too, carries a loss."""
        cfg, (rows, columns) = self.cfg, batch["valid"].shape
        shapes = {"see": (cfg.stoch, 1), "dream": (cfg.horizon, cfg.stoch, 1), "choose": (cfg.horizon, 1)}
        noise = {name: self.ctx.rand(columns, rows, *shape).transpose(0, 1) for name, shape in shapes.items()}
        over = batch["terminated"].roll(1, 0) & ~batch["is_first"]
        over[0] = False  # a window never begins with a final observation
        return batch | {"noise": noise, "over": over, "valid": torch.ones_like(batch["valid"])}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        rows, columns = batch["valid"].shape
        features, _ = self.encoder(batch["obs"], {}, None)
        before: list[Batch] = [{key: leaf[0] for key, leaf in batch["carry"].items()}]
        priors, posteriors = list[Tensor](), list[Tensor]()
        for t in range(rows):
            row = {key: batch[key][t] for key in ("prev_action", "is_first")}
            state, prior, posterior = self.see(before[-1], row, features[t], batch["noise"]["see"][t])
            before.append(state)
            priors.append(prior)
            posteriors.append(posterior)
        prior, posterior = torch.stack(priors), torch.stack(posteriors)
        states: Batch = {key: torch.stack([s[key] for s in before]) for key in before[0]}  # [T+2, B, ...]
        x = self.join({key: leaf[1:] for key, leaf in states.items()})
        terms = {
            "decoder": (self.decoder(x) - symlog(batch["obs"])).square().sum(-1),
            "reward": (self.reward(x).squeeze(-1) - symlog(batch["prev_reward"])).square(),
            "cont": binary_cross_entropy_with_logits(
                self.cont(x).squeeze(-1), (~batch["over"]).float(), reduction="none"
            ),
            "dynamics": kl(posterior.detach(), prior),
            "representation": 0.1 * kl(posterior, prior.detach()),
        }
        start = {key: leaf[1:].detach().flatten(0, 1) for key, leaf in states.items()}
        noise = {key: batch["noise"][key].flatten(0, 1) for key in ("dream", "choose")}  # [(T+1)B, H, ...]
        imagined, returns = self.imagine(start, noise)
        terms |= {name: term.view(rows, columns) for name, term in imagined.items()}
        feedback: Batch = {"carry": {key: leaf[:-1].detach() for key, leaf in states.items()}}
        return Losses(terms, {}, feedback | {"returns": returns.view(rows, columns, -1)})

    def imagine(self, state: Batch, noise: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Losses of actor and critic ``[n]``, and the imagined returns ``[n, H]``. The model gets no gradient."""
        cfg, xs, actions = self.cfg, [self.join(state)], list[Tensor]()
        with torch.no_grad():
            for h in range(cfg.horizon):
                actions.append(Categorical(self.actor(xs[-1])).sample(noise["choose"][:, h]))
                deter, prior = self.dream(state, actions[-1])
                state = {"deter": deter, "stoch": draw(prior, noise["dream"][:, h])}
                xs.append(self.join(state))
            x = torch.stack(xs, 1)  # [n, H+1, F]
            reward, value = symexp(self.reward(x).squeeze(-1)), symexp(self.critic(x).squeeze(-1))
            discount = cfg.gamma * self.cont(x).squeeze(-1).sigmoid()
            returns = value.clone()
            for h in reversed(range(cfg.horizon)):
                mixed = (1 - cfg.lambda_) * value[:, h + 1] + cfg.lambda_ * returns[:, h + 1]
                returns[:, h] = reward[:, h + 1] + discount[:, h + 1] * mixed
            returns, weight = returns[:, :-1], discount[:, :-1].cumprod(1) / cfg.gamma
            advantage = (returns - value[:, :-1]) / self.spread.clamp(min=1.0)
        policy = Categorical(self.actor(x[:, :-1]))
        guess, slow = self.critic(x[:, :-1]).squeeze(-1), self.slow(x[:, :-1]).squeeze(-1).detach()
        critic = (guess - symlog(returns)).square() + (guess - slow).square()
        actor = -(policy.logp(torch.stack(actions, 1)) * advantage + cfg.entropy * policy.entropy())
        return {"actor": (weight * actor).mean(1), "critic": (weight * critic).mean(1)}, returns

    def optimizers(self) -> dict[str, Optim]:
        trained = [p for p in self.parameters() if p.requires_grad]
        return {"all": Optim(torch.optim.Adam(trained, lr=self.cfg.lr), grad_clip=1000.0)}

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        returns = learner.gather(losses.feedback.pop("returns").flatten())
        low, high = torch.quantile(returns, returns.new_tensor([0.05, 0.95])).unbind()
        self.spread.lerp_(high - low, 0.01)
        for slow, p in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
            slow.data.lerp_(p.data, self.cfg.tau)

    def actor_keys(self) -> tuple[str, ...]:
        names: dict[str, Any] = self.state_dict()
        acting = ("encoder.", "cell.", "prior.", "posterior.", "actor.")
        return tuple(name for name in names if name.startswith(acting))
