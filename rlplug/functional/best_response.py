"""Exact best responses in small turn-based zero-sum games of two players.

A player's gain from a best response is the increase in its payoff over its own policy. The mean of both players' gains
is the exploitability, their sum is NashConv (Lanctot et al. 2017, arXiv:1711.00832, section 2); both are 0 in an
equilibrium.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_HISTORIES = 600_000
"""maximum number of histories of a game that is searched; tic-tac-toe has 549,946"""

Policy = Callable[[Tensor, Tensor], Tensor]
"""(observations ``[n, ...]`` of the player to move, legal moves ``[n, A]`` bool) -> probabilities ``[n, A]``"""


class _Views(NamedTuple):
    """What a player has seen and played: ``v`` different views of the histories of a level, by number."""

    of: Tensor  # [n] the view of every history
    after: Tensor  # [v] index in [b] of what each view follows: a view of the level before, and the own move if any
    before: Tensor  # [b] the views of the level before that are followed


class _Level(NamedTuple):
    """Histories ``[n]`` of equally many moves, which lead to ``m`` different states."""

    parent: Tensor  # [n] index of the history before the last move, in the level before
    move: Tensor  # [n] index of the last move in ``[m, A]`` of the level before, flattened
    mover: Tensor  # [n] player who made the last move
    views: tuple[_Views, ...]  # of both players
    paid: Tensor  # [n] payoff of the first player where the game has ended, else 0; float64
    legal: Tensor  # [m, A] moves in the states
    obs: Tensor  # [m, ...] observations of the player to move


class GameTree:
    """All histories of a game. A player remembers everything that it observed and played.

    Args:
        levels: see ``of``.
        chances: probabilities of the initial states, ``[n]`` float64.
    """

    def __init__(self, levels: Sequence[_Level], chances: Tensor) -> None:
        self.levels, self.chances = levels, chances
        self.obs, self.legal = torch.cat([x.obs for x in levels]), torch.cat([x.legal for x in levels])

    @classmethod
    def of(cls, game: Any, most: int = MOST_HISTORIES) -> GameTree | None:
        """Return all histories of an ``envs.games.TurnGame``; None: more than ``most``, or unknown initial states."""
        if (starts := game.starts()) is None:
            return None
        states, chances = starts
        state = torch.arange(len(states), device=states.device)
        parent = move = mover = torch.zeros_like(state)
        origins = [(parent, parent[:1])] * 2
        levels, total = list[_Level](), len(states)
        while len(state):
            player, legal, seen, over = game.player(states), game.legal(states), game.observe(states), game.over(states)
            paid = chances.new_zeros(len(states))
            paid[over] = game.payoff(states[over]).double()
            looks = [seen[:, p].flatten(1).unique(dim=0, return_inverse=True)[1][state] for p in range(2)]
            views = tuple(
                _Views(*_numbered(origin, look), before) for (origin, before), look in zip(origins, looks, strict=True)
            )
            obs = seen[torch.arange(len(states), device=states.device), player]
            levels.append(_Level(parent, move, mover, views, paid[state], legal, obs))
            parent, action = legal[state].nonzero().unbind(1)
            if (total := total + len(parent)) > most:
                return None
            move, mover = state[parent] * legal.shape[1] + action, player[state[parent]]
            own = [torch.where(mover == p, action, 0) for p in range(2)]
            origins = [_numbered(view.of[parent], one) for view, one in zip(views, own, strict=True)]
            here, moves = legal.nonzero().unbind(1)
            after = state.new_zeros(legal.shape)
            states, after[here, moves] = game.play(states[here], moves).unique(dim=0, return_inverse=True)
            state = after.flatten()[move]
        return cls(levels, chances)

    def best_responses(self, policies: Sequence[Policy]) -> Tensor:
        """Return the payoff of a best response as the first and as the second player, ``[2]`` float64.

        The other player draws one of ``policies`` before the game, all with equal probability, and plays it throughout.
        The best response knows the policies, but not which of them was drawn.
        """
        paid = [[torch.zeros_like(x.paid) for x in self.levels] for _ in range(2)]
        for policy in policies:
            chances = torch.split(policy(self.obs, self.legal).double(), [len(x.legal) for x in self.levels])
            for p in range(2):
                reach = self.chances / len(policies)  # probability of the chance moves and of those of the other player
                paid[p][0] += reach * self.levels[0].paid
                for level, chance, sums in zip(self.levels[1:], chances, paid[p][1:], strict=False):
                    theirs = chance.flatten().index_select(0, level.move).masked_fill_(level.mover == p, 1.0)
                    reach = reach.index_select(0, level.parent).mul_(theirs)
                    sums.addcmul_(reach, level.paid)
        return torch.stack([self._best(p, paid[p]) * (1 - 2 * p) for p in range(2)])

    def _best(self, p: int, paid: Sequence[Tensor]) -> Tensor:
        """Return the first player's payoff if ``p`` plays a best response, 0-d, by backward induction over views.

        Args:
            paid: the first player's payoff where histories end, times the probability of all moves not made by ``p``.
        """
        counts = [1, *(len(level.views[p].after) for level in self.levels)]
        value = self.chances.new_zeros(counts[-1])
        for level, ends, count in reversed([*zip(self.levels, paid, counts, strict=False)]):
            views = level.views[p]
            value = value.index_add(0, views.of, ends)
            sums = value.new_zeros(len(views.before)).index_add(0, views.after, value)
            choice = ("amax", "amin")[p]  # where the player does not move, there is nothing to choose
            value = value.new_zeros(count).scatter_reduce(0, views.before, sums, choice, include_self=False)
        return value.squeeze()


def _numbered(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Number pairs from 0, equal pairs equally: return ``[n]`` int64, and the first element of each distinct pair."""
    base = second.amax() + 1 if len(second) else 1
    both: Any = first * base + second
    pairs, number = both.unique(return_inverse=True)
    return number, pairs // base
