"""Rules of the small games, against hand-computed values, PettingZoo and OpenSpiel."""

from __future__ import annotations

import itertools

import numpy as np
import pyspiel
import pytest
import torch
from pettingzoo.classic import connect_four_v3, tictactoe_v3

from rlplug import tree
from rlplug.envs.games import GameSimulator, KuhnPoker, Minimax, connect_four, tic_tac_toe
from rlplug.envs.matrix_games import (
    CLIMBING,
    MatrixGame,
    TwoStepGame,
    best_response,
    exploitability,
    rock_paper_scissors,
)
from rlplug.plugins.env.teams import Carts, Pursuit, SimpleSpread
from rlplug.testing.checks import envs as kit
from rlplug.types import RunError

NONE = torch.empty(1, 0)


def returns_of(name, actions, **changes):
    """Return the sums of rewards ``[N]`` of an episode of equal columns, and the number of its steps."""
    env, steps = kit.make(name, **changes), 0
    row, total = env.reset([0] * kit.COLUMNS), 0.0
    for action in actions:
        assert row["alive"].all()
        row = env.step(np.tile(np.array(action), (kit.COLUMNS, 1)))
        total, steps = total + row["reward"][0], steps + 1
        if not row["alive"].any():
            break
    assert row["terminated"].all()
    return total.tolist(), steps


@pytest.mark.parametrize(
    ("actions", "value"), [([(0, 0), (1, 0)], 7), ([(1, 0), (1, 1)], 8), ([(1, 1), (0, 1)], 1), ([(1, 0), (0, 0)], 0)]
)
def test_two_step_pays_as_in_the_paper(actions, value):
    assert returns_of("two_step", actions) == ([value, value], 2)


def test_matrices_pay_both_or_the_opposite():
    every = list(itertools.product(range(3), repeat=2))
    assert returns_of("climbing", every, rounds=9)[0] == [11 - 60 + 7 + 6 + 5] * 2
    assert returns_of("penalty", every, rounds=9, penalty=-50.0)[0] == [20 + 2 - 100] * 2
    assert returns_of("rock_paper_scissors", [(0, 2)], variant="weighted") == ([3.0, -3.0], 1)
    assert returns_of("rock_paper_scissors", [(4, 1)], variant="lizard_spock")[0] == [
        -1.0,
        1.0,
    ]  # paper disproves spock


@pytest.mark.parametrize(
    ("variant", "equilibrium"),
    [("standard", [1 / 3] * 3), ("weighted", [1 / 3, 1 / 2, 1 / 6]), ("lizard_spock", [1 / 5] * 5)],
)
def test_only_the_equilibrium_is_not_exploitable(variant, equilibrium):
    payoff = rock_paper_scissors(variant)
    assert (payoff == -payoff.T).all()
    assert exploitability(payoff, np.array(equilibrium)) == pytest.approx(0.0, abs=1e-12)
    rock = np.eye(len(payoff))[0]
    assert best_response(payoff, rock)[0] in (1, 4)  # paper, or spock
    assert exploitability(payoff, rock) == (payoff @ rock).max() > 0


@pytest.mark.parametrize(("ours", "theirs"), [(tic_tac_toe(), tictactoe_v3), (connect_four(), connect_four_v3)])
def test_board_games_are_those_of_pettingzoo(ours, theirs):
    env, rng, outcomes = theirs.env(), np.random.default_rng(0), set()
    for _ in range(25):
        env.reset()
        board = ours.initial(NONE)
        while True:
            seen = env.observe(env.agent_selection)
            mask = np.array(seen["action_mask"], bool)
            mine = ours.row(board)
            turn = int(ours.player(board))
            assert (mine["action_mask"][0, turn].numpy() == mask).all()
            assert mine["action_mask"][0, 1 - turn].nonzero().flatten().tolist() == [0]
            planes = np.moveaxis(seen["observation"], -1, 0).reshape(2, -1)
            own = mine["obs"][0, turn].reshape(2, -1).numpy()
            assert (planes.sum(1) == own.sum(1)).all()
            if ours.falls:
                assert (planes == own).all()
            action = rng.choice(np.flatnonzero(mask))
            env.step(action)
            board, result = ours.move(board, torch.tensor([[action, action]]))
            rewards = [env.rewards[agent] for agent in env.possible_agents]
            assert result["reward"][0].tolist() == rewards
            assert bool(ours.over(board)) == env.terminations[env.possible_agents[0]]
            if ours.over(board):
                outcomes.add(rewards[0])
                break
    assert {1, -1} <= outcomes
    again, result = ours.move(board, torch.zeros(1, 2, dtype=torch.int64))
    assert (again == board).all()
    assert not result["reward"].any()
    assert not result["terminated"].any()


def test_kuhn_poker_is_that_of_openspiel():
    ours, theirs = KuhnPoker(), pyspiel.load_game("kuhn_poker")

    def visit(state, node) -> int:
        assert bool(ours.over(state)) == node.is_terminal()
        if node.is_terminal():
            assert float(ours.payoff(state)) == node.returns()[0]
            return 1
        assert int(ours.player(state)) == node.current_player()
        for player in range(2):
            assert node.information_state_tensor(player) == ours.observe(state)[0, player].tolist()
        return sum(visit(ours.play(state, torch.tensor([a])), node.child(a)) for a in node.legal_actions())

    leaves = 0
    for deal, (first, second) in enumerate(ours.DEALS):
        node = theirs.new_initial_state()
        node.apply_action(first)
        node.apply_action(second)
        leaves += visit(ours.initial(torch.tensor([[(deal + 0.5) / 6]])), node)
    assert leaves == 30


