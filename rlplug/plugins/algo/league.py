"""A league of past policies around a learner of games with two or more sides.

Self-play against a pool of frozen policies of its own past: prioritized fictitious self-play (PFSP) of Vinyals et al.
2019 (Nature 575, Methods, "Multi-agent learning"), fictitious self-play (uniform) or play against the latest one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rlplug.agents import Exploitability, Policies, sides_of
from rlplug.api import Algorithm, Context, Job, Learner, Losses, Needs, Play, Segment
from rlplug.functional.returns import ended, metrics_of_jobs
from rlplug.settings import AlgoNode, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode

OWN = ("mine", "opponent", "score")  # keys that the league adds to the rows of agents
ITSELF = -1  # opponent of an episode of self-play, in which the learner plays all sides


class Pool(nn.Module):
    """Frozen policies, at most ``size``, and the results of the learner against each.

    The first ones are named policies of other runs, which stay; the others are copies of the learner.

    Attributes:
        names: of the policies that stay.
        added: number of copies so far, of which the latest are in the pool.
        results: wins, draws and losses of the learner, ``[size, 3]``, discounted by ``decay`` at every new copy.
        elo: rating of each policy when it was added, ``[size]``; ``rating``: of the learner, 0-d.
        odds: how often the learner meets each policy, ``[size]``; all 0: as in training if it explores, otherwise the
            learner plays all seats itself.
    """

    added: Tensor
    results: Tensor
    elo: Tensor
    rating: Tensor
    odds: Tensor

    def __init__(self, learner: Algorithm, size: int) -> None:
        super().__init__()
        self.make, self.size, self.members, self.names = partial(frozen, learner), size, nn.ModuleList(), list[str]()
        for name, shape in (("results", (size, 3)), ("elo", (size,)), ("rating", ()), ("odds", (size,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("added", torch.zeros((), dtype=torch.int64))

    def get_extra_state(self) -> Tensor:
        return torch.tensor([len(self.members), *"\0".join(self.names).encode()])

    def set_extra_state(self, state: Tensor) -> None:
        """Create missing policies, whose weights are loaded afterwards."""
        count, *letters = state.flatten().tolist()
        self.names = bytes(letters).decode().split("\0") if letters else []
        while len(self.members) < count:
            self.members.append(self.make())

    @property
    def titles(self) -> list[str]:
        """Return the names of all policies; that of a copy is its place."""
        return [*self.names, *map(str, range(len(self.names), len(self.members)))]

    @property
    def latest(self) -> int:
        """Return the place of the latest copy, or of the last policy that stays."""
        kept = len(self.names)
        return kept + int(self.added - 1) % (self.size - kept) if self.added else kept - 1

    def keep(self, name: str, weights: Batch) -> None:
        """Add a policy that stays, before there are copies."""
        self.names.append(name)
        self.members.append(self.make())
        self.members[-1].load_state_dict(weights)
        self.elo[len(self.members) - 1] = self.rating

    def add(self, decay: float) -> None:
        """Add a copy of the learner; a full pool replaces its oldest."""
        self.added += 1
        place = self.latest
        if place == len(self.members):
            self.members.append(self.make())
        else:
            self.members[place] = self.make()
        self.results.mul_(decay)
        self.results[place] = 0.0
        self.elo[place] = self.rating

    def record(self, games: list[list[int]], k: float) -> None:
        """Count games, lists that end with the opponent and 1, 0 or -1 for the learner, and update its Elo rating."""
        for *_, one, won in games:
            self.results[one, 1 - won] += 1
            expected = 1 / (1 + 10 ** ((self.elo[one] - self.rating) / 400))
            self.rating += k * ((won + 1) / 2 - expected)

    def winrates(self) -> Tensor:
        """Return the probability of a win, with half of one for a draw, against each policy, ``[members]``.

        The estimate starts from one draw, so a new policy counts as an equal opponent.
        """
        wins, draws, losses = self.results[: len(self.members)].unbind(1)
        return (wins + 0.5 * draws + 0.5) / (wins + draws + losses + 1)


def frozen(learner: Algorithm) -> Algorithm:
    return copy.deepcopy(learner).requires_grad_(False)


class League(Algorithm):
    @settings
    class Config:
        algo: AlgoNode = option("Algorithm of the learner.")
        opponents: Literal["pfsp", "uniform", "latest", "named"] = option(
            "pfsp: by how hard they are to beat; uniform: any; latest: the newest; named: those of init_from.policies."
        )
        pfsp_power: PositiveFloat = option("pfsp: a copy's weight is (1 - win rate) to this power.")
        self_play: UnitFloat = option("Fraction of episodes that the learner plays against itself.")
        size: PositiveInt = option("Policies in the pool; a new copy then replaces the oldest.")
        every: PositiveInt = option("Updates between two copies.")
        decay: UnitFloat = option("Factor of all results at a new copy, since the learner changes.")
        payoff: NonNegativeInt = option("Episodes of each pair of the pool's policies in an evaluation; 0: none.")
        elo_k: Annotated[float, Field(gt=0)] = option("Largest change of the Elo rating by one game.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, self.sides, self.exploitability = cfg, ctx, sides_of(cfg.algo)(ctx), Exploitability(ctx)
        keys = tuple(key for key in ctx.needs.keys if key not in OWN)
        self.learner: Algorithm = self.sides.build(cfg.algo, replace(ctx.needs, keys=keys))
        self.pool = Pool(self.learner, cfg.size)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        needs = sides_of(cfg.algo).needs(cfg.algo, spec)
        return replace(needs, keys=tuple(dict.fromkeys((*needs.keys, "prev_reward", *OWN))))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return cfg.algo.needs(needs, member="recurrent")

    def initial_carry(self, n: int) -> Batch:
        seat = torch.zeros(n, dtype=torch.int64, device=self.ctx.device)
        score = torch.zeros(n, len(self.sides.agents), device=self.ctx.device)
        policy = self.sides.initial_carry(self.learner, n)
        return {"policy": policy, "seat": seat, "opponent": seat + ITSELF, "score": score}

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act for all sides: the learner in its seat, its opponent in the others.

        The carry has the learner's ``seat`` and the ``opponent``, ``[B]``, and the game's ``score``, ``[B, sides]``.
        """
        first, uniform = step["is_first"], self.ctx.rand(len(step["is_first"]), 2)
        drawn, seat = self.match(uniform[:, 0], uniform[:, 1], mode)
        opponent, seat = torch.where(first, drawn, carry["opponent"]), torch.where(first, seat, carry["seat"])
        score = torch.where(first[:, None], 0.0, carry["score"] + self.sides.mean(step, "prev_reward"))
        places = torch.arange(score.shape[1], device=seat.device)
        mine = (places == seat[:, None]) | (opponent == ITSELF)[:, None]
        playing = opponent[opponent != ITSELF].unique().tolist()
        others = [((opponent == place).nonzero()[:, 0], self.pool.members[place]) for place in playing]
        out, policy = self.sides.act(self.learner, step, carry["policy"], mode, mine, others)
        more = self.sides.spread(mine=mine, opponent=opponent[:, None].expand_as(mine), score=score)
        out = {name: out[name] | part for name, part in more.items()} if self.ctx.spec.nested else out | more
        return out, {"policy": policy, "seat": seat, "opponent": opponent, "score": score}

    def match(self, opponent: Tensor, seat: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Choose opponents and the learner's seats by uniform numbers ``[B]``."""
        sides = len(self.sides.agents)
        seats, weights, alone = (seat * sides).long(), self.pool.odds[: len(self.pool.members)], 0.0
        if mode == "explore" and not weights.any():
            weights, alone = self.weights(), self.cfg.self_play
        if not weights.sum():
            return torch.full_like(seats, ITSELF), seats
        bounds = torch.cat([weights.new_tensor([alone]), (1 - alone) * weights / weights.sum()]).cumsum(0)
        return torch.searchsorted(bounds[:-1], opponent.double(), right=True) + ITSELF, seats

    def weights(self) -> Tensor:
        """Return how often each policy is met in training, ``[members]``, up to a factor."""
        winrates = self.pool.winrates()
        if self.cfg.opponents == "pfsp":
            return (1 - winrates) ** self.cfg.pfsp_power
        if self.cfg.opponents == "named" and not self.pool.names:
            raise ConfigError("algo.opponents", "named, but init_from.policies names no policy of another run; add one")
        places, last = torch.arange(len(winrates), device=winrates.device), self.pool.latest
        met = {"uniform": places >= 0, "latest": places == last, "named": places < len(self.pool.names)}
        return met[self.cfg.opponents].double()

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Record the results of ended games against the pool: whether the learner's return exceeds that of the others.

        Ratings depend on the order of games: that of rows, then of environments, for any number of ranks.
        """
        batch, sides = segment.batch, self.sides
        mine, opponent = sides.gather(batch, "mine")[:-1], sides.gather(batch, "opponent")[:-1, :, 0]
        over = ended(batch) & (opponent != ITSELF)
        score = sides.gather(batch, "score")[1:]
        ahead = own(score, mine) - own(score, ~mine)
        games = learner.gather(torch.stack([over.nonzero()[:, 0], opponent[over], ahead[over].sign().long()], 1))
        self.pool.record(games[games[:, 0].argsort(stable=True)].tolist(), self.cfg.elo_k)
        self.learner.observe(replace(segment, batch=sides.rows(batch)), learner)

    def prepare(self, batch: Batch) -> Batch:
        return self.learner.prepare(self.sides.rows(batch))

    def update(self, batch: Batch, learner: Learner) -> Losses:
        losses = self.learner.update(batch, learner)
        if (learner.progress.updates + 1) % self.cfg.every == 0:
            self.pool.add(self.cfg.decay)
        winrates = self.pool.winrates()
        metrics = {"elo": self.pool.rating, "pool": winrates.new_tensor(float(len(winrates)))}
        metrics |= {"winrate": winrates.mean(), "winrate_min": winrates.min()} if len(winrates) else {}
        losses.metrics |= {name: value.float() for name, value in metrics.items()}
        return losses

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Return results of the greedy learner against all policies of the pool equally, and against each that stays.

        While the pool is empty, the learner plays against itself. With ``payoff``, also let all pairs of policies play.
        """
        pool, places, members = self.pool, torch.arange(self.cfg.size), range(len(self.pool.members))
        kept = range(len(pool.names)) if len(members) > 1 else range(0)
        pairs = [(i, j) for i in members for j in members if i < j and self.cfg.payoff]
        weights: dict[str, Batch] = {f"as {i}": pool.members[i].state_dict() for i, _ in pairs}
        weights |= {f"against {j}": {"odds": (places == j).double()} for j in {*kept, *(j for _, j in pairs)}}
        weights["all"] = {"odds": (places < len(members)).double()}
        jobs = [Job(0, {"pool": "all"}, episodes=episodes, mode="greedy")]
        jobs += [replace(jobs[0], policies={"pool": f"against {j}"}) for j in kept]
        playing = ({"learner": f"as {i}", "pool": f"against {j}"} for i, j in pairs)
        jobs += [Job(0, who, episodes=self.cfg.payoff, mode="greedy") for who in playing]
        names, title = [f"against/{pool.names[j]}" for j in kept], pool.titles
        names += [f"payoff/{title[i]}/{title[j]}" for i, j in pairs]
        (_, batch), *others = play([replace(job, number=i) for i, job in enumerate(jobs)], weights)
        each, mine = self.returns(batch)
        returns, ahead = own(each, mine), own(each, mine) - own(each, ~mine)
        metrics = {"eval/return_mean": returns.mean(), "eval/return_std": returns.std(correction=0)}
        metrics |= {"eval/wins": (ahead > 0).double().mean(), "eval/losses": (ahead < 0).double().mean()}
        metrics |= {f"eval/{name}": own(*self.returns(of)).mean() for name, (_, of) in zip(names, others, strict=True)}
        played = [(name, each[mine[:, i], i]) for i, name in enumerate(self.sides.agents)]
        metrics |= {f"eval/return/{name}": of.mean() for name, of in played if len(of)}
        metrics |= {"eval/elo": pool.rating} | self.exploitability(self.learner, pool.members)
        return metrics_of_jobs([batch]) | {name: float(value) for name, value in metrics.items()}

    def returns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the return of every side in episodes, ``[episodes, sides]``, and which sides the learner played."""
        rewards = torch.where(batch["valid"][..., None], self.sides.mean(batch, "reward"), 0.0)
        return rewards.sum(0).double(), self.sides.gather(batch, "mine")[0]

    def named_policy(self, name: str) -> Algorithm:
        """Return the learner, or its policy of this name."""
        has = isinstance(self.learner, Policies) and name in self.learner.table
        return self.learner.named_policy(name) if has else self.learner

    def adopt(self, policy: str, other: Algorithm) -> None:
        """Begin the learner from another run, or add a policy that stays; empty: the only one of the pool."""
        if policy and self.pool.added:
            raise ConfigError("", "a league plays against all policies of another run: against=<run>")
        whole = isinstance(self.learner, Policies) and isinstance(other, Policies)
        weights = (other if whole else other.named_policy(policy)).state_dict()
        if policy == "learner":
            self.learner.load_state_dict(weights)
            return
        if not policy:
            rating, self.pool = self.pool.rating, Pool(self.learner, self.cfg.size).to(self.pool.rating.device)
            self.pool.rating, self.pool.odds[0] = rating, 1.0
        if len(self.pool.names) == self.cfg.size:
            raise ConfigError("algo.size", f"{self.cfg.size} is too small for the policies of init_from and a copy")
        self.pool.keep(policy or "opponent", weights)


def own(values: Tensor, mine: Tensor) -> Tensor:
    """Return the mean ``[...]`` of values ``[..., sides]`` where ``mine`` is true; of all if it is true nowhere."""
    mine = mine | ~mine.any(-1, keepdim=True)
    return torch.where(mine, values, 0.0).sum(-1) / mine.sum(-1)
