"""A league of past policies around a learner of two-player games.

Self-play against a pool of frozen policies of its own past: prioritized fictitious self-play (PFSP) of Vinyals et al.
2019 (Nature 575, Methods, "Multi-agent learning"), fictitious self-play (uniform) or play against the latest one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rlplug import tree
from rlplug.agents import Exploitability, agents_of, spec_of, unfold, view
from rlplug.api import Algorithm, Context, Job, Learner, Losses, Needs, Play, Segment
from rlplug.functional.returns import ended, metrics_of_jobs
from rlplug.settings import AlgoNode, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode

OWN = ("mine", "opponent", "score")  # keys that the league adds to rows, [..., B, 2]
ITSELF = -1  # opponent of an episode of self-play, in which the learner plays both sides


class Pool(nn.Module):
    """Frozen policies, at most ``size``, and the results of the learner against each.

    The first ones are named policies of other runs, which stay; the others are copies of the learner.

    Attributes:
        names: of the policies that stay.
        added: number of copies so far, of which the latest are in the pool.
        results: wins, draws and losses of the learner, ``[size, 3]``, discounted by ``decay`` at every new copy.
        elo: rating of each policy when it was added, ``[size]``; ``rating``: of the learner, 0-d.
        odds: how often the learner meets each policy, ``[size]``; all 0: as in training if it explores, else it plays
            both seats itself.
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
        return torch.tensor([len(self.members), *"/".join(self.names).encode()])

    def set_extra_state(self, state: Tensor) -> None:
        """Create missing policies, whose weights are loaded afterwards."""
        count, *letters = state.flatten().tolist()
        self.names = bytes(letters).decode().split("/") if letters else []
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
        """Count games, which end with their opponent and 1, 0 or -1 for the learner, and update its Elo rating."""
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
        self.cfg, self.ctx, self.players, self.exploitability = cfg, ctx, agents_of(ctx.spec), Exploitability(ctx)
        keys, own = tuple(key for key in ctx.needs.keys if key not in OWN), spec_of(ctx.spec, self.players, "env")
        self.learner: Algorithm = cfg.algo.build(ctx.child(own, replace(ctx.needs, keys=keys), agents=2))
        self.pool = Pool(self.learner, cfg.size)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        players = agents_of(spec)
        if len(spec.groups) > 1 or len(players) != 2:
            names = ", ".join(player.name for player in players)
            raise ConfigError("env", f"has the agents {names}, but a league needs two players with equal spaces")
        needs: Needs = cfg.algo.needs(spec_of(spec, players, "env"))
        return replace(needs, keys=tuple(dict.fromkeys((*needs.keys, "prev_reward", *OWN))))

    @classmethod
    def recurrent(cls, cfg: Config, needs: Needs) -> Needs:
        return cfg.algo.needs(needs, member="recurrent")

    def initial_carry(self, n: int) -> Batch:
        policy = unfold(self.learner.initial_carry(2 * n), 2)
        seat = torch.zeros(n, dtype=torch.int64, device=self.ctx.device)
        return {"policy": policy, "seat": seat, "opponent": seat + ITSELF, "score": torch.zeros(n, 2).to(seat.device)}

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        """Act for both players: the learner in its seat, its opponent in the other.

        Opponents explore as they did when they were copied, also where the learner is greedy. Where it acts at random
        because learning has not started, they do, too.
        """
        first, theirs = step["is_first"], "random" if mode == "random" else "explore"
        uniform = self.ctx.rand(len(first), 2)
        drawn, seat = self.match(uniform[:, 0], uniform[:, 1], mode)
        opponent, seat = torch.where(first, drawn, carry["opponent"]), torch.where(first, seat, carry["seat"])
        score = torch.where(first[:, None], 0.0, carry["score"] + step["prev_reward"])
        mine = (torch.arange(2, device=seat.device) == seat[:, None]) | (opponent == ITSELF)[:, None]
        rows, memory = view(step, self.ctx.spec, self.players), tree.map(lambda x: x.flatten(0, 1), carry["policy"])
        others, seats = list[Any](), torch.arange(mine.numel(), device=seat.device).view(-1, 2)
        for place in opponent[opponent != ITSELF].unique().tolist():
            columns = opponent == place
            acting = (tree.take(x, seats[columns].flatten()) for x in (rows, memory))
            with self.ctx.apart(columns.nonzero()[:, 0].tolist()):  # so that draws do not depend on who plays here
                other = self.pool.members[place].act(*acting, theirs)  # pyright: ignore[reportCallIssue]
            others.append((seats[~mine & columns[:, None]], [tree.take(x, ~mine[columns].flatten()) for x in other]))
        found = self.learner.act(rows, memory, mode)
        for index, other in others:
            found = [tree.map(lambda a, b, i=index: a.index_copy(0, i, b), *x) for x in zip(found, other, strict=True)]
        out, memory = (unfold(x, 2) for x in found)
        own = {"mine": mine, "opponent": opponent[:, None].expand(-1, 2), "score": score}
        return out | own, {"policy": memory, "seat": seat, "opponent": opponent, "score": score}

    def match(self, opponent: Tensor, seat: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Choose opponents and the learner's seats by uniform numbers ``[B]``."""
        seats, weights, alone = (seat * 2).long(), self.pool.odds[: len(self.pool.members)], 0.0
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

    def rows(self, batch: Batch) -> Batch:
        """Return the rows of the learner as those of a single agent."""
        rows = view(batch, self.ctx.spec, self.players)
        if "carry" in batch:
            rows["carry"] = tree.map(lambda x: x.flatten(1, 2), batch["carry"]["policy"])
        return rows | {"valid": rows["valid"] & rows["mine"]}

    def observe(self, segment: Segment, learner: Learner) -> None:
        """Record the results of ended games against copies: the sign of the learner's return.

        Ratings depend on the order of games, which is that of rows and environments with any number of ranks.
        """
        batch = segment.batch
        mine, opponent = batch["mine"][:-1], batch["opponent"][:-1, :, 0]
        over = ended(batch) & (opponent != ITSELF)
        returns = torch.where(mine, batch["score"][1:], 0.0).sum(-1)
        games = learner.gather(torch.stack([over.nonzero()[:, 0], opponent[over], returns[over].sign().long()], 1))
        self.pool.record(games[games[:, 0].argsort(stable=True)].tolist(), self.cfg.elo_k)
        self.learner.observe(replace(segment, batch=self.rows(batch)), learner)

    def prepare(self, batch: Batch) -> Batch:
        return self.learner.prepare(self.rows(batch))

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
        """Return results of the greedy learner against all policies of the pool alike, and against each that stays.

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
        returns = _returns(batch)
        metrics = {"eval/return_mean": returns.mean(), "eval/return_std": returns.std(correction=0)}
        metrics |= {"eval/wins": (returns > 0).double().mean(), "eval/losses": (returns < 0).double().mean()}
        metrics |= {f"eval/{name}": _returns(of).mean() for name, (_, of) in zip(names, others, strict=True)}
        metrics |= {"eval/elo": pool.rating} | self.exploitability(self.learner, pool.members)
        return metrics_of_jobs([batch]) | {name: float(value) for name, value in metrics.items()}

    def named_policy(self, name: str) -> Algorithm:
        """Return the learner."""
        return self.learner

    def adopt(self, policy: str, other: Algorithm) -> None:
        """Begin the learner from another run, or add a policy that stays; empty: the only one of the pool."""
        weights = other.named_policy(policy).state_dict()
        if policy == "learner":
            self.learner.load_state_dict(weights)
            return
        if not policy:
            rating, self.pool = self.pool.rating, Pool(self.learner, self.cfg.size).to(self.pool.rating.device)
            self.pool.rating, self.pool.odds[0] = rating, 1.0
        if len(self.pool.names) == self.cfg.size:
            raise ConfigError("algo.size", f"{self.cfg.size} is too small for the policies of init_from and a copy")
        self.pool.keep(policy or "opponent", weights)


def _returns(batch: Batch) -> Tensor:
    """Return the learner's return in every episode, ``[episodes]``; in self-play the mean of both seats."""
    reward = torch.where(batch["mine"] & batch["valid"][..., None], batch["reward"], 0.0).sum(0)
    return (reward.sum(-1) / batch["mine"][0].sum(-1)).double()
