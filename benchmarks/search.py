"""Measure simulations of tree searches a second of one core: rlplug's, OpenSpiel's and mctx's.

    python benchmarks/search.py [--games 64] [--simulations 64] [--mctx <Python with mctx>]

One search from the start of tic-tac-toe and of Connect Four, by an untrained network of two hidden layers of 256 in
rlplug. OpenSpiel searches one game at a time, with such a network in PyTorch that evaluates one position at a time, as
its AlphaZero in Python does, and with an evaluator of equal priors and value 0, which measures the search only. mctx
searches all games at once with such a network, compiled by JAX, in a game without rules, in which a move adds a stone.
Seconds are CPU time; the lines are interleaved, and the best of five is taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlplug import testing
from rlplug.config import compose
from rlplug.context import EnvShard
from rlplug.nn import MLP
from rlplug.plugins.algo.alphazero import AlphaZero

RESULTS = Path(__file__).parent / "results" / "search.json"
GAMES = {"tictactoe": "tic_tac_toe", "connect_four": "connect_four"}
MCTX = """
import json, sys, time
import jax, jax.numpy as jnp, mctx
games, simulations, actions, cells = map(int, sys.argv[1:])
keys = jax.random.split(jax.random.PRNGKey(0), 4)
sizes = [2 * cells, 256, 256]
hidden = [jax.random.normal(k, (a, b)) / a**0.5 for k, a, b in zip(keys, sizes[:-1], sizes[1:])]
heads = jax.random.normal(keys[2], (256, actions)) / 16, jax.random.normal(keys[3], (256, 1)) / 16

def network(board):
    x = jnp.concatenate((board == 1, board == -1), -1).astype(jnp.float32)
    for w in hidden:
        x = jax.nn.relu(x @ w)
    return x @ heads[0], (x @ heads[1])[:, 0]

def step(params, key, action, board):
    stones = jnp.abs(board).sum(-1)
    board = board.at[jnp.arange(games), (action + actions * (stones // actions)) % cells].set(1 - 2 * (stones % 2))
    logits, value = network(board)
    zero = jnp.zeros(games)
    return mctx.RecurrentFnOutput(reward=zero, discount=zero - 1, prior_logits=logits, value=value), board

@jax.jit
def search(key):
    board = jnp.zeros((games, cells), jnp.int8)
    logits, value = network(board)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=board)
    return mctx.muzero_policy(None, key, root, step, simulations).action

search(keys[0]).block_until_ready()
best = 1e9
for i in range(5):
    began = time.process_time()
    search(jax.random.PRNGKey(i)).block_until_ready()
    best = min(best, time.process_time() - began)
print(json.dumps(games * simulations / best))
"""


def ours(env: str, games: int, simulations: int) -> Callable[[], float]:
    """Return a function that searches once from the start of ``games``, and returns simulations a second."""
    ctx = testing.context(overrides=["algo=alphazero", f"env={env}", "model=mlp256"], num_envs=games)
    cfg = testing.config("algo/alphazero", num_simulations=simulations)
    ctx.needs = AlphaZero.needs(cfg, ctx.spec)
    algorithm = AlphaZero(cfg, ctx)
    row = compose([f"env={env}"]).env.build(ctx).reset(range(games))
    step = {key: torch.as_tensor(x) for key, x in row.items()} | {"is_first": torch.ones(games, dtype=torch.bool)}

    def run() -> float:
        began = time.process_time()
        with torch.inference_mode(), ctx.acting(EnvShard("eval", games, range(games))):
            algorithm.act(step, algorithm.initial_carry(games), "greedy")
        return games * simulations / (time.process_time() - began)

    return run


def open_spiel(env: str, simulations: int, network: bool) -> Callable[[], float]:
    """Return the same for one game of OpenSpiel's search in Python, with a network or without."""
    import pyspiel
    from open_spiel.python.algorithms.mcts import Evaluator, MCTSBot, SearchNode

    class Flat(Evaluator):
        def evaluate(self, state: Any) -> np.ndarray:
            return np.zeros(2)

        def prior(self, state: Any) -> list[tuple[int, float]]:
            actions = state.legal_actions()
            return [(a, 1.0 / len(actions)) for a in actions]

    class Network(Flat):
        def __init__(self, inputs: int, actions: int) -> None:
            self.net = torch.nn.Sequential(MLP(inputs, [256, 256]), torch.nn.Linear(256, actions + 1))
            self.seen: dict[str, np.ndarray] = {}

        def output(self, state: Any) -> np.ndarray:
            if (key := str(state)) not in self.seen:
                with torch.inference_mode():
                    self.seen[key] = self.net(torch.tensor(state.observation_tensor()).unsqueeze(0))[0].numpy()
            return self.seen[key]

        def evaluate(self, state: Any) -> np.ndarray:
            value = float(self.output(state)[-1])
            return np.array([value, -value])

        def prior(self, state: Any) -> list[tuple[int, float]]:
            actions = state.legal_actions()
            p = np.exp(self.output(state)[actions])
            return [*zip(actions, p / p.sum(), strict=True)]

    game = pyspiel.load_game(GAMES[env])
    evaluator = Network(game.observation_tensor_size(), game.num_distinct_actions()) if network else Flat()
    bot = MCTSBot(game, 1.25, simulations, evaluator, child_selection_fn=SearchNode.puct_value)

    def run() -> float:
        if isinstance(evaluator, Network):
            evaluator.seen.clear()
        began = time.process_time()
        bot.mcts_search(game.new_initial_state())
        return simulations / (time.process_time() - began)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--simulations", type=int, default=64)
    parser.add_argument("--mctx", help="Python of an environment with mctx; without it, it is left out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for env, (actions, cells) in {"tictactoe": (9, 9), "connect_four": (7, 42)}.items():
        runs = {
            f"rlplug, {given.games} games": ours(env, given.games, given.simulations),
            "rlplug, 1 game": ours(env, 1, given.simulations),
            "OpenSpiel (Python), 1 game": open_spiel(env, given.simulations, network=True),
            "OpenSpiel (Python), 1 game, no network": open_spiel(env, given.simulations, network=False),
        }
        best = dict.fromkeys(runs, 0.0)
        for _ in range(5):
            for name, run in runs.items():
                best[name] = max(best[name], run())
        if given.mctx:
            words = [given.mctx, "-c", MCTX, *map(str, (given.games, given.simulations, actions, cells))]
            flags = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
            out = subprocess.run(words, check=True, capture_output=True, text=True, env=flags).stdout
            best[f"mctx, {given.games} games, no rules"] = json.loads(out)
        found[env] = {name: round(value) for name, value in best.items()}
        for name, value in found[env].items():
            print(f"{env:<14} {name:<40} {value:>10,} simulations/s")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
