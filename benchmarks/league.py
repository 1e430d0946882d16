"""Measure the exploitability of self-play and leagues in rock-paper-scissors, tic-tac-toe, Kuhn poker and Connect Four.

    python benchmarks/league.py [--steps 200000] [--variant weighted]
    python benchmarks/league.py --tictactoe 1,2,3
    python benchmarks/league.py --kuhn 1,2,3
    python benchmarks/league.py --connect_four 1,2,3

The exploitability of a strategy is what a best response gains against it; it is 0 at the equilibrium. The first line
writes ``docs/img/league.svg``. The second trains ``algo=league env=tictactoe`` with these seeds. Its greedy learner
then plays both seats against perfect play, which draws among its best moves, and against a best response, which
knows the learner's moves; both results are exact. The third trains ``algo=league env=kuhn``, and measures NashConv,
which is what both players together gain by best responses, twice the exploitability: of the newest copy, and of the
mean policy, which draws one of all copies for a game. The fourth trains ``algo=league env=connect_four``, and plays 100
games against random moves, and against an opponent that wins where it can with its next move. All are kept in
``benchmarks/results/league.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug import compose, load
from rlplug.agents import probabilities
from rlplug.envs.games import GameSimulator, KuhnPoker, Minimax, TurnGame, connect_four, tic_tac_toe
from rlplug.envs.matrix_games import exploitability, rock_paper_scissors
from rlplug.functional.opponents import opponent_of
from rlplug.results import plot
from rlplug.results.curves import Curve
from rlplug.run import launch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "league.json"
RUNS = {"self-play": ["algo.self_play=1"], "league": ["algo.self_play=0", "algo.opponents=uniform"]}
SETTINGS = ["algo=league", "env=rock_paper_scissors", "num_envs=64", "rollout_fragment_length=8", "algo.size=10000"]
SETTINGS += ["algo.every=5", "algo.algo.lr=1e-2", "algo.algo.entropy_coeff=0.3", "eval.every=0", "eval.episodes=1"]
SETTINGS += ["logger.only=[]", "compile=off", "hardware=cpu"]


def trained(words: list[str]) -> Any:
    """Train, and return the policies outside of the run."""
    with tempfile.TemporaryDirectory() as folder:
        launch.train(compose(words), Path(folder, "run"), tell=lambda line: None)
        return load(Path(folder, "run"))


def strategies(words: list[str]) -> np.ndarray:
    """Train, and return the probabilities of the actions of every copy, ``[copies, A]``."""
    team = trained([*SETTINGS, *words])
    one, actions = torch.ones(1, 1), torch.ones(1, int(team.spec.groups["players"].action.n), dtype=torch.bool)
    return np.array([probabilities(copy, one, actions)[0].tolist() for copy in team.algorithm.pool.members])


def moves(team: Any, game: TurnGame, state: Tensor, seat: int) -> Tensor:
    """Return the greedy actions ``[B]`` of the learner in a seat, in states in which it is that seat's turn."""
    mask = torch.ones(len(state), 2, game.num_actions, dtype=torch.bool)
    mask[:, seat] = game.legal(state) | game.over(state)[:, None]
    team.reset()
    action = team.act({"players": game.observe(state).numpy()}, action_mask={"players": mask.numpy()})["players"]
    return torch.from_numpy(action[:, seat])


