"""AlphaZero: targets and ranked rewards by hand, and a search that knows the truth and never loses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug import testing
from rlplug.api import Job, Segment
from rlplug.config import compose
from rlplug.context import EnvShard
from rlplug.plugins.algo.alphazero import AlphaZero
from rlplug.run.build import build
from rlplug.types import ConfigError
from tests.plugins.acting import learner_of

FAST = ("hardware=cpu", "logger.only=[]", "model.hidden=[16]")


def made(env: str, cls: type[AlphaZero] = AlphaZero, n: int = 1, **options) -> AlphaZero:
    ctx = testing.context(overrides=["algo=alphazero", f"env={env}", "model.hidden=[16]"], num_envs=n)
    cfg = testing.config("algo/alphazero", **options)
    ctx.needs = cls.needs(cfg, ctx.spec)
    return cls(cfg, ctx)


class Exact(AlphaZero):
    """Evaluates nodes by the outcome of perfect play, with equal priors."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.solved = self.model.minimax()

    def _node(self, net, row, state, terminated=False, over=False):
        node = super()._node(net, row, state, terminated, over)
        exact = self.solved.value(row["env_state"]) * node["sign"]
        legal = node["legal"].float()
        value = torch.where(torch.as_tensor(terminated), 0.0, exact)
        return node | {"value": value, "prior": legal / legal.sum(-1, keepdim=True)}


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("who", [0, 1])
def test_an_exact_search_never_loses_at_tic_tac_toe(who, seat, reuse):
    n = 50
    algorithm = made("tictactoe", Exact, n, opponents=["minimax", "random"], num_simulations=30, reuse_tree=reuse)
    env = compose(["env=tictactoe"]).env.build(algorithm.ctx)
    row, carry, paid = env.reset(range(n)), algorithm.initial_carry(n), torch.zeros(n)
    algorithm.opponent[:] = torch.tensor([who, seat])
    first = torch.ones(n, dtype=torch.bool)
    with torch.inference_mode(), algorithm.ctx.acting(EnvShard("eval", n, range(n))):
        for _ in range(9):
            step = {key: torch.from_numpy(x) for key, x in row.items()} | {"is_first": first}
            out, carry = algorithm.act(step, carry, "greedy")
            playing = step["alive"].any(-1)
            row = env.step(out["action"].numpy())  # raises if a move is not legal
            paid += torch.where(playing, torch.from_numpy(row["reward"][:, seat]), 0.0)
            first = ~playing
    assert (paid >= 0).all()
    if who == 1:
        assert (paid > 0).float().mean() > 0.7  # a random player loses


def test_two_players_are_paid_what_the_game_pays_each():
    """First wins with three moves of its own: +1 where it moves, -1 where the second does; discounted backwards."""
    algorithm = made("tictactoe", gamma=0.5)
    moves, board = [0, 3, 1, 4, 2], torch.zeros(1, 9, dtype=torch.int8)
    rows = []
    for t, move in enumerate([*moves, 0]):
        row = {key: x for key, x in algorithm.model.game.row(board).items() if key != "alive"}
        after = algorithm.model.step(board, torch.tensor([[move, move]]))
        last = t == len(moves) - 1
        rows.append(row | {"policy": torch.full((1, 9), 1 / 9), "valid": torch.tensor([t < len(moves)])})
        rows[-1] |= {key: after[key] for key in ("reward", "terminated", "truncated")}
        assert bool(after["terminated"].all()) == (t >= len(moves) - 1)
        assert not last or after["reward"].tolist() == [[1.0, -1.0]]
        board = after["env_state"]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        prepared = algorithm.prepare(batch)
    expected = torch.tensor([0.5**4, -(0.5**3), 0.5**2, -0.5, 1.0])
    torch.testing.assert_close(prepared["returns"][:-1, 0], expected)
    own = batch["obs"][torch.arange(5), 0, torch.tensor([0, 1, 0, 1, 0])]
    assert torch.equal(prepared["obs"][:5, 0], own)  # of the player to move
    assert prepared["action_mask"][:5, 0].sum(-1).tolist() == [9, 8, 7, 6, 5]


