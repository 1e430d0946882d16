"""Deep Q-Network, Mnih et al. 2015 (doi:10.1038/nature14236), with all extensions of Rainbow, Hessel et al. 2018
(arXiv:1710.02298). With a recurrent model and sequences it is the learner of R2D2, Kapturowski et al. 2019 (ICLR);
with ``conservative_weight``, offline conservative Q-learning, Kumar et al. 2020 (arXiv:2006.04779).

Without a recurrent model, a sample holds transitions: a row to train on, and the row to bootstrap from. With one, it
has ``burn_in + L + n`` rows: to warm up the state, to train on, and to bootstrap from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.distributional import kl_divergence, project
from rlplug.functional.offline import log_sum_exp
from rlplug.functional.priorities import sequence_priority
from rlplug.functional.sequences import carry_before, longest, n_step_segment, n_step_sequences, n_step_transitions
from rlplug.functional.targets import polyak_
from rlplug.functional.td import dueling, forbid, gather_action, greedy, huber, inverse_rescale, rescale
from rlplug.nn import Adam, Categorical, Module, unroll
from rlplug.nn.noisy import NoisyLinear, Stream, redraw
from rlplug.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Scheduled,
    StepRange,
    UnitFloat,
    option,
    settings,
)
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class QNetwork(Module):
    """Computes the value of every action, or the logits of the distribution of its return."""

    def __init__(self, cfg: DQN.Config, ctx: Context, actions: int) -> None:
        super().__init__()
        self.torso: Model = ctx.build("model", ctx.spec.single_agent.obs)
        self.actions, self.atoms = actions, cfg.num_atoms
        sizes, sigma0 = [self.torso.out_dim, *cfg.hiddens], cfg.sigma0 if cfg.noisy else None
        self.advantage = Stream([*sizes, actions * cfg.num_atoms], sigma0)
        self.value = Stream([*sizes, cfg.num_atoms], sigma0) if cfg.dueling else None
        self.noisy = tuple(layer for layer in self.modules() if isinstance(layer, NoisyLinear))

    def forward(self, rows: Batch, carry: Batch, noisy: bool) -> tuple[Tensor, Batch]:
        """Map ``obs`` and ``is_first``, ``[B, ...]`` or ``[T, B, ...]``, to what ``head`` returns and the new carry."""
        features, carry = self.torso(rows["obs"], carry, rows.get("is_first"))
        return self.head(features, noisy), carry

    def head(self, features: Tensor, noisy: bool) -> Tensor:
        """Map features ``[..., F]`` to values ``[..., A]``, or to logits ``[..., A, atoms]`` if there are atoms.

        Dueling: arXiv:1511.06581, equation 9.
        """
        out = self.advantage(features, noisy)
        if self.atoms == 1:
            return out if self.value is None else dueling(self.value(features, noisy), out)
        out = out.view(*features.shape[:-1], self.actions, self.atoms)
        return out if self.value is None else dueling(self.value(features, noisy).unsqueeze(-2), out, dim=-2)


class DQN(Algorithm):
    traceable = True

    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        double_q: bool = option("Double Q-learning: the online network chooses the target action.")
        dueling: bool = option("Dueling network: separate streams for value and advantages.")
        noisy: bool = option("Noisy layers in the heads for exploration; use with exploration=[].")
        sigma0: PositiveFloat = option("Initial noise of the noisy layers.")
        temperature: Scheduled[PositiveFloat] | None = option("Explore by softmax(q / temperature); null: greedy.")
        num_atoms: PositiveInt = option("Atoms of the return distribution (C51: 51); 1: expected value only.")
        v_min: float = option("First atom, the minimum return.")
        v_max: float = option("Last atom, the maximum return.")
        hiddens: list[PositiveInt] = option("Hidden layers of the heads, on top of the model.")
        td_error_loss_fn: Literal["huber", "mse"] = option("Loss of the TD error; num_atoms > 1: the KL divergence.")
        tau: UnitFloat = option("Polyak step of the target network; 1: copy.")
        target_update_period: PositiveInt = option("Updates between two updates of the target network.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        adam_epsilon: PositiveFloat = option("Adam's epsilon.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        worker_side_prioritization: bool = option("Actors compute initial priorities; false: the largest so far.")
        value_rescaling: PositiveFloat | None = option("Epsilon of R2D2's value rescaling h (1e-3); null: off.")
        conservative_weight: NonNegativeFloat = option("Weight of CQL's conservative term, for offline RL; 0: off.")
        sequence_length: PositiveInt = option("Recurrent: rows of a sample to train on.")
        burn_in: NonNegativeInt = option("Recurrent: rows before these that only warm up the state.")
        stride: PositiveInt = option("Recurrent: rows between the starts of two samples.")
        eta: UnitFloat = option("Recurrent: weight of the maximum error in a sequence's priority; mean: 1 - eta.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        action = spec.single_agent.action
        if not isinstance(action, spaces.Discrete):
            said = f"dqn needs one Discrete action, but the environment's are {action}; use algo=ppo"
            raise ConfigError("algo", said)
        if cfg.num_atoms > 1 and cfg.v_min >= cfg.v_max:
            raise ConfigError("algo.v_max", f"{cfg.v_max} should be above algo.v_min, which is {cfg.v_min}")
        if cfg.noisy and cfg.temperature is not None:
            raise ConfigError("algo.temperature", "explores already, as noisy layers do; use null or algo.noisy=false")
        window, keys = Window(longest(cfg.n_step)), ("obs", "action", "reward", "terminated", "valid", "action_mask")
        keys += ("priority",) if cfg.worker_side_prioritization else ()
        noise = "" if cfg.noisy or cfg.temperature is not None else "epsilon_greedy"
        return Needs(window, data="windows", off_policy=True, perturbable=True, noise=noise, keys=keys)

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        ahead, keys = needs.window.length - 1, (*needs.keys, "is_first", "carry")
        return replace(needs, window=Window(cfg.sequence_length + ahead, cfg.burn_in, cfg.stride, ahead), keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.actions, self.sequences = int(ctx.spec.single_agent.action.n), ctx.needs.window.stride > 0  # type: ignore[attr-defined]
        self.online, self.target = (QNetwork(cfg, ctx, self.actions) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.online.state_dict())
        if self.sequences and not self.initial_carry(1):
            raise ConfigError("critic_model", "has a recurrent state, but dqn has no critic; choose model=lstm")
        self.lr = ctx.schedule(cfg.lr)
        self.temperature = None if cfg.temperature is None else ctx.schedule(cfg.temperature)
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.support = nn.Buffer(torch.linspace(cfg.v_min, cfg.v_max, cfg.num_atoms), persistent=False)

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.online.parameters(), lr=self.lr, eps=self.cfg.adam_epsilon)
        return {"critic": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def actor_keys(self) -> tuple[str, ...]:
        return tuple(name for name in self.state_dict() if name.startswith("online."))

    def initial_carry(self, n: int) -> Batch:
        return self.online.torso.initial_carry(n)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return ``action`` and ``q [B, A]``, where masked actions have the smallest finite value, or ``logp``."""
        mask = step.get("action_mask")
        redraw(self.online.noisy if mode == "explore" else (), self.ctx.randn)
        if mode == "random":
            if self.sequences:
                _, carry = self.online(step, carry, False)
            noise = self.ctx.rand(len(step["is_first"]), self.actions)
            action = greedy(noise, mask)
            return {"action": action, "logp": Categorical(torch.zeros_like(noise), mask).logp(action)}, carry
        values, carry = self.online(step, carry, mode == "explore")
        q = self.q(values)
        out = {"action": greedy(q, mask), "q": forbid(q, mask)}
        if mode == "explore" and self.temperature is not None:
            policy = self.policy(q, mask)
            out |= {"action": (action := policy.sample(self.ctx.rand(len(q), 1))), "logp": policy.logp(action)}
        return out, carry

    def policy(self, q: Tensor, mask: Tensor | None) -> Categorical:
        """Return ``softmax(q / temperature)`` over the allowed actions of ``q [..., A]``, or the greedy policy."""
        if self.temperature is not None:
            return Categorical(q / self.temperature, mask)
        return Categorical(q, nn.functional.one_hot(greedy(q, mask), self.actions).bool())

    def q(self, out: Tensor) -> Tensor:
        """Compute expected returns ``[...]`` from the network's output ``[...]``, or ``[..., atoms]``."""
        return self._raw(out) if self.cfg.num_atoms == 1 else (out.softmax(-1) * self._raw(self.support)).sum(-1)

    def judged(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return action values ``[T+1, B, A]`` of stored rows, by the mean weights of noisy layers, and their mask."""
        return self.q(self.online(batch, carry_before(batch), noisy=False)[0]), batch.get("action_mask")

    def distribution(self, batch: Batch) -> Categorical:
        return self.policy(*self.judged(batch))

    def values(self, batch: Batch) -> Tensor:
        """Return ``max_a Q(s, a)`` over the allowed actions."""
        return forbid(*self.judged(batch)).amax(-1)

    def _raw(self, x: Tensor) -> Tensor:
        """Convert values from their learned, rescaled units to returns."""
        return x if self.cfg.value_rescaling is None else inverse_rescale(x, self.cfg.value_rescaling)

    def _scaled(self, x: Tensor) -> Tensor:
        """Convert returns to the rescaled units in which values are learned."""
        return x if self.cfg.value_rescaling is None else rescale(x, self.cfg.value_rescaling)

    def prepare(self, batch: Batch) -> Batch:
        """Sum ``n_step`` rewards from every row to train on, and sample the noise of both networks."""
        for network in (self.online, self.target):
            redraw(network.noisy, self.ctx.randn)
        if self.sequences:
            out = n_step_sequences(batch, self.cfg.gamma, self.cfg.n_step, self.cfg.burn_in, self.ctx.randint)
        else:
            out = n_step_transitions(batch, self.cfg.gamma, self.cfg.n_step, self.ctx.randint)
        return out | {key: batch[key] for key in ("weight",) if key in batch}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the loss of every row to train on: that of Mnih et al. 2015, or Rainbow's with atoms."""
        out, judge, future = self._unroll(batch) if self.sequences else self._transitions(batch)
        chosen = gather_action(out, batch["action"])
        with torch.no_grad():
            target = self._target(judge, future, batch)
        loss, error = self._loss(target, chosen)
        metrics = {"q": self.q(chosen.detach()), "td_error": error}
        if self.cfg.conservative_weight:  # arXiv:2006.04779, equation 4
            term = log_sum_exp(forbid(self.q(out), batch.get("action_mask"))) - self.q(chosen)
            loss, metrics["conservative"] = loss + self.cfg.conservative_weight * term, term.detach()
        priority = sequence_priority(error, batch["valid"], self.cfg.eta) if self.sequences else error
        return Losses({"critic": loss * batch.get("weight", 1.0)}, metrics, {"priority": priority})

    def _loss(self, target: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of every row, and its absolute error, the priority."""
        if self.cfg.num_atoms > 1:
            loss = kl_divergence(target, chosen)
            return loss, loss.detach()
        error = target - chosen
        loss = huber(error) if self.cfg.td_error_loss_fn == "huber" else 0.5 * error.square()
        return loss, error.detach().abs()

    def initial_priorities(self, batch: Batch) -> Tensor:
        """Return TD errors, with the acting network as the target: arXiv:1803.00933, algorithm 1."""
        rows = n_step_segment(batch, self.cfg.gamma, self.cfg.n_step)
        out, _ = self.online(batch, carry_before(batch), noisy=False)
        future = out[rows["last"], torch.arange(out.shape[1], device=out.device)]
        return self._loss(self._target(future, future, rows), gather_action(out[:-1], rows["action"]))[1]

    def _transitions(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute values or logits of ``obs``, and of ``next_obs`` by the selecting and by the target network."""
        out, _ = self.online({"obs": batch["obs"]}, {}, noisy=True)
        after = {"obs": batch["next_obs"]}
        with torch.no_grad():
            future, _ = self.target(after, {}, noisy=True)
            judge = self.online(after, {}, noisy=True)[0] if self.cfg.double_q else future
        return out, judge, future

    def _unroll(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the same for sequences, ``[L, B, A, ...]``, by one pass of each network."""
        last, burn_in, carry = batch["last"], self.cfg.burn_in, carry_before(batch)
        columns = torch.arange(last.shape[1], device=last.device)
        out = self.online.head(unroll(self.online.torso, batch, carry, burn_in), noisy=True)
        with torch.no_grad():
            future = self.target.head(unroll(self.target.torso, batch, carry, burn_in), noisy=True)[last, columns]
        return out[: len(last)], out.detach()[last, columns] if self.cfg.double_q else future, future

    def _target(self, judge: Tensor, future: Tensor, batch: Batch) -> Tensor:
        """Compute the targets of the taken actions: values ``[...]``, or probabilities ``[..., atoms]``.

        Double Q: arXiv:1509.06461, equation 4. Atoms: arXiv:1707.06887, algorithm 1; n-step: Rainbow, section 3.
        """
        future = gather_action(future, greedy(self.q(judge), batch.get("next_action_mask")))
        ret, discount = batch["returns"], batch["discount"]
        if self.cfg.num_atoms == 1:
            return self._scaled(ret + discount * self._raw(future))
        atoms = self._scaled(ret.unsqueeze(-1) + discount.unsqueeze(-1) * self._raw(self.support))
        return project(future.softmax(-1), atoms, self.support)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        self.steps += 1
        polyak_(self.target, self.online, self.cfg.tau, self.steps % self.cfg.target_update_period == 0)
