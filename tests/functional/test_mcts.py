"""The batched search against a recursive one in plain Python, in double precision, and values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlplug.functional import mcts

ACTIONS, DEPTH = 3, 4


class World:
    """A random tree of states of a few levels; some actions are forbidden, some states end early."""

    def __init__(self, seed: int, players: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        n = sum(ACTIONS**d for d in range(DEPTH + 1))
        self.first_leaf = n - ACTIONS**DEPTH
        self.reward = torch.randn(n, generator=draw, dtype=torch.float64)
        self.value = torch.randn(n, generator=draw, dtype=torch.float64)
        self.legal = torch.rand(n, ACTIONS, generator=draw) > 0.3
        self.legal[torch.arange(n), torch.randint(ACTIONS, (n,), generator=draw)] = True
        prior = torch.rand(n, ACTIONS, generator=draw, dtype=torch.float64) * self.legal
        self.prior = prior / prior.sum(-1, keepdim=True)
        self.over = torch.rand(n, generator=draw) < 0.15
        self.over[0], self.over[self.first_leaf :] = False, True
        self.value[self.over & (torch.arange(n) % 2 == 0)] = 0.0  # terminated; the others are truncated
        level = torch.tensor([math.floor(math.log(i * (ACTIONS - 1) + 1.5, ACTIONS)) for i in range(n)])
        self.sign = (1.0 - 2.0 * (level % 2) if players == 2 else torch.ones(n)).double()

    def node(self, at: torch.Tensor) -> dict:
        found = {key: getattr(self, key)[at] for key in ("prior", "legal", "value", "sign", "over", "reward")}
        return found | {"state": at}

    def expand(self, state: torch.Tensor, action: torch.Tensor) -> dict:
        assert self.legal[state, action].all()
        assert not self.over[state].any()
        return self.node(state * ACTIONS + action + 1)


class Node:
    def __init__(self, world: World, at: int) -> None:
        self.at, self.children = at, {}
        self.visits, self.total = [0] * ACTIONS, [0.0] * ACTIONS


def reference(world: World, simulations: int, c: float, gamma: float, bounds) -> Node:
    root, span = Node(world, 0), list(bounds or (math.inf, -math.inf))

    def normalized(q: float, sign: float) -> float:
        x = min(1.0, max(0.0, (q - span[0]) / (span[1] - span[0]))) if span[1] > span[0] else 0.5
        return 1.0 - x if sign < 0 else x

    def run(node: Node) -> float:
        if world.over[node.at]:
            return float(world.value[node.at])
        count = sum(node.visits)
        mean = (sum(node.total) + float(world.value[node.at])) / (count + 1)
        scores = []
        for a in range(ACTIONS):
            q = node.total[a] / node.visits[a] if node.visits[a] else mean
            u = c * float(world.prior[node.at, a]) * math.sqrt(max(count, 1)) / (1 + node.visits[a])
            legal = bool(world.legal[node.at, a])
            scores.append(normalized(q, float(world.sign[node.at])) + u if legal else -math.inf)
        a = scores.index(max(scores))
        after = node.at * ACTIONS + a + 1
        if a in node.children:
            ret = run(node.children[a])
        else:
            node.children[a] = Node(world, after)
            ret = float(world.value[after])
        ret = float(world.reward[after]) + gamma * ret
        node.visits[a] += 1
        node.total[a] += ret
        if bounds is None:
            mean = node.total[a] / node.visits[a]
            span[0], span[1] = min(span[0], mean), max(span[1], mean)
        return ret

    for _ in range(simulations):
        run(root)
    return root


@pytest.mark.parametrize("players", [1, 2])
@pytest.mark.parametrize("bounds", [None, (-4.0, 4.0)])
def test_it_equals_a_recursive_search(players, bounds):
    worlds = [World(seed, players) for seed in range(4)]

    def expand(state, action):
        parts = [world.expand(state[i : i + 1], action[i : i + 1]) for i, world in enumerate(worlds)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    first = [world.node(torch.tensor([0])) for world in worlds]
    trees = mcts.plant({key: torch.cat([one[key] for one in first]) for key in first[0]}, 60, bounds)
    mcts.simulate(trees, expand, 59, 1.25, 0.9, fixed=bounds is not None)

    def same(trees, column, place, node) -> int:
        assert trees.visits[column, place].tolist() == node.visits
        torch.testing.assert_close(trees.total[column, place], torch.tensor(node.total, dtype=torch.float64))
        return 1 + sum(same(trees, column, int(trees.child[column, place, a]), kid) for a, kid in node.children.items())

    for column, world in enumerate(worlds):
        root = reference(world, 59, 1.25, 0.9, bounds)
        assert sum(root.visits) == 59
        assert same(trees, column, 0, root) == int(trees.size[column]) > 10

    # what is below a child is kept, and a column without such a child starts again
    chosen = trees.visits[:, 0].argmax(-1)
    roots = trees.child[torch.arange(4), 0, chosen].clone()
    roots[3] = 0
    mcts.transplant(trees, roots, 60)
    for column, world in enumerate(worlds[:3]):
        node = reference(world, 59, 1.25, 0.9, bounds).children[int(chosen[column])]
        assert same(trees, column, 0, node) == int(trees.size[column])
        assert int(trees.state[column, 0]) == node.at
    assert int(trees.size[3]) == 1
    assert not trees.visits[3].any()


def test_nodes_beyond_the_room_are_dropped_from_a_reused_tree():
    world = World(1, 1)
    trees = mcts.plant(world.node(torch.tensor([0])), 60)
    mcts.simulate(trees, world.expand, 59, 1.25, 1.0)
    child = trees.child[:, 0].gather(1, trees.visits[:, 0].argmax(-1, keepdim=True)).squeeze(1)
    visits = trees.visits[0, child].clone()
    mcts.transplant(trees, child, 5)
    assert int(trees.size) == 5
    assert int(trees.child.max()) < 5
    torch.testing.assert_close(trees.visits[:1, 0], visits)
    mcts.simulate(trees, world.expand, 20, 1.25, 1.0)
    assert int(trees.size) > 5


def test_scores_by_hand():
    """Q + c P sqrt(4) / (1 + N): 0.5 + 1.25 * 0.5 * 2 / 3, 0.8 + 1.25 * 0.3 * 2 / 2, 1.25 * 0.2 * 2 / 2."""
    root = {
        "state": torch.zeros(1),
        "prior": torch.tensor([[0.5, 0.3, 0.2]]),
        "legal": torch.ones(1, 3, dtype=torch.bool),
        "value": torch.zeros(1),
        "sign": torch.ones(1),
        "over": torch.zeros(1, dtype=torch.bool),
    }
    trees = mcts.plant(root, 1, (0.0, 1.0))
    trees.visits[0, 0], trees.total[0, 0] = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 0.8, 0.0])
    score = mcts.puct(trees, torch.zeros(1, dtype=torch.long), 1.25)
    torch.testing.assert_close(score, torch.tensor([[0.91667, 1.175, 0.25]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("alpha", [0.03, 0.3, 2.0])
def test_dirichlet_noise_has_the_right_moments(alpha):
    draw, n, k = torch.Generator().manual_seed(0), 40_000, 4
    noise = mcts.log_gamma_noise(
        alpha,
        torch.randn(n, k, 6, generator=draw, dtype=torch.float64),
        torch.rand(n, k, 6, generator=draw, dtype=torch.float64),
        torch.rand(n, k, generator=draw, dtype=torch.float64),
    ).softmax(-1)
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    torch.testing.assert_close(noise.mean(0), torch.full((k,), 1 / k, dtype=torch.float64), atol=0.01, rtol=0)
    torch.testing.assert_close(noise.var(0), torch.full((k,), variance, dtype=torch.float64), atol=0.004, rtol=0)


def test_bytes_are_those_of_the_tree():
    world = World(0, 1)
    one = world.node(torch.tensor([0, 0]))
    one = {key: x.float() if x.is_floating_point() else x for key, x in one.items()}
    trees = mcts.plant(one, 9)
    held = sum(x.nbytes for key, x in trees.nodes().items())
    assert mcts.nbytes(2, 10, ACTIONS, 8) == held
