"""SlateQ, Ie et al. 2019 (arXiv:1905.12767): the Q-value of a slate of documents is the mean of its documents' values,
weighted by the probabilities with which the user chooses them. One network evaluates a user with one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.sequences import n_step_transitions
from rlplug.functional.slates import exact_slate, greedy_slate, slate_value, top_k
from rlplug.functional.targets import polyak_
from rlplug.functional.td import huber
from rlplug.nn import Adam, Linear, Module
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode

Choice = Literal["exact", "greedy", "top_k", "random"]


class ItemNetwork(Module):
    """Computes the value of every document for a user, and of watching nothing: the last of ``n + 1`` items."""

    def __init__(self, ctx: Context, user: int, document: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build("model", spaces.Box(-np.inf, np.inf, (user + document + 1,), np.float32))
        self.value = Linear(self.torso.out_dim, 1, gain=1.0)

    def forward(self, user: Tensor, documents: Tensor) -> Tensor:
        """Map ``user [B, U]`` and ``documents [B, n, F]`` to values ``[B, n + 1]``."""
        nothing = nn.functional.pad(documents[:, :1] * 0.0, (0, 1), value=1.0)
        items = torch.cat((nn.functional.pad(documents, (0, 1)), nothing), 1)
        pairs = torch.cat((user.unsqueeze(1).expand(-1, items.shape[1], -1), items), -1)
        features, _ = self.torso(pairs.flatten(0, 1), {}, None)
        return self.value(features).view(items.shape[:2])


class ChoiceModel(Module):
    """Predicts what a user watches, by scores ``u^T W d + b^T d`` of documents and ``c`` of watching nothing.

    Args:
        proportional: the final scores are the ``softplus`` of these, otherwise the exponential.
    """

    def __init__(self, user: int, document: int, proportional: bool) -> None:
        super().__init__()
        self.proportional = proportional
        self.weight = nn.Parameter(torch.zeros(user, document))
        self.bias, self.nothing = nn.Parameter(torch.zeros(document)), nn.Parameter(torch.zeros(1))

    def forward(self, user: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the documents ``[B, n]`` and of watching nothing ``[B]``, all positive."""
        x = (documents.float() @ (user.float() @ self.weight + self.bias).unsqueeze(-1)).squeeze(-1)
        none = self.nothing.expand(user.shape[0])
        return (softplus(x), softplus(none)) if self.proportional else (x.exp(), none.exp())


