"""Rules of games as pure functions of batches of states, shared by environments and planners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, Space
from torch import Tensor

from rlplug.api import Simulator
from rlplug.functional.best_response import GameTree, Policy
from rlplug.types import Batch, EnvSpec, Group, Tree

MOST_CELLS = 10
"""cells of a board of which all states are visited"""


class Game:
    """A game of agents. Its methods are pure functions of states, a tensor ``[B, ...]`` or a dict of them.

    An ended state does not change, and its rewards are 0. A subclass sets ``spec``, and may set ``noise_size``: the
    number of uniform random numbers that determine an initial state. A state whose ``spec.extras`` name ``env_state``
    is a tensor, and is part of every row.
    """

    spec: EnvSpec
    noise_size: int = 0
    hides: bool = False
    """whether a state has more than the players know: rows then lack the state, so no planner can start from them"""

    def initial(self, noise: Tensor) -> Tree:
        """Return initial states from uniform noise ``[B, noise_size]`` in [0, 1)."""
        raise NotImplementedError(f"{type(self).__name__}.initial")

    def move(self, state: Tree, action: Any) -> tuple[Tree, Batch]:
        """Return the next states, and the agents' ``reward`` and ``terminated`` ``[B, N]``; several groups are nested.

        Args:
            state: not changed.
            action: ``[B, N, ...]``, or a dict of them for several groups; those of agents that do not act are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__}.move")

    def row(self, state: Tree) -> Batch:
        """Return ``obs``, ``alive`` and extras of states, ``[B, ...]``, nested by group if there are several."""
        raise NotImplementedError(f"{type(self).__name__}.row")

    def exploitability(self, policies: Sequence[Policy]) -> float | None:
        """Return the mean over players of what a best response gains; 0 in an equilibrium, half of NashConv.

        Each player draws one of ``policies`` before the game, all with equal probability, and plays it throughout.

        Returns:
            In units of the reward of an episode; None, the default: it is not known exactly.
        """
        return None