def test_a_truncated_episode_bootstraps_from_the_network():
    algorithm = made("cartpole_torch", value_scale=10.0, gamma=0.9)
    t, obs = 3, torch.randn(3, 1, 4)
    no = torch.zeros(t, 1, dtype=torch.bool)
    batch = {
        "obs": obs,
        "env_state": torch.zeros(t, 1, 6, dtype=torch.float64),
        "policy": torch.full((t, 1, 2), 0.5),
        "reward": torch.tensor([[1.0], [2.0], [9.0]]),
        "terminated": no,
        "truncated": torch.tensor([[False], [True], [False]]),
        "valid": torch.tensor([[True], [True], [False]]),
    }
    with torch.no_grad():
        prepared = algorithm.prepare(batch)
        value = algorithm.net.values({"obs": obs[2]}, {}) * 10.0
    expected = torch.cat([1.0 + 0.9 * (2.0 + 0.9 * value), 2.0 + 0.9 * value]) / 10.0
    torch.testing.assert_close(prepared["returns"][:2, 0], expected)


R2 = {"ranked_rewards": True, "num_returns": 4, "percentile": 0.75}


def segment(rewards: list[list[float]], ends: list[list[int]], final_before: list[bool]) -> Segment:
    reward = torch.tensor([*rewards, [0.0] * len(rewards[0])])
    over = torch.tensor([*ends, [0] * len(rewards[0])]).bool()
    final = torch.cat((torch.tensor([final_before]), over[:-1]))
    first = torch.cat((torch.zeros_like(over[:1]), final[:-1]))
    batch = {"reward": reward, "terminated": over, "truncated": over & False, "valid": ~final, "is_first": first}
    return Segment(batch)


def test_ranked_rewards_by_hand():
    algorithm = made("knapsack", n=2, **R2)
    assert algorithm.ranked(torch.tensor([-5.0]).double(), 0.0).tolist() == [1.0]  # nothing to beat yet
    # column 0: an episode of 1 + 2, its final row, then 4 ...; column 1: an episode of 1, then one of 2 + 5
    algorithm.observe(
        segment([[1, 1], [2, 0], [0, 2], [4, 5]], [[0, 1], [1, 0], [0, 0], [0, 1]], [False, False]),
        learner_of(algorithm),
    )
    assert algorithm.ranked.scores[:3].tolist() == [1.0, 3.0, 7.0]
    assert float(algorithm.ranked.threshold) == 5.0  # the 0.75 quantile of 1, 3, 7
    # ... which goes on: 4 + 2, while column 1 ends with 9: the fifth return replaces the first
    algorithm.observe(segment([[2, 0], [0, 9]], [[1, 0], [0, 1]], [False, True]), learner_of(algorithm))
    assert algorithm.ranked.scores.tolist() == [9.0, 3.0, 7.0, 6.0]
    assert float(algorithm.ranked.threshold) == 7.5
    assert algorithm.ranked(torch.tensor([7.0, 7.5, 8.0]).double(), 0.0).tolist() == [-1.0, 0.0, 1.0]


def test_the_best_return_is_ranked_first_whatever_the_others_are():
    algorithm = made("knapsack", **R2, best_return=220.0)
    algorithm.ranked.threshold.fill_(220.0)
    assert algorithm.ranked(torch.tensor([180.0, 220.0]).double(), -1.0).tolist() == [-1.0, 1.0]