def games(team: Any) -> dict[str, float]:
    """Return how often a greedy learner of tic-tac-toe loses by seat, and what it is paid against a best response."""
    game = tic_tac_toe()
    perfect, found = Minimax(game), dict[str, float]()
    best = game.best_responses([partial(probabilities, team.algorithm.learner, greedy=True)])
    assert best is not None

    def lost(seat: int) -> float:
        state, weight, total = game.initial(torch.empty(1, 0)), torch.ones(1, dtype=torch.float64), 0.0
        while len(state):
            mine = game.player(state) == seat
            chosen = torch.nn.functional.one_hot(moves(team, game, state, seat), 9).bool()
            every = torch.stack([game.play(state, torch.full((len(state),), a)) for a in range(9)], 1)
            played = torch.where(mine[:, None], chosen, perfect.best(state))
            share = (weight / played.sum(1))[:, None].expand(-1, 9)[played]
            state, over = every[played], game.over(every[played])
            total += share[over & (game.payoff(state) == 2 * seat - 1)].sum().item()
            state, weight = state[~over], share[~over]
        return total

    for seat, name in enumerate(("first", "second")):
        found |= {
            f"lost as {name}": lost(seat),
            f"against a best response as {name}": -best[1 - seat].item(),
        }
    return found


def wins(team: Any) -> dict[str, float]:
    """Return the fraction of 100 games of Connect Four, 50 in each seat, that a greedy learner wins."""
    game, generator, found = connect_four(), torch.Generator().manual_seed(0), dict[str, float]()
    for name in ("random", "one_ply"):
        best, won = opponent_of(name, GameSimulator(game), game.num_actions), 0.0
        for seat in (0, 1):
            state = game.initial(torch.empty(50, 0))
            while not (over := game.over(state)).all():
                other = best(state, game.legal(state) | over[:, None]).double().multinomial(1, generator=generator)
                mine = game.player(state) == seat
                state = game.play(state, torch.where(mine, moves(team, game, state, seat), other.squeeze(1)))
            won += (game.payoff(state) == 1 - 2 * seat).double().mean().item() / 2
        found[f"won against {name}"] = round(won, 2)
    return found


def nash_conv(team: Any) -> dict[str, float]:
    """Return NashConv of Kuhn poker, of the newest copy and of the mean of all copies."""
    game, copies = KuhnPoker(), [partial(probabilities, copy) for copy in team.algorithm.pool.members]
    found = {"newest": game.exploitability(copies[-1:]), "mean": game.exploitability(copies)}
    return {name: 2 * value for name, value in found.items() if value is not None}


PAIRS = {"tictactoe": games, "kuhn": nash_conv, "connect_four": wins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--variant", default="weighted")
    for env in PAIRS:
        parser.add_argument(f"--{env}", metavar="SEEDS", type=lambda text: [int(seed) for seed in text.split(",")])
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pairs = [(env, seed) for env in PAIRS for seed in getattr(given, env) or ()]
    for env, seed in pairs:
        words = ["algo=league", f"env={env}", f"seed={seed}", "logger.only=[]", "hardware=cpu"]
        found = PAIRS[env](trained(words))
        kept.setdefault(env, {})[f"seed {seed}"] = found
        print(f"{env}, seed {seed}: {found}", flush=True)
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
    if pairs:
        return
    first = rock_paper_scissors(given.variant)
    payoff, found, curves = np.stack([first, -first]), dict[str, Any](), list[Curve]()
    for name, words in RUNS.items():
        played = strategies([*words, f"total_steps={given.steps}", f"env.variant={given.variant}"])
        steps = np.arange(1, len(played) + 1) * 5 * 64 * 8 // 2
        means = played.cumsum(0) / np.arange(1, len(played) + 1)[:, None]
        for label, of in ((f"{name}, latest", played), (f"{name}, average", means)):
            values = np.array([exploitability(payoff, strategy) for strategy in of])
            found[label] = {"first": float(values[0]), "last quarter": float(values[-len(values) // 4 :].mean())}
            curves.append(Curve(label, steps, values[None]))
            print(f"{label:20} {found[label]}")
    figure = plot.draw(curves, "environment steps", "exploitability", f"rock-paper-scissors, {given.variant}", 5.0)
    plot.save(figure, [ROOT / "docs" / "img" / "league.svg"])
    kept["rock_paper_scissors"] = {"variant": given.variant, "steps": given.steps, "exploitability": found}
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
