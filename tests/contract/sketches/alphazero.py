# pyright: strict
"""AlphaZero, Silver et al. 2017 (arXiv:1712.01815), for one player with Ranked Reward, Laterre et al. 2018
(arXiv:1807.01672): an episode wins if its score is above a percentile of the recent scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from rlplug.api import Algorithm, Context, Learner, Losses, Model, Needs, Optim, Segment
from rlplug.nn.distributions import Categorical
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class AlphaZero(Algorithm):
    threshold: Tensor
    scores: Tensor

    @settings
    class Config:
        simulations: PositiveInt = option("Expansions of the tree before each action.")
        c_puct: PositiveFloat = option("Weight of the prior in the tree.")
        percentile: UnitFloat = option("Share of the recent scores that an episode has to beat.")
        memory: PositiveInt = option("How many scores are recent.")
        noise: UnitFloat = option("Share of noise in the root's prior.")
        lr: PositiveFloat = option("Adam's step size.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        self.simulator = ctx.simulator()
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        self.actions = int(group.action.n)
        self.torso: Model = ctx.build("model", group.obs)
        self.policy, self.value = nn.Linear(self.torso.out_dim, self.actions), nn.Linear(self.torso.out_dim, 1)
        self.register_buffer("threshold", torch.tensor(-torch.inf))
        self.register_buffer("scores", torch.full((cfg.memory,), torch.nan))

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if "simulator" not in spec.offers or not isinstance(spec.single_agent.action, Discrete):
            raise ConfigError("env", "alphazero needs an environment that can be simulated, with discrete actions")
        return Needs(
            data="episodes", off_policy=True, keys=("obs", "action_mask", "visits", "returns", "score", "prev_reward")
        )

    def initial_carry(self, n: int) -> Batch:
        return {"score": torch.zeros(n)}  # of the episode so far

    def estimate(self, rows: Batch) -> tuple[Tensor, Tensor]:
        """Log-prior ``[..., A]`` and value in [-1, 1] ``[...]``."""
        features, _ = self.torso(rows["obs"], {}, None)
        prior = Categorical(self.policy(features), rows.get("action_mask"))
        return prior.params, self.value(features).squeeze(-1).tanh()

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        score = torch.where(step["is_first"], 0.0, carry["score"] + step["prev_reward"])
        visits = self.search(step, score, mode)
        play = Categorical(visits.log())
        action = play.mode() if mode == "greedy" else play.sample(self.ctx.rand(len(visits), 1))
        return {"action": action, "visits": visits}, {"score": score}

    def search(self, root: Batch, score: Tensor, mode: Mode) -> Tensor:
        """Shares of visits of the root's actions, ``[B, A]``; one tree a column, all columns in step."""
        columns, size, actions = len(score), self.cfg.simulations + 1, self.actions
        b = torch.arange(columns)
        prior, visits, total = torch.zeros(3, columns, size, actions).unbind()
        child = torch.full((columns, size, actions), -1)
        over, scores = torch.zeros(columns, size, dtype=torch.bool), score[:, None].repeat(1, size)
        state = root["env_state"][:, None].repeat_interleave(size, 1)
        prior[:, 0] = self.estimate(root)[0].exp()
        if mode == "explore":  # Dirichlet(1): normalised exponentials
            noise = -self.ctx.rand(columns, actions).clamp(min=1e-9).log() * (prior[:, 0] > 0)
            prior[:, 0] += self.cfg.noise * (noise / noise.sum(-1, keepdim=True) - prior[:, 0])
        for new in range(1, size):
            node, live = torch.zeros(columns, dtype=torch.long), torch.ones(columns, dtype=torch.bool)
            action, path = node, list[tuple[Tensor, Tensor, Tensor]]()
            while live.any():
                n = visits[b, node]
                puct = total[b, node] / n.clamp(min=1) + self.cfg.c_puct * prior[b, node] * (
                    n.sum(-1, keepdim=True) + 1
                ).sqrt() / (1 + n)
                action = torch.where(live, puct.masked_fill(prior[b, node] == 0, -torch.inf).argmax(-1), action)
                path.append((node, action, live))
                below = child[b, node, action]
                live = live & (below >= 0) & ~over[b, below]
                node = torch.where(live, below, node)
            row = self.simulator.step(state[b, node], action)
            log_prior, value = self.estimate(row)
            prior[:, new], state[:, new] = log_prior.exp(), row["env_state"]
            scores[:, new] = scores[b, node] + row["reward"]
            over[:, new] = row["terminated"] | row["truncated"]
            child[b, node, action] = new
            value = torch.where(over[:, new], self.rank(scores[:, new]), value)
            for at, chosen, on in path:
                visits[b, at, chosen] += on
                total[b, at, chosen] += on * value
        return visits[:, 0] / self.cfg.simulations

    def rank(self, score: Tensor) -> Tensor:
        return torch.where(score >= self.threshold, 1.0, -1.0)

    def postprocess(self, data: Batch) -> Batch:
        """Whole episodes ``[L+1, B]``: every row gets the episode's score, and whether that is a win."""
        score = (data["reward"] * data["valid"]).sum(0).expand_as(data["reward"])
        return data | {"score": score, "returns": self.rank(score)}

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Each episode's score once; the threshold reaches the actors with the weights."""
        self.scores = torch.cat([self.scores, learner.gather(segment.batch["score"][0])])[-self.cfg.memory :]
        self.threshold = self.scores.nanquantile(self.cfg.percentile)

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        log_prior, value = self.estimate(batch)
        policy = -torch.where(batch["visits"] > 0, batch["visits"] * log_prior, 0.0).sum(-1)
        return Losses({"policy": policy, "value": (value - batch["returns"]).square()})

    def optimizers(self) -> dict[str, Optim]:
        return {"network": Optim(torch.optim.Adam(self.parameters(), lr=self.cfg.lr, weight_decay=1e-4))}

    def actor_keys(self) -> tuple[str, ...]:
        names: dict[str, Any] = self.state_dict()
        return tuple(name for name in names if name != "scores")