class SlateQ(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        choice_model: Literal["multinomial_logit", "multinomial_proportional"] = option(
            "How users choose: in proportion to the exponential, or to the softplus, of learned scores."
        )
        slate: Choice = option("Choice of the slate: exact (the linear program), greedy, top_k or random.")
        target_slate: Choice = option("The same in the target.")
        strategy: Literal["q_learning", "sarsa", "myopic"] = option(
            "The target's next slate: the chosen one, the one that was shown, or none."
        )
        null_item: bool = option("Learn the value of watching nothing; false: it is 0.")
        double_q: bool = option("The online network chooses the target's slate.")
        td_error_loss_fn: Literal["huber", "mse"] = option("Loss of the TD error; huber is biased under skewed noise.")
        epsilon: Scheduled[UnitFloat] = option("Probability of a random slate in training.")
        tau: UnitFloat = option("Polyak step of the target network; 1: copy.")
        target_update_period: PositiveInt = option("Updates between two updates of the target network.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        lr_choice_model: Scheduled[NonNegativeFloat] = option("Adam's step size of the choice model.")
        adam_epsilon: PositiveFloat = option("Adam's epsilon.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        group = spec.single_agent
        parts = group.obs.spaces if isinstance(group.obs, spaces.Dict) else {}
        response = parts.get("response")
        if (
            not {"user", "documents"} <= parts.keys()
            or not isinstance(response, spaces.Dict)
            or ("click" not in response.spaces)
        ):
            said = "slateq needs observations {user, documents, response: {click}}"
            raise ConfigError("env", f"{said}, such as env=interest_evolution")
        (count, _), action = parts["documents"].shape or (0, 0), group.action
        if not isinstance(action, spaces.MultiDiscrete) or (action.nvec != count).any():
            raise ConfigError("env", f"slateq needs slates as MultiDiscrete actions of {count} documents each")
        if len(action.nvec) > count:
            said = f"the slate has {len(action.nvec)} places, but there are only {count} documents"
            raise ConfigError("env", f"{said}; make it smaller")
        return Needs(
            Window(1), data="windows", off_policy=True, keys=("obs", "action", "reward", "terminated", "valid")
        )

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, group = cfg, ctx, ctx.spec.single_agent
        assert isinstance(group.action, spaces.MultiDiscrete)
        self.size, self.count = len(group.action.nvec), int(group.action.nvec[0])
        obs: Any = group.obs
        sizes = spaces.flatdim(obs["user"]), int(obs["documents"].shape[1])
        self.online, self.target = (ItemNetwork(ctx, *sizes) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.online.state_dict())
        self.choice = ChoiceModel(*sizes, proportional=cfg.choice_model == "multinomial_proportional")
        self.lr, self.lr_choice_model = ctx.schedule(cfg.lr), ctx.schedule(cfg.lr_choice_model)
        self.epsilon = ctx.schedule(cfg.epsilon)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        cfg = self.cfg
        parts = {"q": (self.online, self.lr), "choice": (self.choice, self.lr_choice_model)}
        return {
            name: Optim(Adam(who.parameters(), lr=lr, eps=cfg.adam_epsilon), cfg.grad_clip, cfg.grad_clip_by, lr=lr)
            for name, (who, lr) in parts.items()
        }

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith(("online.", "choice.")))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return ``action``, a slate ``[B, k]`` of different documents."""
        n = step["is_first"].shape[0]
        if mode == "random":
            return {"action": self._random(self.ctx.rand(n, self.count))}, carry
        slate = self.chosen(self.online, step["obs"], self.cfg.slate)
        if mode == "explore":
            among = self._random(self.ctx.rand(n, self.count))
            slate = torch.where(self.ctx.rand(n, 1) < self.epsilon, among, slate)
        return {"action": slate}, carry

    def _random(self, noise: Tensor) -> Tensor:
        return noise.topk(self.size, -1).indices

    def items(self, network: ItemNetwork, obs: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scores and values of the documents ``[B, n]``, and those of watching nothing ``[B]``."""
        v, none = self.choice(obs["user"], obs["documents"])
        q = network(obs["user"], obs["documents"])
        return v.detach(), q[:, :-1], none.detach(), q[:, -1] if self.cfg.null_item else torch.zeros_like(none)

    def chosen(self, network: ItemNetwork, obs: Batch, how: Choice) -> Tensor:
        """Return the slate ``[B, k]`` for every user."""
        v, q, none, q_none = self.items(network, obs)
        match how:
            case "exact":
                return exact_slate(v, q, none, q_none, self.size)
            case "greedy":
                return greedy_slate(v, q, none, q_none, self.size)
            case "top_k":
                return top_k(v, q, self.size)
            case "random":
                return self._random(self.ctx.rand(v.shape[0], self.count))

    def values(self, batch: Batch) -> Tensor:
        """Return the value of the best slate of every row."""
        rows, obs = batch["valid"].shape, tree.map(lambda x: x.flatten(0, 1), batch["obs"])
        v, q, none, q_none = self.items(self.online, obs)
        return slate_value(v, q, none, q_none, exact_slate(v, q, none, q_none, self.size)).view(rows)

    def prepare(self, batch: Batch) -> Batch:
        """Compute the target of the item that was watched: ``r + gamma Q(s', A')``, equations 17 and 21.

        The response to row ``t`` is in the observation of row ``t + 1``.
        """
        cfg, out = self.cfg, n_step_transitions(batch, self.cfg.gamma)
        after, click = out.pop("next_obs"), batch["obs"]["response"]["click"][1].long()
        target = out.pop("returns")
        if cfg.strategy != "myopic":
            network = self.online if cfg.double_q else self.target
            slate = self.chosen(network, after, cfg.target_slate)
            if cfg.strategy == "sarsa":  # a truncated session has no next slate
                slate = torch.where(batch["valid"][1].unsqueeze(-1), batch["action"][1], slate)
            target = target + out["discount"] * slate_value(*self.items(self.target, after), slate)
        document = out["action"].gather(-1, click.clamp(max=self.size - 1).unsqueeze(-1)).squeeze(-1)
        watched = click < self.size
        found = {
            "obs": {key: out["obs"][key] for key in ("user", "documents")},
            "action": out["action"],
            "click": click,
        }
        found |= {"item": torch.where(watched, document, self.count), "returns": target}
        return found | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the TD loss of the item that was watched, and the negative log-likelihood of the user's choice."""
        obs, terms, metrics, feedback = batch["obs"], dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        weight = batch.get("weight", 1.0)
        if "q" in parts:
            q = self.online(obs["user"], obs["documents"]).gather(-1, batch["item"].unsqueeze(-1)).squeeze(-1)
            error = batch["returns"] - q
            counts = torch.ones_like(q) if self.cfg.null_item else (batch["item"] < self.count).to(q.dtype)
            loss = huber(error) if self.cfg.td_error_loss_fn == "huber" else 0.5 * error.square()
            terms["q"] = loss * counts * weight
            metrics |= {"q": q.detach(), "td_error": error.detach().abs() * counts}
            feedback["priority"] = error.detach().abs() * counts
        if "choice" in parts:
            v, none = self.choice(obs["user"], obs["documents"])
            scores = torch.cat((v.gather(-1, batch["action"]), none.unsqueeze(-1)), -1)
            chance = scores.gather(-1, batch["click"].unsqueeze(-1)).squeeze(-1) / scores.sum(-1)
            terms["choice"] = -chance.log() * weight
            metrics["click_rate"] = (batch["click"] < self.size).float()
        return Losses(terms, metrics, feedback)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        if "q" in parts:
            self.steps += 1
            polyak_(self.target, self.online, self.cfg.tau, self.steps % self.cfg.target_update_period == 0)
