"""Games of two agents given by matrices of payoffs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from torch import Tensor

from rlplug.envs.games import Game
from rlplug.functional.best_response import Policy
from rlplug.types import Batch, EnvSpec, Group

CLIMBING = ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0))
"""both agents' payoff in the climbing game (Claus and Boutilier 1998)"""
PAIR = ("first", "second")
BEATS = {"rock": ("scissors", "lizard"), "paper": ("rock", "spock"), "scissors": ("paper", "lizard")}
BEATS |= {"lizard": ("paper", "spock"), "spock": ("rock", "scissors")}


def penalty(value: float) -> Sequence[Sequence[float]]:
    """Return both agents' payoff in the penalty game (Claus and Boutilier 1998); ``value`` is the penalty, below 0."""
    return (10.0, 0.0, value), (0.0, 2.0, 0.0), (value, 0.0, 10.0)


def rock_paper_scissors(variant: str) -> np.ndarray:
    """Return the first player's payoff ``[A, A]``; the second player's is its negative.

    ``standard``: its equilibrium is uniform. ``weighted``: paper wins 1, scissors 2 and rock 3, and the equilibrium
    plays them with probabilities 1/2, 1/6 and 1/3. ``lizard_spock``: five actions, each of which beats two.
    """
    moves = [*BEATS][: 5 if variant == "lizard_spock" else 3]
    wins = np.array([[float(other in BEATS[one]) for other in moves] for one in moves])
    if variant == "weighted":
        wins *= np.array([[3.0], [1.0], [2.0]])
    return wins - wins.T


def best_response(payoff: np.ndarray, strategy: np.ndarray) -> tuple[int, float]:
    """Return a player's best action against the other's ``strategy [A]``, and its expected payoff.

    Args:
        payoff: of the player, ``[A, A]``, indexed by its own action and the other's.
    """
    values = payoff @ strategy
    return int(values.argmax()), float(values.max())


def exploitability(payoff: np.ndarray, strategy: np.ndarray) -> float:
    """Return the mean over players of what a best response gains where both play ``strategy [A]``; 0: equilibrium.

    It is half of NashConv (Lanctot et al. 2017, arXiv:1711.00832, section 2).

    Args:
        payoff: of each agent, ``[2, A, A]``, indexed by the actions of the first and the second.
    """
    own = payoff[0], payoff[1].T  # indexed by the player's own action and the other's
    return float(np.mean([best_response(of, strategy)[1] - strategy @ of @ strategy for of in own]))


class MatrixGame(Game):
    """Both agents act at once and get their rewards from matrices, ``rounds`` times. They observe the constant 1.

    A state is the number of played rounds, ``[B]`` int64, which they do not know.

    Args:
        payoff: of each agent, ``[2, A, A]``, indexed by the actions of the first and the second.
    """

    hides = True

    def __init__(self, payoff: np.ndarray, rounds: int, device: torch.device | None = None) -> None:
        one = Box(0.0, 1.0, (1,), np.float32)
        self.rounds, self.payoff = rounds, torch.tensor(payoff, dtype=torch.float32, device=device)
        team = Group(one, Discrete(payoff.shape[1]), PAIR)
        self.spec = EnvSpec({"players": team}, {"state": one}, rounds)

    def initial(self, noise: Tensor) -> Tensor:
        return torch.zeros(len(noise), dtype=torch.int64, device=noise.device)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Batch]:
        going = (state < self.rounds)[:, None]
        reward = self.payoff[:, action[:, 0], action[:, 1]].T
        after = (state + 1).clamp(max=self.rounds)
        ends = going & (after == self.rounds)[:, None]
        return after, {"reward": torch.where(going, reward, 0.0), "terminated": ends.repeat(1, 2)}

    def row(self, state: Tensor) -> Batch:
        ones = torch.ones(len(state), 2, 1, device=state.device)
        return {"obs": ones, "alive": (state < self.rounds)[:, None].repeat(1, 2), "state": ones[:, 0]}

    def exploitability(self, policies: Sequence[Policy]) -> float:
        """Return the mean over players of what a best response gains in all rounds; see ``Game.exploitability``.

        Players cannot tell rounds apart, so a best response plays the same action in all.
        """
        one = self.payoff.new_ones(1, 1)
        actions = torch.ones(1, self.payoff.shape[1], dtype=torch.bool, device=one.device)
        strategies = torch.cat([policy(one, actions) for policy in policies]).double()
        return self.rounds * exploitability(self.payoff.cpu().numpy(), strategies.mean(0).cpu().numpy())


class TwoStepGame(Game):
    """The two-step game of Rashid et al. 2018 (arXiv:1803.11485, appendix A).

    The first agent's action leads to state 2A, which pays both agents 7 for any actions, or 2B, which pays
    ``[[0, 1], [1, 8]]``. A state is 0, 1 (2A), 2 (2B) or 3 (ended), ``[B]`` int64; both agents observe it, one-hot.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        space: Space[Any] = Box(0.0, 1.0, (3,), np.float32)
        self.spec = EnvSpec({"team": Group(space, Discrete(2), PAIR)}, {"state": space}, 2)
        zero = [[0.0, 0.0], [0.0, 0.0]]
        self.payoff = torch.tensor([zero, [[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]], zero], device=device)

    def initial(self, noise: Tensor) -> Tensor:
        return torch.zeros(len(noise), dtype=torch.int64, device=noise.device)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Batch]:
        reward = self.payoff[state, action[:, 0], action[:, 1]]
        after = torch.where(state == 0, 1 + action[:, 0], 3)
        ends = (state == 1) | (state == 2)
        return after, {"reward": reward[:, None].repeat(1, 2), "terminated": ends[:, None].repeat(1, 2)}

    def row(self, state: Tensor) -> Batch:
        shown = (state[:, None] == torch.arange(3, device=state.device)).float()
        alive = (state < 3)[:, None].repeat(1, 2)
        return {"obs": shown[:, None].repeat(1, 2, 1), "alive": alive, "state": shown}
