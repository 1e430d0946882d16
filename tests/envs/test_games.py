"""Rules of the small games, against hand-computed values, PettingZoo and OpenSpiel."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pyspiel
import pytest
import torch
from open_spiel.python import policy as openspiel_policy
from open_spiel.python.algorithms.exploitability import nash_conv
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
    both = np.stack([payoff, -payoff])
    assert exploitability(both, np.array(equilibrium)) == pytest.approx(0.0, abs=1e-12)
    rock = np.eye(len(payoff))[0]
    assert best_response(payoff, rock)[0] in (1, 4)  # paper, or spock
    assert exploitability(both, rock) == (payoff @ rock).max() > 0


def always(*chances):
    """Return a policy that plays the legal actions in proportion to ``chances``."""

    def policy(obs, legal):
        weights = torch.tensor(chances) * (legal | ~legal.any(1, keepdim=True))
        return weights / weights.sum(1, keepdim=True)

    return policy


@pytest.mark.parametrize(
    ("variant", "policies", "gain"),
    [
        ("standard", [(1.0, 1.0, 1.0)], 0.0),
        ("standard", [(1.0, 0.0, 0.0)], 1.0),  # paper
        ("standard", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)], 0.0),  # one of them is drawn
        ("weighted", [(1.0, 0.0, 0.0)], 1.0),  # paper wins 1
        ("weighted", [(0.0, 0.0, 1.0)], 3.0),  # rock wins 3
        ("weighted", [(1.0, 1.0, 1.0)], 2 / 3),  # rock: 3 or -1
        ("weighted", [(2.0, 3.0, 1.0)], 0.0),
    ],
)
def test_a_best_response_gains_what_a_policy_of_a_matrix_game_gives_away(variant, policies, gain):
    model = kit.make("rock_paper_scissors", variant=variant, rounds=4).traits.simulator()
    assert model.exploitability([always(*one) for one in policies]) == pytest.approx(4 * gain, abs=1e-6)


def test_a_gain_is_relative_to_what_the_policies_pay():
    model = kit.make("climbing", rounds=1).traits.simulator()  # both are paid the same
    gains = [model.exploitability([always(*one)]) for one in np.eye(3).tolist()]
    assert gains == [0.0, 0.0, 0.5]  # nothing is better than 11 and 7; instead of 5, the first agent can get 6


def test_a_simulator_of_a_matrix_game_is_that_game():
    env = kit.make("rock_paper_scissors", variant="weighted", rounds=2)
    model, state = env.traits.simulator(), torch.tensor([0, 1, 2])
    assert model.hides
    assert "env_state" not in env.spec.extras
    row = model.step(state, torch.tensor([[0, 2]] * 3))
    assert row["env_state"].tolist() == [1, 2, 2]
    assert row["reward"].tolist() == [[3.0, -3.0], [3.0, -3.0], [0.0, 0.0]]
    assert row["terminated"].tolist() == [[False] * 2, [True] * 2, [True] * 2]


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


def kuhn_policy(bets):
    """Return the policy that bets with the probabilities ``bets[moves so far][card]``."""

    def policy(obs, legal):
        card, moves = obs[:, 2:5].argmax(1).tolist(), obs[:, 5:].view(-1, 3, 2)
        played = ["".join("pb"[one.argmax()] for one in row if one.any()) for row in moves]
        bet = [bets[before][one] if before in bets else 0.0 for one, before in zip(card, played, strict=True)]
        return torch.stack([1 - torch.tensor(bet), torch.tensor(bet)], 1)

    return policy


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_the_equilibria_of_kuhn_poker_are_not_exploitable(alpha):
    """Those of Kuhn 1950; the first player loses 1/18."""
    bets = {"": (alpha, 0.0, 3 * alpha), "pb": (0.0, alpha + 1 / 3, 1.0)}
    bets |= {"p": (1 / 3, 0.0, 1.0), "b": (0.0, 1 / 3, 1.0)}
    game = KuhnPoker()
    assert game.best_responses([kuhn_policy(bets)]).tolist() == pytest.approx([-1 / 18, 1 / 18], abs=1e-7)
    assert game.exploitability([kuhn_policy(bets)]) == pytest.approx(0.0, abs=1e-7)


def test_best_responses_of_kuhn_poker_by_hand():
    game = KuhnPoker()
    assert game.best_responses([always(1.0, 0.0)]).tolist() == pytest.approx([1, 1])  # a bet takes the ante
    # whoever always bets is paid 1 by a jack that folds, and loses 2 to a king; a queen may call or fold
    assert game.best_responses([always(0.0, 1.0)]).tolist() == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize("copies", [1, 3])
def test_nash_conv_of_kuhn_poker_is_that_of_openspiel(copies):
    """Also of a policy that is drawn before the game, whose equal in behavior is what OpenSpiel measures."""
    theirs = pyspiel.load_game("kuhn_poker")
    table = openspiel_policy.TabularPolicy(theirs)
    seen = [(state.history(), state.information_state_tensor(state.current_player())) for state in table.states]
    rng = np.random.default_rng(0)
    chances = {tuple(obs): rng.dirichlet([1, 1], copies) for _, obs in seen}

    def policy(copy):
        ended = np.zeros((copies, 2))
        return lambda obs, _: torch.tensor(np.array([chances.get(tuple(one), ended)[copy] for one in obs.tolist()]))

    for i, (history, obs) in enumerate(seen):
        own, weight = chances[tuple(obs)], np.ones(copies)
        if len(history) == 4:  # the first player has passed before
            weight = next(chances[tuple(o)][:, 0] for h, o in seen if len(h) == 2 and h[0] == history[0])
        table.action_probability_array[i] = (weight[:, None] * own).sum(0) / weight.sum()
    found = KuhnPoker().exploitability([policy(copy) for copy in range(copies)])
    assert 2 * found == pytest.approx(nash_conv(theirs, table))


def perfect_player(obs, legal):
    """Return equal probabilities of the moves of tic-tac-toe that keep the value."""
    own, other = obs.flatten(2).unbind(1)
    sign = 1 - 2 * ((own + other).sum(1, keepdim=True) % 2)
    best = Minimax(tic_tac_toe()).best(((own - other) * sign).to(torch.int8))
    return best / best.sum(1, keepdim=True).clamp(min=1)


def first_free(obs, legal):
    return torch.nn.functional.one_hot(legal.float().argmax(1), 9)


LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@functools.cache
def paid_by_random_moves(seat, board="." * 9):
    """Return what a best response in a seat is paid in tic-tac-toe, by recursion over boards."""
    mover = (9 - board.count(".")) % 2
    if any(board[a] == board[b] == board[c] != "." for a, b, c in LINES):
        return -1.0 if mover == seat else 1.0
    after = [board[:a] + "XO"[mover] + board[a + 1 :] for a in range(9) if board[a] == "."]
    paid = [paid_by_random_moves(seat, each) for each in after]
    return 0.0 if not paid else max(paid) if mover == seat else sum(paid) / len(paid)


def test_best_responses_of_tic_tac_toe_are_exact():
    game = tic_tac_toe()
    assert game.exploitability([perfect_player]) == pytest.approx(0.0, abs=1e-7)
    assert game.best_responses([first_free]).tolist() == [1.0, 1.0]
    uniform = always(*[1.0] * 9)
    expected = [paid_by_random_moves(seat) for seat in range(2)]
    assert game.best_responses([uniform]).tolist() == pytest.approx(expected, abs=1e-6)
    # of two policies, the one that is drawn before the game is not known
    mixed, each = game.exploitability([uniform, perfect_player]), [game.exploitability([uniform]), 0.0]
    assert 0.0 < mixed < sum(each) / 2


def test_too_large_a_game_has_no_exact_exploitability():
    assert connect_four().exploitability([always(*[1.0] * 7)]) is None


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
