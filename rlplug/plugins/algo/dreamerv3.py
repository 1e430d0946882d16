"""DreamerV3, Hafner et al. 2025 (arXiv:2301.04104; doi:10.1038/s41586-025-08744-2).

A world model learns from replayed sequences: it encodes them as states, and predicts the next state, the observation,
the reward and whether the episode continues. Actor and critic learn from trajectories that the world model imagines. A
row of a sequence holds the reward that led to it, as in the paper; a final observation is such a row, too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlplug import tree
from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Optim, Window
from rlplug.buffer import check_first_sequence
from rlplug.functional.bins import symexp_bins, symlog, two_hot_loss, two_hot_mean
from rlplug.functional.targets import polyak_
from rlplug.functional.world_models import arrivals, balanced_kl, lambda_returns
from rlplug.nn import DiagGaussian, LaProp, MultiCategorical, choices_of
from rlplug.nn.open_loop import open_loop, open_loop_errors, open_loop_pictures
from rlplug.nn.rssm import RSSM, STOCH, Actions, Decoder, DenseHead, TwoHotHead, unimix
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


class DreamerV3(Algorithm):
    @settings
    class Config:
        batch_length: PositiveInt = option("Rows of a sequence; a sample has train_batch_size sequences.")
        stride: PositiveInt = option("Rows between stored states, at which sequences begin.")
        imagination_length: PositiveInt = option("Imagined steps from every row of a sample.")
        horizon: PositiveFloat = option("The discount factor is 1 - 1 / horizon.")
        lambda_: UnitFloat = option("Weight of longer returns.")
        entropy: NonNegativeFloat = option("Weight of the policy's entropy.")
        unimix: UnitFloat = option("Share of the uniform distribution in states and discrete policies.")
        free_nats: NonNegativeFloat = option("KL divergence below which neither loss has a gradient.")
        dyn_scale: NonNegativeFloat = option("Weight of the loss that trains the prior.")
        rep_scale: NonNegativeFloat = option("Weight of the loss that trains the posterior.")
        replay_value_scale: NonNegativeFloat = option("Weight of the critic's loss on replayed rows; 0: off.")
        slow_critic_scale: NonNegativeFloat = option("Weight of the critic's distance from its slow copy.")
        slow_critic_rate: UnitFloat = option("Polyak step of the slow critic.")
        return_percentiles: tuple[UnitFloat, UnitFloat] = option("Returns are divided by the range between these.")
        return_rate: UnitFloat = option("Step of the moving average of that range.")
        return_limit: PositiveFloat = option("The range is at least this, so that small returns are not enlarged.")
        bins: PositiveInt = option("Classes of the two-hot reward and value.")
        std_bounds: tuple[PositiveFloat, PositiveFloat] = option("Standard deviation of continuous actions.")
        lr: Scheduled[NonNegativeFloat] = option("LaProp's step size.")
        warmup: NonNegativeInt = option("Updates in which the step size grows to lr.")
        agc: PositiveFloat | None = option("Largest norm of a tensor's gradient, relative to the tensor's; null: off.")
        betas: tuple[UnitFloat, UnitFloat] = option("LaProp's decay of normalized gradients, and of squares.")
        epsilon: PositiveFloat = option("LaProp's epsilon.")
        open_loop_every: PositiveInt = option("Updates between two measurements of the open-loop error.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.single_agent.action
        if choices_of(action) is None and not (isinstance(action, spaces.Box) and action.is_bounded()):
            served = "bounded Box, Discrete, MultiDiscrete and MultiBinary"
            raise ConfigError(
                "algo", f"dreamerv3 serves {served} actions, but the environment's are {action}; use algo=ppo"
            )
        if cfg.batch_length < 2:
            raise ConfigError("algo.batch_length", "1 row holds no transition; at least 2 are needed")
        keys = ("obs", "prev_action", "is_first", "reward", "terminated", "valid", "carry")
        window = Window(cfg.batch_length - 1, stride=cfg.stride)
        return Needs(window, data="windows", off_policy=True, perturbable=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        obs, action = ctx.spec.single_agent.obs, ctx.spec.single_agent.action
        self.encoder = ctx.build("model", obs)
        if (size := getattr(self.encoder, "size", None)) is None:
            raise ConfigError("model", "dreamerv3 builds its world model in the size of model=rssm; use it")
        check_first_sequence(ctx)
        self.encode = Actions(action)
        self.shape, self.choices = self.encode.shape, self.encode.choices
        self.dynamics = RSSM(size, self.encoder.out_dim, self.encode.width, cfg.unimix)
        self.decoder = Decoder(obs, size, symlog)
        inputs, units = self.dynamics.out_dim, size.units
        self.reward = TwoHotHead([inputs, units], cfg.bins, scale=0.0)
        self.cont = DenseHead([inputs, units], 1)
        self.critic = TwoHotHead([inputs, units, units, units], cfg.bins, scale=0.0)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        outputs = self.encode.width if self.choices else 2 * self.encode.width
        self.actor = DenseHead([inputs, units, units, units], outputs, scale=0.01)
        self.lr = ctx.schedule(cfg.lr)
        self.return_range: Tensor
        self.bins: Tensor
        self.register_buffer("return_range", torch.zeros(()))
        self.register_buffer("bins", symexp_bins(cfg.bins), persistent=False)

    def optimizers(self) -> dict[str, Optim]:
        cfg, params = self.cfg, [p for p in self.parameters() if p.requires_grad]
        laprop = LaProp(params, self.lr, betas=cfg.betas, eps=cfg.epsilon, agc=cfg.agc, warmup=cfg.warmup)
        return {"all": Optim(laprop, lr=self.lr)}

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("encoder.", "dynamics.", "actor.")))

    # ---- acting ---------------------------------------------------------------------------------------------------

    def initial_carry(self, n: int) -> Batch:
        return self.dynamics.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act on a state that is sampled in training, and on the most likely one in mode ``greedy``."""
        ctx, n = self.ctx, step["is_first"].shape[0]
        rows = {key: tree.map(lambda x: x.unsqueeze(0), step[key]) for key in ("obs", "prev_action", "is_first")}
        state = self.states(rows, carry, None if mode == "greedy" else ctx.rand(n, STOCH).unsqueeze(0))
        policy = self.policy(self.actor(self.features(state)[0]))
        if mode == "greedy":
            action = policy.mode()
        elif isinstance(policy, MultiCategorical):
            policy = policy.uniform() if mode == "random" else policy
            action = policy.sample(ctx.rand(n, self.encode.size))
        elif mode == "random":
            action = ctx.rand(n, *self.shape) * 2.0 - 1.0
        else:
            action = policy.sample(ctx.randn(n, self.encode.size)).clamp(-1.0, 1.0)
        after = {"deter": state["deter"][0], "stoch": self.dynamics.classes(state["stoch"][0])}
        return {"action": action.view(n, *self.shape)}, after

    def policy(self, out: Tensor) -> MultiCategorical | DiagGaussian:
        """Return the policy by the actor's output ``[..., N]``; a discrete one is uniform in a share of all cases."""
        if not self.choices:
            mean, std = out.chunk(2, -1)
            low, high = self.cfg.std_bounds
            return DiagGaussian(mean.tanh(), ((high - low) * (std + 2.0).sigmoid() + low).log(), self.shape)
        width, lowest = max(self.choices), torch.finfo(out.dtype).min
        mixed = [unimix(x, self.cfg.unimix).log() for x in out.split(self.choices, -1)]
        padded = [torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=lowest) for x in mixed]
        return MultiCategorical(torch.stack(padded, -2), None, self.shape)

    @staticmethod
    def features(state: Batch) -> Tensor:
        """Return the inputs of all heads, ``[..., D + S * C]``."""
        return torch.cat((state["deter"], state["stoch"]), -1)

    def states(self, rows: Batch, carry: Batch, noise: Tensor | None) -> Batch:
        """Return the states of ``RSSM.observe`` for rows ``[T, B, ...]``."""
        tokens, _ = self.encoder(rows["obs"], {}, None)
        return self.dynamics.observe(tokens, self.encode(rows["prev_action"]), rows["is_first"], carry, noise)

    # ---- learning -------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """Draw the noise of all states and actions, and find the rows that end an episode."""
        (rows, columns), steps, ctx = batch["valid"].shape, self.cfg.imagination_length, self.ctx
        draw = ctx.rand if self.choices else ctx.randn
        out = {key: batch[key] for key in ("obs", "prev_action", "is_first")}
        out["noise"] = {
            "states": ctx.rand(columns, rows, STOCH).transpose(0, 1),
            "imagined": ctx.rand(columns, rows, steps, STOCH).transpose(0, 1),
            "actions": draw(columns, rows, steps, self.encode.size).transpose(0, 1),
        }
        carry = {key: leaf[:1] for key, leaf in batch["carry"].items()}
        return out | arrivals(batch) | {"carry": carry, "valid": torch.ones_like(batch["valid"])}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the losses of the world model, equation 2, and of actor and critic, equations 5 and 6."""
        cfg, before = self.cfg, tree.take(batch["carry"], 0)
        state = self.states(batch, before, batch["noise"]["states"])
        x = self.features(state)
        prior = self.dynamics.probabilities(self.dynamics.prior(state["deter"]))
        dyn, rep = balanced_kl(state["p"], prior, cfg.free_nats)
        terms = self.decoder.loss(state["deter"], state["stoch"], batch["obs"])
        terms["reward"] = two_hot_loss(self.reward(x), batch["reward"], self.bins) * batch["rewarded"]
        goes_on = (~batch["terminal"]).to(x.dtype) * (1.0 - 1.0 / cfg.horizon)
        cont = binary_cross_entropy_with_logits(self.cont(x).squeeze(-1), goes_on, reduction="none")
        terms |= {"cont": cont * batch["known"], "dyn": cfg.dyn_scale * dyn, "rep": cfg.rep_scale * rep}
        imagined, metrics, returns = self._imagine(state, batch["noise"])
        terms |= imagined
        if cfg.replay_value_scale:
            terms["replay_value"] = cfg.replay_value_scale * self._replay_value(x, batch, goes_on, returns[0])
        stored = {"deter": state["deter"].detach(), "stoch": self.dynamics.classes(state["stoch"])}
        carry = {key: torch.cat((before[key][None], leaf[:-1]))[:: cfg.stride] for key, leaf in stored.items()}
        metrics |= {"dyn_kl": dyn.detach(), "return": returns[0], "return_range": self.return_range.clone()}
        feedback = {"carry": carry, "returns": returns.flatten(0, 1)}
        return Losses(terms, metrics, feedback, lambda: self._open_loop_errors(batch))

    def _value_loss(self, x: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the critic's loss ``[...]`` in states ``[..., F]``, with its distance from the slow critic."""
        with torch.no_grad():
            slow = two_hot_mean(self.slow_critic(x), self.bins)
        loss = two_hot_loss(logits, target, self.bins)
        return loss + self.cfg.slow_critic_scale * two_hot_loss(logits, slow, self.bins)

    def _imagine(self, state: Batch, noise: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return the losses of actor and critic, their metrics ``[T, B]``, and the returns ``[H, T, B]``.

        The world model gets no gradient. Trajectories begin in every row of the sample.
        """
        cfg, lead = self.cfg, state["deter"].shape[:2]
        deter, stoch = (state[key].detach().flatten(0, 1) for key in ("deter", "stoch"))
        xs, outs, actions = [torch.cat((deter, stoch), -1)], list[Tensor](), list[Tensor]()
        states, choices = (noise[key].flatten(0, 1) for key in ("imagined", "actions"))
        for h in range(cfg.imagination_length):
            outs.append(self.actor(xs[-1]))
            with torch.no_grad():
                actions.append(self.policy(outs[-1]).sample(choices[:, h]))
                deter, stoch = self.dynamics.imagine(deter, stoch, self.encode(actions[-1]), states[:, h])
                xs.append(torch.cat((deter, stoch), -1))
        x = torch.stack(xs)  # [H+1, n, F]
        logits, policy = self.critic(x), self.policy(torch.stack(outs))
        with torch.no_grad():
            cont, value = self.cont(x).squeeze(-1).sigmoid(), two_hot_mean(logits, self.bins)
            returns = lambda_returns(two_hot_mean(self.reward(x), self.bins), value, cont, cfg.lambda_)
            weight = cont.cumprod(0)[:-1]
            advantage = (returns - value[:-1]) / self.return_range.clamp(min=cfg.return_limit)
        entropy = policy.entropy()
        actor = -weight * (policy.logp(torch.stack(actions)) * advantage + cfg.entropy * entropy)  # equation 6
        critic = weight * self._value_loss(x[:-1], logits[:-1], returns)  # equation 5
        terms = {"actor": actor.mean(0).view(lead), "critic": critic.mean(0).view(lead)}
        return terms, {"entropy": entropy.detach().mean(0).view(lead)}, returns.unflatten(1, lead)

    def _replay_value(self, x: Tensor, batch: Batch, discount: Tensor, imagined: Tensor) -> Tensor:
        """Return the critic's loss on replayed rewards ``[T, B]``, which bootstrap from imagined returns."""
        returns = lambda_returns(batch["reward"], imagined, discount, self.cfg.lambda_, batch["last"])
        loss = self._value_loss(x[:-1], self.critic(x[:-1]), returns) * ~batch["last"][:-1] * (len(x) / (len(x) - 1.0))
        return torch.cat((loss, torch.zeros_like(loss[:1])))  # the mean over T - 1 rows

    def update(self, batch: Batch, learner: Learner) -> Losses:
        return learner.minimize(batch, self, diagnostics=learner.progress.updates % self.cfg.open_loop_every == 0)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        """Average the range of returns, equation 7, which the next update uses, and track the critic."""
        returns = learner.gather(losses.feedback.pop("returns").T).flatten()
        low, high = torch.quantile(returns, returns.new_tensor(self.cfg.return_percentiles)).unbind()
        self.return_range.lerp_(high - low, self.cfg.return_rate)
        polyak_(self.slow_critic, self.critic, self.cfg.slow_critic_rate)

    # ---- what it imagines -----------------------------------------------------------------------------------------

    def _open_loop(self, batch: Batch) -> tuple[Tensor, Tensor]:
        imagine, action = partial(self.dynamics.imagine, noise=None), self.encode(batch["prev_action"])
        return open_loop(partial(self.states, noise=None), imagine, batch, action)

    def _open_loop_errors(self, batch: Batch) -> dict[str, Tensor]:
        states = self._open_loop(batch)
        return open_loop_errors(
            self.decoder, states, two_hot_mean(self.reward(torch.cat(states, -1)), self.bins), batch
        )

    def pictures(self, batch: Batch) -> Tensor | None:
        return open_loop_pictures(self.decoder, self._open_loop(batch), batch["obs"])