class TurnGame(Game):
    """A zero-sum game of two players in turn. Its state is one tensor ``[B, S]``.

    Both players are alive until the end. The mask of the one who waits allows only action 0, which is ignored.

    Args:
        obs: space of a player's observation.
        num_actions: size of the players' action space.
        env_state: space of a state.
        max_moves: number of moves of the longest game.
    """

    def __init__(self, obs: Space[Any], num_actions: int, env_state: Space[Any], max_moves: int) -> None:
        players = Group(obs, Discrete(num_actions), ("first", "second"))
        extras: dict[str, Space[Any]] = {"action_mask": MultiBinary(num_actions)}
        extras |= {} if self.hides else {"env_state": env_state}
        self.spec = EnvSpec({"players": players}, extras, max_moves)
        self.num_actions = num_actions

    def player(self, state: Tensor) -> Tensor:
        """Return the index of the player to move, 0 or 1, ``[B]`` int64; arbitrary in ended states."""
        raise NotImplementedError(f"{type(self).__name__}.player")

    def legal(self, state: Tensor) -> Tensor:
        """Return the actions of the player to move, ``[B, A]`` bool; none in ended states."""
        raise NotImplementedError(f"{type(self).__name__}.legal")

    def play(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the states after the moves ``action [B]``; a move that is not legal changes nothing."""
        raise NotImplementedError(f"{type(self).__name__}.play")

    def over(self, state: Tensor) -> Tensor:
        """Return which states are ended, ``[B]`` bool."""
        raise NotImplementedError(f"{type(self).__name__}.over")

    def payoff(self, state: Tensor) -> Tensor:
        """Return the first player's payoff in ended states, ``[B]`` float32; the second player's is its negative."""
        raise NotImplementedError(f"{type(self).__name__}.payoff")

    def observe(self, state: Tensor) -> Tensor:
        """Return the observations of both players, ``[B, 2, ...]`` float32."""
        raise NotImplementedError(f"{type(self).__name__}.observe")

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Batch]:
        after = self.play(state, action.gather(1, self.player(state)[:, None]).squeeze(1))
        ends = self.over(after) & ~self.over(state)
        first = torch.where(ends, self.payoff(after), 0.0)
        return after, {"reward": torch.stack([first, -first], 1), "terminated": ends[:, None].repeat(1, 2)}

    def row(self, state: Tensor) -> Batch:
        over, legal = self.over(state), self.legal(state)
        waits = torch.arange(self.num_actions, device=state.device) == 0
        turn = torch.arange(2, device=state.device) == self.player(state)[:, None]
        mask = torch.where(turn[..., None], legal[:, None], waits) | over[:, None, None]
        row = {"obs": self.observe(state), "alive": ~over[:, None].repeat(1, 2)}
        return row | {"action_mask": mask} | ({} if self.hides else {"env_state": state})

    def starts(self) -> tuple[Tensor, Tensor] | None:
        """Return all initial states ``[n, S]`` and their probabilities ``[n]`` float64; None, the default: unknown."""
        return None

    def best_responses(self, policies: Sequence[Policy]) -> Tensor | None:
        """Return the payoff of a best response to ``policies`` as each player, ``[2]``; None if the game is too large.

        See ``GameTree.best_responses``.
        """
        return self._tree and self._tree.best_responses(policies)

    def exploitability(self, policies: Sequence[Policy]) -> float | None:
        paid = self.best_responses(policies)  # the payoffs of both players' own policies add up to 0
        return None if paid is None else paid.mean().item()

    @cached_property
    def _tree(self) -> GameTree | None:
        return GameTree.of(self)


class LineGame(TurnGame):
    """A game of stones on a board: the player who first has ``length`` of them in a line wins.

    A state is the board, ``[B, height * width]`` int8, row by row from the top: 1 is a stone of the first player, -1
    one of the second, 0 an empty cell. A player observes two planes ``[2, height, width]``: its own stones, and those
    of the other.

    Args:
        falls: an action is a column, in which the stone falls to the lowest empty cell; otherwise it is a cell.
    """

    def __init__(
        self, height: int, width: int, length: int, falls: bool = False, device: torch.device | None = None
    ) -> None:
        self.height, self.width, self.length, self.falls = height, width, length, falls
        cells = height * width
        board = Box(-1, 1, (cells,), np.int8)
        super().__init__(Box(0.0, 1.0, (2, height, width), np.float32), width if falls else cells, board, cells)
        number = np.arange(cells).reshape(height, width)
        lines = [
            [number[y + i * dy, x + i * dx] for i in range(length)]
            for y in range(height)
            for x in range(width)
            for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1))
            if y + (length - 1) * dy < height and 0 <= x + (length - 1) * dx < width
        ]
        self._lines = torch.zeros(cells, len(lines), device=device)
        for line, members in enumerate(lines):
            self._lines[members, line] = 1.0

    def initial(self, noise: Tensor) -> Tensor:
        return torch.zeros(len(noise), self.height * self.width, dtype=torch.int8, device=noise.device)

    def starts(self) -> tuple[Tensor, Tensor]:
        return self.initial(self._lines[:1]), self._lines.new_ones(1, dtype=torch.float64)

    def player(self, state: Tensor) -> Tensor:
        return (state != 0).sum(1) % 2

    def winner(self, state: Tensor) -> Tensor:
        """Return who has a line, ``[B]`` float32: 1 the first player, -1 the second, 0 neither."""
        sums = state.float() @ self._lines
        return (sums == self.length).any(1).float() - (sums == -self.length).any(1).float()

    def over(self, state: Tensor) -> Tensor:
        return (self.winner(state) != 0) | (state != 0).all(1)

    def payoff(self, state: Tensor) -> Tensor:
        return self.winner(state)

    def legal(self, state: Tensor) -> Tensor:
        return (state[:, : self.num_actions] == 0) & ~self.over(state)[:, None]  # a column is open at its top cell

    def play(self, state: Tensor, action: Tensor) -> Tensor:
        cell, stone = action, 1 - 2 * self.player(state)
        if self.falls:
            column = (state != 0).view(-1, self.height, self.width).sum(1).gather(1, action[:, None]).squeeze(1)
            cell = ((self.height - 1 - column) * self.width + action).clamp(min=0)
        after = state.scatter(1, cell[:, None], stone[:, None].to(state.dtype))
        return torch.where(self.legal(state).gather(1, action[:, None]), after, state)

    def observe(self, state: Tensor) -> Tensor:
        board = state.view(-1, self.height, self.width)
        first, second = (board == 1).float(), (board == -1).float()
        return torch.stack([torch.stack([first, second], 1), torch.stack([second, first], 1)], 1)


def tic_tac_toe(device: torch.device | None = None) -> LineGame:
    """Return tic-tac-toe: three in a line on a board of 3 x 3."""
    return LineGame(3, 3, 3, device=device)


def connect_four(device: torch.device | None = None) -> LineGame:
    """Return Connect Four: four in a line on a board of 6 x 7 whose stones fall."""
    return LineGame(6, 7, 4, falls=True, device=device)


class KuhnPoker(TurnGame):
    """Kuhn poker (Kuhn 1950): three cards, of which each player gets one; action 0 passes, 1 bets or calls.

    A state is ``[B, 5]`` int8: both cards, then up to three moves, -1 before they are made. A player observes which
    player it is, its card, and the moves, each one-hot: ``[11]``, as OpenSpiel's information state.
    """

    noise_size, hides = 1, True
    DEALS = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(Box(0.0, 1.0, (11,), np.float32), 2, Box(-1, 2, (5,), np.int8), 3)
        self._deals = torch.tensor([(*deal, -1, -1, -1) for deal in self.DEALS], dtype=torch.int8, device=device)
        self._players = torch.eye(2, device=device)

    def initial(self, noise: Tensor) -> Tensor:
        return self._deals[(noise[:, 0] * len(self.DEALS)).long()]

    def starts(self) -> tuple[Tensor, Tensor]:
        n = len(self.DEALS)
        return self._deals, self._deals.new_full((n,), 1 / n, dtype=torch.float64)

    def player(self, state: Tensor) -> Tensor:
        return (state[:, 2:] >= 0).sum(1) % 2

    def over(self, state: Tensor) -> Tensor:
        first, second, third = state[:, 2:].unbind(1)
        return (second >= 0) & ~((first == 0) & (second == 1) & (third < 0))

    def payoff(self, state: Tensor) -> Tensor:
        moves = state[:, 2:]
        last = moves.gather(1, (moves >= 0).sum(1, keepdim=True) - 1).squeeze(1)
        bet = (moves == 1).any(1)
        higher = (state[:, 0] > state[:, 1]).float() * 2 - 1
        kept = self.player(state).float() * -2 + 1  # the next player is the one who has not folded
        return torch.where(bet & (last == 0), kept, higher * torch.where(bet, 2.0, 1.0))

    def legal(self, state: Tensor) -> Tensor:
        return ~self.over(state)[:, None].repeat(1, 2)

    def play(self, state: Tensor, action: Tensor) -> Tensor:
        place = 2 + (state[:, 2:] >= 0).sum(1, keepdim=True).clamp(max=2)
        after = state.scatter(1, place, action[:, None].to(state.dtype))
        return torch.where(self.over(state)[:, None], state, after)

    def observe(self, state: Tensor) -> Tensor:
        cards = torch.nn.functional.one_hot(state[:, :2].long(), 3).float()
        moves = torch.stack([state[:, 2:] == 0, state[:, 2:] == 1], -1).float().flatten(1)
        who = self._players.expand(len(state), 2, 2)
        return torch.cat([who, cards, moves[:, None].expand(-1, 2, -1)], -1)


class Minimax:
    """Exact values of a small ``LineGame``, such as tic-tac-toe, by backward induction over all reachable states."""

    def __init__(self, game: LineGame) -> None:
        self.game = game
        self._places = 3 ** torch.arange(game.height * game.width)
        self._values = torch.zeros(int(self._places[-1]) * 3)  # of the player to move
        levels = [game.initial(torch.empty(1, 0))]
        while len(levels[-1]):
            going = levels[-1][~game.over(levels[-1])]
            levels.append(self._followers(going)[game.legal(going)].unique(dim=0))
        for states in reversed(levels[:-1]):
            best = self._after(states).amax(1)
            sign = 1.0 - 2.0 * game.player(states)
            values = torch.where(game.over(states), game.payoff(states) * sign, best)
            self._values[self._code(states)] = values

    def value(self, state: Tensor) -> Tensor:
        """Return the outcome of perfect play for the player to move, ``[B]``: 1, 0 or -1."""
        return self._values[self._code(state)]

    def best(self, state: Tensor) -> Tensor:
        """Return the moves that keep the value, ``[B, A]`` bool; none in ended states."""
        return self.game.legal(state) & (self._after(state) == self.value(state)[:, None])

    def _code(self, state: Tensor) -> Tensor:
        return ((state.long() + 1) * self._places).sum(-1)

    def _followers(self, state: Tensor) -> Tensor:
        """Return the states after every action, ``[B, A, cells]``."""
        actions = range(self.game.num_actions)
        return torch.stack([self.game.play(state, torch.full((len(state),), a)) for a in actions], 1)

    def _after(self, state: Tensor) -> Tensor:
        """Return the values of all actions for the player to move, ``[B, A]``; -2 for those that are not legal."""
        values = -self._values[self._code(self._followers(state))]
        return torch.where(self.game.legal(state), values, -2.0)


class GameSimulator(Simulator):
    """Steps a game of one group of agents from any of its states, which are tensors."""

    def __init__(self, game: Game) -> None:
        self.game = game

    @property
    def hides(self) -> bool:
        """Return whether rows of the environment lack the state."""
        return self.game.hides

    def step(self, env_state: Tensor, action: Tensor) -> Batch:
        """Return the row after ``action [B, N]``, with ``reward``, ``terminated`` and ``truncated`` of this one."""
        after, result = self.game.move(env_state, action)
        row = self.game.row(after) | {"env_state": after}
        return row | result | {"terminated": ~row["alive"], "truncated": torch.zeros_like(row["alive"])}

    def player(self, env_state: Tensor) -> Tensor:
        """Return the index of the player to move in a game in turn, ``[B]``."""
        assert isinstance(self.game, TurnGame)
        return self.game.player(env_state)

    def reward(self, batch: Batch) -> Tensor:
        return self.step(batch["env_state"], batch["action"])["reward"]

    def terminated(self, batch: Batch) -> Tensor:
        return ~self.game.row(batch["next_env_state"])["alive"]

    def minimax(self) -> Minimax | None:
        """Return exact values and best moves of every state; None if there are too many."""
        if isinstance(self.game, LineGame) and self.game.height * self.game.width <= MOST_CELLS:
            return Minimax(self.game)
        return None

    def exploitability(self, policies: Sequence[Policy]) -> float | None:
        """Return ``Game.exploitability``."""
        return self.game.exploitability(policies)