def test_ranked_rewards_are_the_targets_and_the_rewards_of_the_search():
    algorithm = made("knapsack", **R2, num_simulations=20)
    algorithm.ranked.threshold.fill_(200.0)
    row = algorithm.model.env.reset([0])
    step = row | {"is_first": torch.tensor([True]), "prev_reward": torch.zeros(1)}
    with torch.inference_mode():
        carry = algorithm._counted(step, algorithm.initial_carry(1))
        trees = algorithm._search(step, carry, noisy=False)
    used = int(trees.size)
    ends = trees.over[0, :used]
    scores, paid = trees.state["score"][0, :used], trees.reward[0, :used]
    assert {float(x) for x in scores[ends]} == {160.0, 180.0, 220.0}
    assert torch.equal(paid[ends], torch.where(scores[ends] > 200.0, 1.0, -1.0))
    assert not paid[~ends].any()
    assert not trees.value[0, :used][ends].any()


@pytest.mark.parametrize(
    "words", [("env=knapsack", "env.values=null", "env.weights=null", "env.capacity=null"), ("env=connect_four",)]
)
def test_illegal_moves_are_never_played(words):
    more = ("num_envs=8", "algo.num_simulations=6", "train_batch_size=4", "algo.temperature=5")
    with closing(build(compose(["algo=alphazero", *words, *FAST, *more]), Path())) as trainer:
        jobs = [Job(i, episodes=10, mode=mode) for i, mode in enumerate(("random", "explore", "greedy"))]
        for _, batch in trainer.play(jobs):
            played = batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
            assert not batch["action_mask"][batch["valid"]].all()
            assert played[batch["valid"]].all()


def test_a_tree_is_reused():
    algorithm = made("knapsack", num_simulations=20, reuse_tree=True)
    env = algorithm.model.env
    step = env.reset([0]) | {"is_first": torch.tensor([True])}
    with torch.inference_mode():
        out, carry = algorithm.act(step, algorithm.initial_carry(1), "greedy")
        before = carry["tree"]["visits"].clone()
        step = dict(env.step(out["action"])) | {"is_first": torch.tensor([False])}
        _, after = algorithm.act(step, carry, "greedy")
        assert torch.equal(before, carry["tree"]["visits"])  # the carry of a row is not changed
        assert after["tree"]["visits"][0, 0].sum() > 20
        step["is_first"][:] = True
        _, after = algorithm.act(step, carry, "greedy")
        assert after["tree"]["visits"][0, 0].sum() == 20


def test_it_plays_against_the_network_of_some_updates_ago():
    words = ("env=tictactoe", "algo.opponents=[past]", "algo.past_every=2", "algo.num_simulations=4", "num_envs=4")
    more = ("train_batch_size=4", "rollout_fragment_length=8", "replay_ratio=0.03125", "eval.every=0")
    with closing(build(compose(["algo=alphazero", *words, *more, *FAST]), Path())) as trainer:
        algorithm, nets = trainer.algorithm, list[list[torch.Tensor]]()
        while trainer.progress.updates < 3:
            trainer.collect("explore")
            if trainer.ready():
                trainer.update()
                nets.append([p.detach().clone() for p in algorithm.net.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(algorithm.past.parameters(), nets[1], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(algorithm.past.parameters(), nets[2], strict=True))
        found = algorithm.evaluate(trainer.play, 20)
        rates = [found[f"eval/vs_past/{result}_rate"] for result in ("win", "draw", "loss")]
        assert sum(rates) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=knapsack", "algo.num_simulations=1_000_000_000"], "trees of .* nodes .* need .* GiB"),
        (["env=tictactoe", "algo.ranked_rewards=true"], "algo.ranked_rewards: ranks returns of one player"),
        (["env=connect_four", "algo.opponents=[minimax]"], "algo.opponents: has minimax"),
        (["env=knapsack", "algo.value_bounds=[1,0]"], "algo.value_bounds: give the smallest"),
        (["env=pendulum_torch"], "algo: alphazero needs one player"),
        (["env=knapsack", "preprocess.scale_reward=0.1"], "preprocess.scale_reward: changes the environment's rows"),
        (["env=knapsack", "exploration=[rnd]"], "exploration.rnd: rewards rows that the learner samples"),
    ],
)
def test_what_it_cannot_do_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        build(compose(["algo=alphazero", *words, *FAST]), Path())