def test_perfect_play_of_tic_tac_toe_never_loses():
    game, generator = tic_tac_toe(), torch.Generator().manual_seed(0)
    perfect = Minimax(game)
    assert perfect.value(game.initial(NONE)) == 0
    assert perfect.best(game.initial(NONE)).all()  # every first move keeps the draw
    threat = torch.tensor([[1, 1, 0, 0, -1, 0, 0, 0, 0]], dtype=torch.int8)
    assert perfect.best(threat).nonzero()[:, 1].tolist() == [2]
    assert perfect.value(threat) == 0
    assert perfect.value(torch.tensor([[1, 1, 0, -1, -1, 0, 0, 0, 0]], dtype=torch.int8)) == 1
    for side in range(2):
        board = game.initial(torch.empty(200, 0))
        while not (over := game.over(board)).all():
            mine = (game.player(board) == side)[:, None]
            allowed = torch.where(mine, perfect.best(board), game.legal(board)) | over[:, None]
            board = game.play(board, torch.multinomial(allowed.float(), 1, generator=generator).squeeze(1))
        outcome = game.payoff(board) * (1 - 2 * side)
        assert (outcome >= 0).all()
        assert (outcome > 0).any()


@pytest.mark.parametrize("name", ["tictactoe", "connect_four"])
def test_a_planner_gets_the_transitions_of_the_environment(name):
    env = kit.make(name)
    (model,) = [env.traits.simulator()]
    assert isinstance(model, GameSimulator)
    rows = list(kit.walk(env, 3, 30))
    compared = 0
    for (before, _), (after, action) in itertools.pairwise(rows):
        going = before["alive"].any(1)
        whole = {"env_state": torch.from_numpy(before["env_state"][going]), "action": torch.from_numpy(action[going])}
        found = model.step(whole["env_state"], whole["action"])
        for key in ("obs", "alive", "action_mask", "env_state", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(found[key].numpy(), after[key][going], err_msg=key)
        np.testing.assert_array_equal(model.reward(whole).numpy(), after["reward"][going])
        compared += int(going.sum())
    assert compared > 50


def test_a_forbidden_action_ends_the_run():
    env = kit.make("tictactoe")
    env.reset([0, 1, 2])
    env.step(np.zeros((3, 2), np.int64))
    with pytest.raises(RunError, match=r"^environment 1: second takes action 0, which its mask forbids$"):
        env.step(np.array([[0, 1], [0, 0], [0, 1]]))


def test_hunters_catch_prey_on_its_cell_and_where_they_exchange_cells():
    game = Pursuit(hunters=2, prey=2, size=5)
    state = {
        "hunters": torch.tensor([[[0, 0], [4, 4]]]),
        "prey": torch.tensor([[[0, 1], [4, 2]]]),
        "alive": torch.ones(1, 2, dtype=torch.bool),
    }
    right, left, stay = 1, 2, 0
    action = {"hunters": torch.tensor([[right, stay]]), "prey": torch.tensor([[left, stay]])}
    state, result = game.move(state, action)  # exchanged
    assert result["prey"]["reward"].tolist() == [[-1.0, 0.0]]
    assert result["hunters"]["reward"].tolist() == [[1.0, 1.0]]
    assert not result["hunters"]["terminated"].any()
    assert game.row(state)["prey"]["alive"].tolist() == [[False, True]]
    action = {"hunters": torch.tensor([[stay, left]]), "prey": torch.tensor([[left, right]])}
    state, result = game.move(state, action)  # on its cell
    assert state["prey"].tolist() == [[[0, 0], [4, 3]]]  # a caught one stays
    assert result["prey"]["reward"].tolist() == [[0.0, -1.0]]
    assert result["hunters"]["terminated"].all()
    assert not game.row(state)["hunters"]["alive"].any()


GAMES = {
    "tic-tac-toe": (tic_tac_toe, 9),
    "connect four": (connect_four, 7),
    "kuhn": (KuhnPoker, 2),
    "two-step": (TwoStepGame, 2),
    "matrix": (lambda device: MatrixGame(np.array([CLIMBING, CLIMBING]), 3, device), 3),
    "carts": (lambda device: Carts(2), 2),
    "spread": (lambda device: SimpleSpread(3, 0.5, device), 5),
    "chase": (lambda device: Pursuit(2, 1, 7, device), 5),
}


@pytest.mark.parametrize("name", GAMES)
def test_a_game_computes_on_its_device(name):
    """On ``meta``, an operation with a tensor of the host raises, as on an accelerator; so does reading a value."""
    (make, actions), meta = GAMES[name], torch.device("meta")
    game = make(meta)
    state = game.initial(torch.rand(4, game.noise_size, device=meta, dtype=torch.float64))
    action = {name: torch.randint(actions, (4, len(of.agents)), device=meta) for name, of in game.spec.groups.items()}
    after, result = game.move(state, action if game.spec.nested else next(iter(action.values())))
    leaves = tree.leaves({"after": after, "result": result, "row": game.row(after)})
    assert {leaf.device.type for leaf in leaves} == {"meta"}


def test_carts_are_cartpoles_of_their_own():
    one, two = kit.make("cartpole_torch"), kit.make("two_carts", agents=1)
    actions = np.random.default_rng(0).integers(2, size=(60, kit.COLUMNS))
    rows = one.reset([5, 6, 7])["obs"].numpy(), two.reset([5, 6, 7])["obs"]
    np.testing.assert_array_equal(rows[0], rows[1][:, 0])
    for action in actions:
        left, right = one.step(torch.from_numpy(action)), two.step(action[:, None])
        for key in ("obs", "reward", "terminated"):
            np.testing.assert_array_equal(left[key].numpy(), right[key][:, 0])
