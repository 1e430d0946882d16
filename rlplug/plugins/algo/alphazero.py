"""AlphaZero, Silver et al. 2018 (arXiv:1712.01815), on any environment with a simulator: two players in turn, or one
player, with ranked rewards (R2), Laterre et al. 2018 (arXiv:1807.01672), which rank a return among recent ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import psutil
import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Clip, Context, Job, Learner, Losses, Needs, Optim, Play, Segment
from rlplug.functional import mcts
from rlplug.functional.opponents import opponent_of
from rlplug.functional.returns import episode_metrics, gae, metrics_of_jobs
from rlplug.nn import ActorCritic, Adam
from rlplug.nn.ranked import RankedReturns
from rlplug.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode, Weights

Opponent = Literal["random", "one_ply", "minimax", "past"]
NOBODY = -1
"""the opponent of self-play"""


class AlphaZero(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        lambda_: UnitFloat = option("Weight of longer returns in the value's target; 1: the outcome.")
        num_simulations: PositiveInt = option("Simulations of a search, each with one evaluation by the network.")
        puct_coefficient: PositiveFloat = option("Weight of the prior in the search.")
        value_bounds: list[float] | None = option(
            "Smallest and largest return, by which values are normalized in the search; null: -1 and 1 for two players"
            " and with ranked rewards, else those seen in the tree."
        )
        value_scale: PositiveFloat = option("The value network's output 1 means this return.")
        dirichlet_noise: PositiveFloat = option("Alpha of the Dirichlet noise in the root's prior.")
        dirichlet_epsilon: UnitFloat = option("Weight of that noise, in training; 0: off.")
        temperature: Scheduled[PositiveFloat] = option("Actions have probability N^(1/temperature) in training.")
        temperature_moves: PositiveInt | None = option("Moves of an episode with it; later ones are greedy; null: all.")
        reuse_tree: bool = option("Begin a search with what the last one found about this state.")
        ranked_rewards: bool = option("R2: replace an episode's return by 1 or -1, as it beats recent ones or not.")
        percentile: UnitFloat = option("R2: the fraction of recent returns to beat.")
        num_returns: PositiveInt = option("R2: number of recent returns.")
        best_return: float | None = option("R2: an episode with this return is always ranked 1; null: unknown.")
        opponents: list[Opponent] = option("Two players: whom evaluations play against, each episode in both seats.")
        past_every: PositiveInt = option("Updates after which the opponent past becomes the present network.")
        lr: Scheduled[NonNegativeFloat] = option("Adam's step size.")
        l2_coeff: NonNegativeFloat = option("Weight of the squared weights in the loss.")
        vf_loss_coeff: NonNegativeFloat = option("Weight of the value loss.")
        vf_share_layers: bool = option("Share the torso of policy and value.")
        sgd_minibatch_size: PositiveInt = option("Rows per gradient step, over all ranks.")
        num_sgd_iter: PositiveInt = option("Epochs over the sampled episodes per update.")
        grad_clip: PositiveFloat | None = option("Gradient clipping threshold; null: off.")
        grad_clip_by: Clip = option("value, norm (per tensor) or global_norm.")

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        (group, *more) = spec.groups.values()
        if more or len(group.agents) not in (0, 2) or not isinstance(group.action, spaces.Discrete):
            raise ConfigError("algo", "alphazero needs one player, or two in turn, with Discrete actions")
        if "env_state" not in spec.extras:
            way = "env.simulator=copy or rlplug.envs.simulated may offer one"
            raise ConfigError("env", f"this environment has no simulator, with which alphazero plans; {way}")
        if group.agents and not cfg.opponents:
            raise ConfigError("algo.opponents", "is empty, but evaluations of two players need one; name random")
        if cfg.ranked_rewards and group.agents:
            raise ConfigError("algo.ranked_rewards", "ranks returns of one player, but the game has two; use false")
        if cfg.value_bounds and (len(cfg.value_bounds) != 2 or cfg.value_bounds[0] >= cfg.value_bounds[1]):
            raise ConfigError("algo.value_bounds", "give the smallest and the largest return, or null")
        keys = ("obs", "action", "action_mask", "policy", "reward", "terminated", "truncated", "valid", "env_state")
        keys += ("prev_reward",) if cfg.ranked_rewards else ()
        return Needs(data="episodes", off_policy=True, rewards=False, simulates=True, keys=keys)

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, self.model = cfg, ctx, ctx.simulator()
        (self.group,), self.players = ctx.spec.groups.values(), 2 if ctx.spec.has_agents else 1
        assert isinstance(self.group.action, spaces.Discrete)
        self.actions = int(self.group.action.n)
        value_torso = None if cfg.vf_share_layers else ctx.build("critic_model", self.group.obs)
        self.net = ActorCritic(ctx.build("model", self.group.obs), value_torso, self.group.action)
        self.lr, self.temperature = ctx.schedule(cfg.lr), ctx.schedule(cfg.temperature)
        known = [-1.0, 1.0] if self.players == 2 or cfg.ranked_rewards else None
        self.bounds = cfg.value_bounds or known
        self.room = cfg.num_simulations * (2 if cfg.reuse_tree else 1) + 1
        named = cfg.opponents if self.players == 2 else []
        self.opponents = {name: opponent_of(name, self.model, self.actions) for name in named if name != "past"}
        self.past = copy.deepcopy(self.net).requires_grad_(False) if "past" in named else None
        self._check_memory()
        self.ranked: RankedReturns | None = None
        if cfg.ranked_rewards:
            self.ranked = RankedReturns(cfg.num_returns, ctx.num_envs, cfg.percentile, cfg.best_return)
        self.opponent: Tensor
        self.register_buffer("opponent", torch.tensor([NOBODY, 0]))

    def _check_memory(self) -> None:
        """Check that the trees of all columns fit into memory.

        Raises:
            ConfigError: they do not.
        """
        columns, size = len(self.ctx.env_ids), spaces.flatdim(self.ctx.spec.extras["env_state"]) * 8
        needed = mcts.nbytes(columns, self.room + 1, self.actions, size) * (2 if self.cfg.reuse_tree else 1)
        host = self.ctx.device.type == "cpu"
        free = psutil.virtual_memory().available if host else torch.cuda.mem_get_info(self.ctx.device)[0]
        if needed > free:
            said = f"{columns} trees of {self.room} nodes with {self.actions} actions need {needed / 2**30:.4g} GiB"
            less = "fewer simulations or num_envs take less"
            raise ConfigError("algo.num_simulations", f"{said}, but only {free / 2**30:.4g} GiB are free; {less}")

    def optimizers(self) -> dict[str, Optim]:
        adam = Adam(self.net.parameters(), lr=self.lr)
        return {"network": Optim(adam, self.cfg.grad_clip, self.cfg.grad_clip_by, lr=self.lr)}

    def actor_keys(self) -> tuple[str, ...]:
        own = ("ranked.threshold", "opponent")
        return tuple(name for name in self.state_dict() if name.startswith(("net.", "past.")) or name in own)

    def initial_carry(self, n: int) -> Batch:
        device, carry = self.ctx.device, dict[str, Any]()
        if self.cfg.temperature_moves is not None:
            carry["move"] = torch.zeros(n, dtype=torch.long, device=device)
        if self.cfg.ranked_rewards:
            carry["score"] = torch.zeros(n, dtype=torch.float64, device=device)
        if self.cfg.reuse_tree:
            root = {"env_state": self._zeros(self.ctx.spec.extras["env_state"], n)} | carry
            edges = torch.zeros(n, self.actions, device=device)
            node = {"state": self._state(root), "prior": edges, "legal": edges.bool()}
            node |= {"value": edges[:, 0], "sign": edges[:, 0], "over": edges[:, 0].bool()}
            carry["tree"] = vars(mcts.plant(node, self.room, self.bounds))
        return carry

    def _zeros(self, space: spaces.Space[Any], n: int) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._zeros(part, n) for key, part in space.spaces.items()}
        return torch.from_numpy(np.zeros((n, *(space.shape or ())), space.dtype)).to(self.ctx.device)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Return ``action`` and ``policy [B, A]``, the root's visits as fractions."""
        if "env_state" not in step:
            raise ValueError("this policy plans from the environment's state: act(obs, env_state=...)")
        carry, (_, legal, sign) = self._counted(step, carry), self._view(step)
        policy = legal / legal.sum(-1, keepdim=True).clamp(min=1)
        moves: Any = carry.get("move")
        if mode == "random":
            action = self._drawn(policy)
        else:
            trees = self._search(step, carry, noisy=mode == "explore")
            visits = trees.visits[:, 0]
            policy = visits / visits.sum(-1, keepdim=True)
            action = visits.argmax(-1)
            if mode == "explore":
                drawn = self._drawn((policy / policy.amax(-1, keepdim=True)).double().pow(1.0 / self.temperature))
                late = False if moves is None else moves >= self.cfg.temperature_moves
                action = torch.where(torch.as_tensor(late, device=drawn.device), action, drawn)
            if "tree" in carry:
                carry["tree"] = vars(trees)
        if moves is not None:
            carry["move"] = moves + 1
        if self.players == 1:
            return {"action": action, "policy": policy}, carry
        who, seat = self.opponent.tolist() if mode == "greedy" else (NOBODY, 0)
        if who != NOBODY:
            action = torch.where((sign < 0) == (seat == 1), action, self._answer(who, step, legal))
        waits, first = step["action_mask"].int().argmax(-1), torch.tensor([1.0, -1.0], device=sign.device)
        return {
            "action": torch.where(sign.unsqueeze(-1) == first, action.unsqueeze(-1), waits),
            "policy": policy,
        }, carry

    def _drawn(self, weights: Tensor) -> Tensor:
        """Draw an action ``[B]`` in proportion to ``weights [B, A]``."""
        below = weights.double().cumsum(-1)
        return (below > self.ctx.rand(len(weights), 1).double() * below[:, -1:]).int().argmax(-1)

    def _counted(self, step: Batch, carry: Batch) -> Batch:
        """Return the carry of this row: the moves and the return of the episode so far."""
        carry, first = {**carry}, step["is_first"]
        if "move" in carry:
            carry["move"] = torch.where(first, 0, carry["move"])
        if "score" in carry:
            carry["score"] = torch.where(first, 0.0, carry["score"] + step["prev_reward"])
        return carry

    def _view(self, row: Batch) -> tuple[Any, Tensor, Tensor]:
        """Return observation and legal actions of the player to move, and ``sign``: 1 for the first, -1 otherwise."""
        obs, mask = row["obs"], row.get("action_mask")
        if self.players == 1:
            n = len(next(tree.leaves(obs)))
            legal = torch.ones(n, self.actions, dtype=torch.bool, device=self.ctx.device) if mask is None else mask
            return obs, legal, torch.ones(n, device=self.ctx.device)
        player: Tensor = self.model.player(row["env_state"])  # type: ignore[attr-defined]
        columns = torch.arange(len(player), device=player.device)
        return tree.map(lambda x: x[columns, player], obs), row["action_mask"][columns, player], 1.0 - 2.0 * player

    def _state(self, row: Batch) -> Any:
        return {key: row[key] for key in ("env_state", "score") if key in row}

    def _node(self, net: Any, row: Batch, state: Any, terminated: Any = False, over: Any = False) -> Batch:
        """Return nodes of the search for rows, evaluated by a network."""
        obs, legal, sign = self._view(row)
        dist, value = net({"obs": obs, "action_mask": legal}, {})
        value = torch.where(torch.as_tensor(terminated, device=sign.device), 0.0, value * self.cfg.value_scale * sign)
        over = torch.zeros_like(legal[:, 0]) | over
        found = {"state": state, "prior": dist.params.exp(), "legal": legal | over.unsqueeze(-1)}
        return found | {"value": value, "sign": sign, "over": over}

    def _result(self, row: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first player's reward, and whether the episode terminates or is truncated, ``[..., B]``."""
        reward, terminated, truncated = (row[key] for key in ("reward", "terminated", "truncated"))
        if self.players == 1:
            return reward, terminated, truncated
        return reward[..., 0], terminated.all(-1), truncated.all(-1)

    def _expand(self, net: Any, state: Any, action: Tensor) -> Batch:
        """Step the simulator: ``mcts.Expand``."""
        joint = action if self.players == 1 else action.unsqueeze(-1).expand(-1, 2)
        row = self.model.step(state["env_state"], joint)
        reward, terminated, truncated = self._result(row)
        after, over = {"env_state": row["env_state"]}, terminated | truncated
        if self.ranked is not None:
            after["score"] = state["score"] + reward
            terminated, reward = over, torch.where(over, self.ranked(after["score"], 0.0), 0.0)
        return self._node(net, row, after, terminated, over) | {"reward": reward}

    def _search(self, step: Batch, carry: Batch, noisy: bool, net: Any = None) -> mcts.SearchTree:
        net = net or self.net
        root, expand = self._node(net, step, self._state(step | carry)), partial(self._expand, net)
        epsilon = self.cfg.dirichlet_epsilon
        if noisy and epsilon:
            n, shape = len(root["prior"]), root["prior"].shape
            draws = self.ctx.randn(*shape, 6), self.ctx.rand(*shape, 6), self.ctx.rand(n, self.actions)
            noise = mcts.log_gamma_noise(self.cfg.dirichlet_noise, *draws)
            noise = torch.where(root["legal"], noise, -torch.inf).softmax(-1)
            root["prior"] = (1.0 - epsilon) * root["prior"] + epsilon * noise
        if "tree" in carry:
            trees = self._reused(carry["tree"], root, step["is_first"])
        else:
            trees = mcts.plant(root, self.room, self.bounds)
        fixed = self.bounds is not None
        mcts.simulate(trees, expand, self.cfg.num_simulations, self.cfg.puct_coefficient, self.cfg.gamma, fixed)
        return trees

    def _reused(self, before: Batch, root: Batch, is_first: Tensor) -> mcts.SearchTree:
        """Return the last trees below the children that have the state of ``root``, or new ones."""
        trees = mcts.SearchTree(**tree.map(torch.clone, before))
        children = trees.child[:, 0]
        columns = torch.arange(len(children), device=children.device).unsqueeze(1)
        same = (children > 0) & ~is_first.unsqueeze(1)
        for now, old in zip(tree.leaves(root["state"]), tree.leaves(trees.state), strict=True):
            equal = old[columns, children] == now.unsqueeze(1)
            same &= equal.view(*same.shape, -1).all(-1)
        place = torch.where(same.any(-1), children.gather(1, same.int().argmax(-1, keepdim=True)).squeeze(1), 0)
        mcts.transplant(trees, place, self.cfg.num_simulations)
        fresh = mcts.plant(root, 1, self.bounds)
        for key, leaves in fresh.nodes().items():
            if key in root:
                tree.map(lambda to, x: to[:, 0].copy_(x[:, 0]), trees.nodes()[key], leaves)
        if self.bounds is None:
            none = place == 0
            trees.low, trees.high = torch.where(none, fresh.low, trees.low), torch.where(none, fresh.high, trees.high)
        return trees

    def _answer(self, who: int, step: Batch, legal: Tensor) -> Tensor:
        """Return the moves of a named opponent, drawn among its best ones, or of an earlier network's search."""
        if (name := self.cfg.opponents[who]) != "past":
            return self._drawn(self.opponents[name](step["env_state"], legal).float())
        return self._drawn(self._search(step, {}, False, self.past).visits[:, 0])

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Keep the returns of ended episodes: the same on every rank."""
        if self.ranked is not None:
            ids = torch.tensor([*self.ctx.env_ids], device=self.ctx.device)[segment.columns]
            self.ranked.observe(segment.batch, ids, learner.gather)

    def prepare(self, batch: Batch) -> Batch:
        """Compute the targets of whole episodes: the search's policy, and the return of the player to move."""
        valid, seen = batch["valid"], {key: batch[key] for key in ("obs", "env_state", "action_mask") if key in batch}
        obs, legal, sign = self._view(tree.map(lambda x: x.flatten(0, 1), seen))
        reward, terminated, truncated = self._result(batch)
        if self.ranked is not None:
            last = valid & (terminated | truncated)
            score = torch.where(valid, reward, 0.0).double().sum(0)
            tie = self.ctx.rand(len(score)).ge(0.5).float() * 2.0 - 1.0
            reward, terminated = torch.where(last, self.ranked(score, tie), 0.0), terminated | last
        scale = (self.cfg.value_scale * sign).view_as(valid)
        value = self.net.values({"obs": obs}, {}).view_as(valid) * scale
        _, returns = gae(reward, value, terminated, valid, self.cfg.gamma, self.cfg.lambda_)
        own = tree.map(lambda x: x.view(*valid.shape, *x.shape[1:]), {"obs": obs, "action_mask": legal})
        return own | {"policy": batch["policy"], "returns": returns / scale, "valid": valid}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Minimize ``(z - v)^2 - pi^T log p + c ||theta||^2``: AlphaZero, equation 1."""
        dist, value = self.net(batch, {})
        policy = -torch.where(batch["policy"] > 0, batch["policy"] * dist.params, 0.0).sum(-1)
        terms = {"policy": policy, "value": self.cfg.vf_loss_coeff * (value - batch["returns"]).square()}
        if self.cfg.l2_coeff:
            terms["l2"] = self.cfg.l2_coeff * sum(p.square().sum() for p in self.net.parameters())
        return Losses(terms, {"mean_entropy": dist.entropy().detach(), "mean_value": value.detach()})

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses = Losses({})
        for epoch in range(self.cfg.num_sgd_iter):
            for minibatch in learner.minibatches(batch, self.cfg.sgd_minibatch_size, "row"):
                losses = learner.minimize(minibatch, self, diagnostics=epoch == self.cfg.num_sgd_iter - 1)
        if self.past is not None and (learner.progress.updates + 1) % self.cfg.past_every == 0:
            self.past.load_state_dict(self.net.state_dict())
        if self.ranked is not None:
            losses.metrics["threshold"] = self.ranked.threshold.float()
        return losses

    def candidate_weights(self, candidate: Batch) -> Weights:
        return {"opponent": candidate["opponent"].to(self.opponent.device)}

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Return the usual metrics; for two players, ``eval/vs_<opponent>/...``, each seat in half of the games."""
        if self.players == 1:
            ((_, batch),) = play([Job(0, episodes=episodes, mode="greedy")])
            return episode_metrics(batch)
        half = max(1, episodes // 2)
        jobs = [
            Job(2 * who + seat, candidate={"opponent": torch.tensor([who, seat])}, episodes=half, mode="greedy")
            for who in range(len(self.cfg.opponents))
            for seat in range(2)
        ]
        found: dict[int, list[Tensor]] = {}
        metrics, means, played = dict[str, float](), list[float](), list[Batch]()
        for job, batch in play(jobs):
            played.append(batch)
            paid = torch.where(batch["valid"], batch["reward"][..., job.number % 2], 0.0).sum(0)
            found.setdefault(job.number // 2, []).append(paid)
        for who, paid in found.items():
            score, name = torch.cat(paid).double(), self.cfg.opponents[who]
            parts = {"win": score > 0, "draw": score == 0, "loss": score < 0}
            metrics |= {f"eval/vs_{name}/{part}_rate": float(x.double().mean()) for part, x in parts.items()}
            means.append(float(score.mean()))
            metrics[f"eval/vs_{name}/return_mean"] = means[-1]
        score = sum(means) / len(means)
        metrics |= {"eval/return_mean": score, "eval/return_std": float(np.std(means))}
        return metrics_of_jobs(played) | metrics
