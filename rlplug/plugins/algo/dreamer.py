"""Dreamer, Hafner et al. 2020 (arXiv:1912.01603): the gradient of imagined returns flows through the world model.

A world model learns from replayed sequences, as in PlaNet (arXiv:1811.04551). The actor maximizes the returns of
trajectories that the model imagines, by backpropagation through rewards, values, states and actions. A row of a
sequence holds the reward that led to it; a final observation is such a row, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rlplug import tree
from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Optim, Window
from rlplug.buffer import check_first_sequence
from rlplug.functional.bins import symlog
from rlplug.functional.world_models import arrivals, lambda_returns
from rlplug.nn import MLP, Activation, Adam, Linear, constant
from rlplug.nn.gaussian_rssm import GaussianRSSM, sampled
from rlplug.nn.open_loop import open_loop, open_loop_errors, open_loop_pictures
from rlplug.nn.rssm import Actions, Decoder
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class Dreamer(Algorithm):
    @settings
    class Config:
        batch_length: PositiveInt = option("Rows of a sequence; a sample has train_batch_size sequences.")
        stride: PositiveInt = option("Rows between stored states, at which sequences begin.")
        deter: PositiveInt = option("Size of the deterministic state; a multiple of 8.")
        stoch: PositiveInt = option("Size of the stochastic state.")
        hidden: PositiveInt = option("Size of the layers of the world model's dynamics.")
        units: PositiveInt = option("Size of the layers of actor, critic, reward and continuation.")
        activation: Activation = option("Nonlinearity of these layers.")
        imagination_length: PositiveInt = option("Imagined steps from every row of a sample.")
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("Weight of longer returns.")
        free_nats: NonNegativeFloat = option("Mean KL divergence of a sample below which it is not reduced.")
        kl_scale: NonNegativeFloat = option("Weight of the KL divergence.")
        predict_discount: bool = option("Learn where episodes terminate; false: imagined episodes never do.")
        discount_scale: NonNegativeFloat = option("Weight of that loss.")
        mean_scale: PositiveFloat = option("Bound of an action's mean before tanh.")
        initial_std: PositiveFloat = option("Initial standard deviation of actions before tanh.")
        least_std: PositiveFloat = option("Minimum standard deviation of actions before tanh.")
        explore_noise: NonNegativeFloat = option("Standard deviation of the noise added to actions.")
        model_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the world model.")
        actor_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the actor.")
        critic_lr: Scheduled[NonNegativeFloat] = option("Adam's step size of the critic.")
        adam_epsilon: PositiveFloat = option("Adam's epsilon.")
        grad_clip: PositiveFloat | None = option("Maximum of the gradient's global norm, per optimizer; null: off.")
        open_loop_every: PositiveInt = option("Updates between two measurements of the open-loop error.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.single_agent.action
        if not (isinstance(action, spaces.Box) and action.is_bounded()):
            other = "ppo" if isinstance(action, spaces.Box) or spec.has_masks else "dreamerv3"
            said = f"dreamer needs bounded Box actions, but the environment's are {action}; use algo={other}"
            raise ConfigError("algo", said)
        if cfg.batch_length < 2 or cfg.imagination_length < 2:
            key = "batch_length" if cfg.batch_length < 2 else "imagination_length"
            raise ConfigError(f"algo.{key}", "1 row holds no transition; at least 2 are needed")
        if cfg.deter % 8:
            raise ConfigError("algo.deter", f"{cfg.deter} is no multiple of 8, the blocks of the image decoder")
        keys = ("obs", "prev_action", "is_first", "reward", "terminated", "valid", "carry")
        window = Window(cfg.batch_length - 1, stride=cfg.stride)
        return Needs(window, data="windows", off_policy=True, perturbable=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        obs = ctx.spec.single_agent.obs
        self.encode = Actions(ctx.spec.single_agent.action)
        self.encoder = ctx.build("model", obs)
        if (size := getattr(self.encoder, "size", None)) is None:
            raise ConfigError("model", "dreamer decodes with the networks of model=rssm; use it")
        check_first_sequence(ctx)
        self.dynamics = GaussianRSSM(cfg.deter, cfg.stoch, cfg.hidden, self.encoder.out_dim, self.encode.width)
        self.decoder = Decoder(obs, size._replace(deter=cfg.deter), symlog, cfg.stoch)
        self.reward, self.critic = self._head(2, 1), self._head(3, 1)
        self.actor = self._head(4, 2 * self.encode.width)
        self.cont = self._head(3, 1) if cfg.predict_discount else None
        self.world = [self.encoder, self.dynamics, self.decoder, self.reward, *([self.cont] if self.cont else [])]
        self.kl: Tensor
        self.register_buffer("kl", torch.full((), torch.inf))
        self.lrs = {part: ctx.schedule(getattr(cfg, f"{part}_lr")) for part in ("model", "actor", "critic")}

    def _head(self, layers: int, outputs: int) -> nn.Module:
        units = self.cfg.units
        body = MLP(self.dynamics.out_dim, [units] * layers, self.cfg.activation)
        return nn.Sequential(body, Linear(units, outputs))

    def optimizers(self) -> dict[str, Optim]:
        of = {"model": self.world, "actor": [self.actor], "critic": [self.critic]}
        return {part: self._optim(part, modules) for part, modules in of.items()}

    def _optim(self, part: str, modules: Iterable[nn.Module]) -> Optim:
        params, lr = [p for module in modules for p in module.parameters()], self.lrs[part]
        return Optim(Adam(params, lr=lr, eps=self.cfg.adam_epsilon), self.cfg.grad_clip, lr=lr)

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("encoder.", "dynamics.", "actor.")))

    # ---- acting ---------------------------------------------------------------------------------------------------

    def initial_carry(self, n: int) -> Batch:
        return self.dynamics.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on a state that is sampled in training, and on its mean in mode ``greedy``."""
        ctx, n = self.ctx, step["is_first"].shape[0]
        rows = {key: tree.map(lambda x: x.unsqueeze(0), step[key]) for key in ("obs", "prev_action", "is_first")}
        noise = None if mode == "greedy" else ctx.randn(n, self.cfg.stoch).unsqueeze(0)
        state = self.states(rows, carry, noise)
        after = {key: state[key][0] for key in ("deter", "stoch")}
        action = self._explored(self.actor(torch.cat((after["deter"], after["stoch"]), -1)), mode)
        return {"action": action.view(n, *self.encode.shape)}, after

    def _explored(self, out: Tensor, mode: Mode) -> Tensor:
        """Return actions ``[n, A]`` by the policy's output, with ``explore_noise``, or random ones."""
        ctx, n, size = self.ctx, out.shape[0], self.encode.size
        if mode == "random":
            return ctx.rand(n, size) * 2.0 - 1.0
        if mode == "greedy":
            return self.squashed(out, None)
        action = self.squashed(out, ctx.randn(n, size))
        return (action + self.cfg.explore_noise * ctx.randn(n, size)).clamp(-1.0, 1.0)

    def squashed(self, out: Tensor, noise: Tensor | None) -> Tensor:
        """Return actions ``[..., A]`` in [-1, 1], differentiable; ``noise`` is normal, None: the median."""
        cfg = self.cfg
        mean, std = out.chunk(2, -1)
        mean = cfg.mean_scale * (mean / cfg.mean_scale).tanh()
        shift = torch.tensor(cfg.initial_std, dtype=out.dtype).expm1().log()
        return sampled((mean, F.softplus(std + shift) + cfg.least_std), noise).tanh()

    def states(self, rows: Batch, carry: Batch, noise: Tensor | None) -> Batch:
        """Return the states of ``GaussianRSSM.observe`` for rows ``[T, B, ...]``."""
        tokens, _ = self.encoder(rows["obs"], {}, None)
        return self.dynamics.observe(tokens, self.encode(rows["prev_action"]), rows["is_first"], carry, noise)

    # ---- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """Draw the noise of all states and actions, and find the rows that end an episode."""
        (rows, columns), steps, ctx = batch["valid"].shape, self.cfg.imagination_length, self.ctx
        out = {key: batch[key] for key in ("obs", "prev_action", "is_first")}
        out["noise"] = {
            "states": ctx.randn(columns, rows, self.cfg.stoch).transpose(0, 1),
            "imagined": ctx.randn(columns, rows, steps, self.cfg.stoch).transpose(0, 1),
            "actions": ctx.randn(columns, rows, steps, self.encode.size).transpose(0, 1),
        }
        carry = {key: leaf[:1] for key, leaf in batch["carry"].items()}
        return out | arrivals(batch) | {"carry": carry, "valid": torch.ones_like(batch["valid"])}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of the world model, equation 10, of the actor, 7, and of the critic, 8."""
        before = tree.take(batch["carry"], 0)
        state = self.states(batch, before, batch["noise"]["states"])
        losses = self._model_losses(state, batch) if "model" in parts else Losses({})
        if "actor" in parts or "critic" in parts:
            start = {key: state[key].detach().flatten(0, 1) for key in ("deter", "stoch")}
            terms, losses.metrics["return"] = self._imagine(start, batch["noise"], batch["valid"].shape)
            losses.terms |= {part: term for part, term in terms.items() if part in parts}
        stored = {key: torch.cat((before[key][None], state[key][:-1].detach())) for key in before}
        losses.feedback["carry"] = {key: leaf[:: self.cfg.stride] for key, leaf in stored.items()}
        losses.diagnostics = lambda: self._open_loop_errors(batch)
        return losses

    def _model_losses(self, state: Batch, batch: Batch) -> Losses:
        """Compute negative log-likelihoods, and the KL divergence if its last mean was above ``free_nats``."""
        cfg, x = self.cfg, torch.cat((state["deter"], state["stoch"]), -1)
        mean, std = self.dynamics.gaussian(self.dynamics.prior(state["deter"]))
        ratio, shift = state["std"] / std, (state["mean"] - mean) / std
        kl = (0.5 * (ratio.square() + shift.square() - 1.0) - ratio.log()).sum(-1)
        decoded = self.decoder.loss(state["deter"], state["stoch"], batch["obs"])
        terms = {key: 0.5 * term for key, term in decoded.items()}
        terms["reward"] = 0.5 * (self.reward(x).squeeze(-1) - batch["reward"]).square() * batch["rewarded"]
        terms["kl"] = cfg.kl_scale * kl * (self.kl > cfg.free_nats)
        if self.cont is not None:
            goes_on = cfg.gamma * (~batch["terminal"]).to(x.dtype)
            cont = F.binary_cross_entropy_with_logits(self.cont(x).squeeze(-1), goes_on, reduction="none")
            terms["cont"] = cfg.discount_scale * cont * batch["known"]
        return Losses(terms, {"kl": kl.detach()})

    def _imagine(self, state: Batch, noise: Batch, lead: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the losses of actor and critic and the returns, ``[T, B]`` each."""
        cfg, xs = self.cfg, list[Tensor]()
        states, actions = (noise[key].flatten(0, 1) for key in ("imagined", "actions"))
        with constant([*self.world, self.critic]):  # the actor's gradient flows through them, and stops there
            deter, stoch = state["deter"], state["stoch"]
            for h in range(cfg.imagination_length):
                action = self.squashed(self.actor(torch.cat((deter, stoch), -1).detach()), actions[:, h])
                deter, stoch = self.dynamics(deter, stoch, action, states[:, h])
                xs.append(torch.cat((deter, stoch), -1))
            x = torch.stack(xs)  # [H, n, F]
            reward, value = self.reward(x).squeeze(-1), self.critic(x).squeeze(-1)
            discount = torch.full_like(reward, cfg.gamma)
            if self.cont is not None:
                discount = self.cont(x).squeeze(-1).sigmoid()
            ahead = [torch.cat((leaf[:1], leaf[:-1])) for leaf in (reward, discount)]  # here a row holds its reward
            returns = lambda_returns(ahead[0], value, ahead[1], cfg.lambda_)
            weight = torch.cat((torch.ones_like(discount[:1]), discount[:-2].detach())).cumprod(0)
        actor = -weight * returns
        critic = 0.5 * weight * (self.critic(x[:-1].detach()).squeeze(-1) - returns.detach()).square()
        terms = {"actor": actor.mean(0).view(*lead), "critic": critic.mean(0).view(*lead)}
        return terms, returns[0].detach().view(*lead)

    def update(self, batch: Batch, learner: Learner) -> Losses:
        return learner.minimize(batch, self, diagnostics=learner.progress.updates % self.cfg.open_loop_every == 0)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "kl" in losses.metrics:
            self.kl.copy_(losses.metrics["kl"])

    # ---- what it imagines -----------------------------------------------------------------------------------------

    def _open_loop(self, batch: Batch) -> tuple[Tensor, Tensor]:
        imagine, action = partial(self.dynamics, noise=None), self.encode(batch["prev_action"])
        return open_loop(partial(self.states, noise=None), imagine, batch, action)

    def _open_loop_errors(self, batch: Batch) -> dict[str, Tensor]:
        states = self._open_loop(batch)
        return open_loop_errors(self.decoder, states, self.reward(torch.cat(states, -1)).squeeze(-1), batch)

    def pictures(self, batch: Batch) -> Tensor | None:
        return open_loop_pictures(self.decoder, self._open_loop(batch), batch["obs"])
