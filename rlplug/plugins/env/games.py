"""Small games of two agents: matrices of payoffs, and turn-based board and card games."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rlplug.api import Context
from rlplug.envs.game_env import GameEnv
from rlplug.envs.games import KuhnPoker, connect_four, tic_tac_toe
from rlplug.envs.matrix_games import CLIMBING, MatrixGame, TwoStepGame, penalty, rock_paper_scissors
from rlplug.settings import PositiveInt, option, settings


class TwoStep(GameEnv):
    """The two-step game: 8 needs a mixer of the agents' values that is not a sum, which reaches 7."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, TwoStepGame(ctx.device))


class Climbing(GameEnv):
    """The climbing game: 11 a round at best, but an agent that leaves the equilibrium costs both 30."""

    @settings
    class Config:
        rounds: PositiveInt = option("Rounds of an episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, MatrixGame(np.array([CLIMBING, CLIMBING]), cfg.rounds, ctx.device))


class Penalty(GameEnv):
    """The penalty game: two equilibria with 10 a round, and a penalty for agents that choose different ones."""

    @settings
    class Config:
        rounds: PositiveInt = option("Rounds of an episode.")
        penalty: Annotated[float, Field(le=0.0)] = option("Reward of agents that choose different equilibria.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        payoff = penalty(cfg.penalty)
        super().__init__(ctx, MatrixGame(np.array([payoff, payoff]), cfg.rounds, ctx.device))


class RockPaperScissors(GameEnv):
    """Rock-paper-scissors: zero-sum, without a pure equilibrium, so learning against the latest opponent cycles."""

    @settings
    class Config:
        variant: Literal["standard", "weighted", "lizard_spock"] = option(
            "weighted: paper wins 1, scissors 2, rock 3; lizard_spock: five actions."
        )
        rounds: PositiveInt = option("Rounds of an episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        payoff = rock_paper_scissors(cfg.variant)
        super().__init__(ctx, MatrixGame(np.array([payoff, -payoff]), cfg.rounds, ctx.device))


class TicTacToe(GameEnv):
    """Tic-tac-toe for two players in turn: 1 for the winner, -1 for the loser, 0 for both in a draw."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, tic_tac_toe(ctx.device))


class ConnectFour(GameEnv):
    """Connect Four for two players in turn: 1 for the winner, -1 for the loser, 0 for both in a draw."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, connect_four(ctx.device))


class Kuhn(GameEnv):
    """Kuhn poker for two players in turn. The first player loses 1/18 a game in the equilibrium."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, KuhnPoker(ctx.device))
