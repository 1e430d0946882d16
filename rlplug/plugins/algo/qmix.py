"""QMIX, Rashid et al. 2018 (arXiv:1803.11485): the agents of a team choose actions by values of their own, which a
mixer combines into the value of the team, so that one TD error trains all. ``mixer=vdn`` is Value-Decomposition
Networks, Sunehag et al. 2018 (arXiv:1706.05296); ``mixer=none`` is independent Q-learning, Tan 1993.

One network serves all agents. It may be recurrent, and then learns from whole episodes or from windows with stored
states. The agent axis is folded into the columns for the network: ``[T, B, N, ...]`` to ``[T, B * N, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import tree
from rlplug.agents import fold, unfold
from rlplug.api import Algorithm, Clip, Context, Learner, Losses, Model, Needs, Optim, Window
from rlplug.functional.mixing import present, team_reward
from rlplug.functional.priorities import sequence_priority
from rlplug.functional.sequences import Draw, carry_before, longest, n_step_rows
from rlplug.functional.targets import polyak_
from rlplug.functional.td import forbid, gather_action, greedy
from rlplug.nn import Flatten, Linear, Mixing, Module, adam_or_rmsprop, mixer_for, precise, unroll
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
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode


class Team(Module):
    """The network of the agents, which reads an observation, the agent's number and its last action; and the mixer."""

    def __init__(self, cfg: QMIX.Config, ctx: Context, group: Group, actions: int, state: int) -> None:
        super().__init__()
        self.agents, self.actions = len(group.agents), actions
        self.mixer = mixer_for(cfg.mixer, self.agents, state, cfg.mixing_embed_dim, cfg.hypernet_hiddens)
        sizes = {"agent": self.agents * cfg.agent_ids, "last_action": actions * cfg.last_action}
        self.more = tuple(name for name, size in sizes.items() if size)
        more = {name: spaces.Box(0.0, 1.0, (sizes[name],)) for name in self.more}
        self.torso: Model = ctx.build("model", spaces.Dict({"obs": group.obs, **more}) if more else group.obs)
        self.head = Linear(self.torso.out_dim, actions)

    def inputs(self, rows: Batch) -> Batch:
        """Return ``obs`` and ``is_first`` of the torso from rows ``[..., B, N, ...]``, folded to ``[..., B * N]``."""
        first, obs = rows["agent_is_first"], rows["obs"]
        if self.more:
            obs = {"obs": obs}
        if "agent" in self.more:
            obs["agent"] = torch.eye(self.agents, device=first.device).expand(*first.shape, self.agents)
        if "last_action" in self.more:  # none where an agent begins
            before = rows["prev_action"].unsqueeze(-1) == torch.arange(self.actions, device=first.device)
            obs["last_action"] = (before & ~first.unsqueeze(-1)).float()
        return fold({"obs": obs, "is_first": first}, first.ndim - 2)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``[..., B * N, F]`` to values ``[..., B, N, A]``."""
        return precise(self.head, features).unflatten(-2, (-1, self.agents))


class QMIX(Algorithm):
    traceable = True

    @settings
    class Config:
        mixer: Mixing = option("qmix (monotonic), vdn (sum), or none: each agent learns from its own reward.")
        mixing_embed_dim: PositiveInt = option("Size of the mixing network's hidden layer.")
        hypernet_hiddens: list[PositiveInt] = option("Hidden layers of the networks that produce its weights.")
        agent_ids: bool = option("The agents' shared network reads the number of the agent.")
        last_action: bool = option("It reads the agent's last action.")
        batch_mode: Literal["complete_episodes", "windows"] = option(
            "Sample whole episodes, train_batch_size of them, or windows of transitions."
        )
        gamma: UnitFloat = option("Discount factor.")
        n_step: StepRange = option("Rewards in the target before bootstrapping; [1, 5]: drawn for each sample.")
        double_q: bool = option("Double Q-learning: the online network chooses the target actions.")
        tau: UnitFloat = option("Polyak step of the target networks; 1: copy.")
        target_network_update_freq: PositiveInt = option("Environment steps between updates of the target networks.")
        opt_type: Literal["rmsprop", "adam"] = option("Optimizer.")
        lr: Scheduled[NonNegativeFloat] = option("Step size.")
        optim_alpha: UnitFloat = option("RMSProp's decay of squared gradients.")
        optim_eps: PositiveFloat = option("Epsilon of the optimizer.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")
        worker_side_prioritization: bool = option("Actors compute initial priorities; false: the largest so far.")
        sequence_length: PositiveInt = option("Windows of a recurrent model: rows to train on.")
        burn_in: NonNegativeInt = option("Windows of a recurrent model: rows before these that only warm up the state.")
        stride: PositiveInt = option("Windows of a recurrent model: rows between the starts of two samples.")
        eta: UnitFloat = option("Windows: weight of the maximum error in the priority; mean: 1 - eta.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        (name, group), *others = spec.groups.items()
        if others or not group.agents:
            found = ", ".join((name, *(other for other, _ in others))) if others else "one agent"
            raise ConfigError("env", f"qmix needs one group of agents with equal spaces, but there are: {found}")
        if not isinstance(group.action, spaces.Discrete):
            raise ConfigError("env", f"qmix needs Discrete actions, but those of {name} are {group.action}")
        keys = ("obs", "action", "reward", "terminated", "valid", "alive", "agent_is_first", "action_mask")
        keys += ("state",) * ("state" in spec.extras and cfg.mixer == "qmix") + ("prev_action",) * cfg.last_action
        keys += ("priority",) * cfg.worker_side_prioritization
        window, data = Window(longest(cfg.n_step)), "windows"
        if cfg.batch_mode == "complete_episodes":
            window, data = Window(), "episodes"
        return Needs(window, data=data, off_policy=True, perturbable=True, noise="epsilon_greedy", keys=keys)

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        if needs.data == "episodes":
            return needs
        ahead, keys = needs.window.length - 1, (*needs.keys, "carry")
        return replace(needs, window=Window(cfg.sequence_length + ahead, cfg.burn_in, cfg.stride, ahead), keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        (group,) = ctx.spec.groups.values()
        assert isinstance(group.action, spaces.Discrete)
        self.agents, self.actions = len(group.agents), int(group.action.n)
        self.flatten = Flatten(ctx.spec.extras.get("state", group.obs))
        self.has_state, self.team = "state" in ctx.spec.extras, cfg.mixer != "none"
        state = self.flatten.size * (1 if self.has_state else self.agents)
        self.online, self.target = (Team(cfg, ctx, group, self.actions, state) for _ in range(2))
        self.target.requires_grad_(False).load_state_dict(self.online.state_dict())
        self.burn_in = ctx.needs.window.burn_in
        self.lr = ctx.schedule(cfg.lr)
        ratio = 1.0 / (ctx.rollout_length * ctx.num_envs) if ctx.replay_ratio is None else ctx.replay_ratio
        self.target_every = max(1, round(cfg.target_network_update_freq * ratio))  # updates
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def optimizers(self) -> dict[str, Optim]:
        cfg = self.cfg
        optimizer = adam_or_rmsprop(cfg.opt_type, self.online.parameters(), self.lr, cfg.optim_eps, cfg.optim_alpha)
        return {"critic": Optim(optimizer, cfg.grad_clip, cfg.grad_clip_by, lr=self.lr)}

    def actor_keys(self) -> tuple[str, ...]:
        other = ("target.",) if self.cfg.worker_side_prioritization else ("target.", "online.mixer.")
        return tuple(name for name in self.state_dict() if not name.startswith(other))

    def initial_carry(self, n: int) -> Batch:
        return unfold(self.online.torso.initial_carry(n * self.agents), self.agents)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return ``action [B, N]`` and ``q [B, N, A]``; masked actions have the smallest finite value."""
        rows = self.online.inputs(step)
        features, after = self.online.torso(rows["obs"], fold(carry), rows["is_first"])
        q = forbid(self.online(features), step.get("action_mask"))
        if mode == "random":
            q = forbid(self.ctx.rand(*q.shape), step.get("action_mask"))
        return {"action": q.argmax(-1), "q": q}, unfold(after, self.agents)

    def _unroll(self, network: Team, batch: Batch, burn_in: int = 0) -> Tensor:
        """Compute the values ``[L + n, B, N, A]`` of all rows after the burn-in."""
        return network(unroll(network.torso, network.inputs(batch), fold(carry_before(batch)), burn_in))

    def _state(self, batch: Batch) -> Tensor | None:
        """Return QMIX's input ``[..., S]``: the global state, otherwise the observations of the agents present."""
        if self.cfg.mixer != "qmix":
            return None
        if self.has_state:
            return self.flatten(batch["state"])
        return (self.flatten(batch["obs"]) * batch["present"].unsqueeze(-1)).flatten(-2)

    def values(self, batch: Batch) -> Tensor:
        """Return the value of the best allowed actions: of the team, or the agents' mean if nothing is mixed."""
        q = forbid(self._unroll(self.online, batch), batch.get("action_mask")).amax(-1)
        rows = batch | {"present": present(batch["alive"], batch["terminated"])}
        value = self.online.mixer(q * rows["present"], self._state(rows))
        return value if self.team else value.mean(-1)

    def prepare(self, batch: Batch) -> Batch:
        return self._targets(batch, self.ctx.needs.data == "episodes", self.burn_in, self.ctx.randint)

    def _targets(self, batch: Batch, whole: bool, burn_in: int, draw: Draw | None = None) -> Batch:
        """Sum ``n_step`` rewards from every row to train on: of the team, or of each agent if nothing is mixed.

        Args:
            whole: every row is trained on, the last ones with fewer rewards.
            draw: draws ``n_step`` of a range; None: its maximum.
        """
        cfg, passed = self.cfg, {key: batch[key] for key in ("weight", "carry") if key in batch}
        rows = {key: x for key, x in batch.items() if key not in ("index", "sample_prob", *passed)}
        if whole:  # copies of the last row, which begin no transition either
            more = [-1] * (longest(cfg.n_step) - 1)
            rows = tree.map(lambda x: torch.cat((x, x[more])), rows)
        out = passed | {key: rows[key] for key in ("obs", "agent_is_first", "prev_action") if key in rows}
        rows = tree.take(rows, slice(burn_in, None))
        alive, terminated, valid, reward = (rows[key] for key in ("alive", "terminated", "valid", "reward"))
        out["present"] = rows["present"] = present(alive, terminated)
        if self.team:  # it terminates with its last agent
            terminated = ~torch.cat((rows["present"][1:], rows["present"][-1:])).any(-1)
            reward, starts = team_reward(reward, alive), valid
        else:
            starts = valid.unsqueeze(-1) & alive
        out["returns"], out["discount"], out["last"] = n_step_rows(
            reward, terminated, starts, cfg.gamma, cfg.n_step, draw
        )
        out |= {key: rows[key][: len(out["last"])] for key in ("action", "alive", "valid")}
        if (state := self._state(rows)) is not None:
            out["mixer_state"] = state
        return out | ({"mask": rows["action_mask"]} if "action_mask" in rows else {})

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the squared TD error of every row: 1803.11485, equations 6 and 7."""
        with torch.no_grad():
            future = self._unroll(self.target, batch, self.burn_in)
        value, target = self._values(batch, self._unroll(self.online, batch, self.burn_in), future, self.target.mixer)
        loss, error = (value - target).square(), (value - target).detach().abs()
        if "weight" in batch:
            loss = loss * batch["weight"].view(-1, *(1,) * (loss.ndim - 2))
        priority = sequence_priority(self._of_team(error, batch), batch["valid"], self.cfg.eta)
        return Losses({"critic": loss}, {"q": value.detach(), "td_error": error}, {"priority": priority})

    def _values(self, batch: Batch, q: Tensor, future: Tensor, mixer: Module) -> tuple[Tensor, Tensor]:
        """Compute values and targets of the taken actions from the values ``[L + n, B, N, A]`` of all actions."""
        length, state = len(batch["action"]), batch.get("mixer_state")
        with torch.no_grad():
            best = greedy(q if self.cfg.double_q else future, batch.get("mask"))
            following = mixer(gather_action(future, best) * batch["present"], state).gather(0, batch["last"])
            target = batch["returns"] + batch["discount"] * following
        chosen = gather_action(q[:length], batch["action"]) * batch["alive"]
        return self.online.mixer(chosen, None if state is None else state[:length]), target

    def _of_team(self, error: Tensor, batch: Batch) -> Tensor:
        """Return errors ``[L, B]``: if nothing is mixed, the mean over the agents alive."""
        alive = batch["alive"]
        return error if self.team else (error * alive).sum(-1) / alive.sum(-1).clamp(min=1)

    def initial_priorities(self, batch: Batch) -> Tensor:
        """Return TD errors, with the acting network as the target: arXiv:1803.00933, algorithm 1."""
        rows = self._targets(batch, True, 0)
        q = self._unroll(self.online, rows)
        value, target = self._values(rows, q, q, self.online.mixer)
        return self._of_team((value - target).abs(), rows)

    def after_step(self, parts: Sequence[str], losses: Losses, learner: Learner) -> None:
        self.steps += 1
        polyak_(self.target, self.online, self.cfg.tau, self.steps % self.target_every == 0)
