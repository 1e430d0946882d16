"""Monte-Carlo tree search of many columns at once, with one batched expansion per simulation: Silver et al. 2017
(doi:10.1038/nature24270, "Mastering the game of Go without human knowledge"), section "Search algorithm", with rewards
along the way, discounts, and values normalized as in MuZero, Schrittwieser et al. 2020 (arXiv:1911.08265), equation 5.

Rewards and values are those of the first player; ``sign`` is 1 where it moves, and -1 where the second does. A problem
of one player has ``sign`` 1 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlplug import tree
from rlplug.types import Batch

Expand = Callable[[Any, Tensor], Batch]
"""(states, actions ``[B]``) -> the nodes after them: ``state``; ``prior [B, A]``, probabilities; ``legal [B, A]``;
``value [B]``, 0 after termination; ``reward [B]`` of the action; ``sign [B]``; ``over [B]``, no action follows"""


@dataclass
class SearchTree:
    """Nodes of every column, ``[B, N, ...]``; node 0 is the root, and parents precede their children.

    The last node is scratch memory.
    """

    state: Any
    prior: Tensor  # [B, N, A]
    legal: Tensor  # [B, N, A]
    value: Tensor  # [B, N], estimate of the node itself
    reward: Tensor  # [B, N], of the action that led to the node
    sign: Tensor  # [B, N]
    over: Tensor  # [B, N]
    parent: Tensor  # [B, N]
    action: Tensor  # [B, N], that led to the node
    child: Tensor  # [B, N, A], 0: none yet
    visits: Tensor  # [B, N, A]
    total: Tensor  # [B, N, A], sum of the returns of the visits
    size: Tensor  # [B], nodes so far
    low: Tensor  # [B], least and largest mean return of an action
    high: Tensor

    def nodes(self) -> dict[str, Any]:
        """Return the leaves that have an axis of nodes."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("size", "low", "high")}


def nbytes(columns: int, num_nodes: int, num_actions: int, state: int, itemsize: int = 4) -> int:
    """Return the bytes of the trees of ``columns`` with ``num_nodes`` each, of states of ``state`` bytes."""
    edges = num_actions * (3 * itemsize + 8 + 1)  # prior, visits, total; child; legal
    return columns * num_nodes * (edges + state + 3 * itemsize + 2 * 8 + 1)


def plant(root: Batch, num_nodes: int, bounds: Sequence[float] | None = None) -> SearchTree:
    """Return trees that only have a root.

    Args:
        root: the nodes, as ``Expand`` returns them.
        num_nodes: maximum nodes of a tree.
        bounds: smallest and largest return, by which values are normalized; None: those seen in a tree.
    """
    prior = root["prior"]
    (n, actions), space = prior.shape, num_nodes + 1

    def room(x: Tensor) -> Tensor:
        return torch.cat((x.unsqueeze(1), x.new_zeros(n, space - 1, *x.shape[1:])), 1)

    edges = prior.new_zeros(n, space, actions)
    number = torch.zeros(n, space, dtype=torch.long, device=prior.device)
    low, high = bounds or (torch.inf, -torch.inf)
    return SearchTree(
        state=tree.map(room, root["state"]),
        **{key: room(root[key]) for key in ("prior", "legal", "value", "sign", "over")},
        reward=prior.new_zeros(n, space),
        parent=number,
        action=number.clone(),
        child=edges.long(),
        visits=edges,
        total=edges.clone(),
        size=number[:, 0] + 1,
        low=prior.new_full((n,), low),
        high=prior.new_full((n,), high),
    )


def simulate(
    trees: SearchTree, expand: Expand, simulations: int, c_puct: float, gamma: float, fixed: bool = False
) -> None:
    """Run simulations in every tree, in place: each follows the best actions to a new or ended node and backs it up.

    Args:
        c_puct: weight of the prior.
        gamma: discount factor.
        fixed: the bounds of returns were given.
    """
    columns = torch.arange(len(trees.size), device=trees.size.device)
    for _ in range(simulations):
        node = torch.zeros_like(trees.size)
        while True:
            action = puct(trees, node, c_puct).argmax(-1)
            following = trees.child[columns, node, action]
            going = (following > 0) & ~trees.over[columns, following]
            if not going.any():
                break
            node = torch.where(going, following, node)
        new = following == 0
        found = expand(tree.take(trees.state, (columns, node)), action)
        slot = torch.where(new, trees.size, trees.over.shape[1] - 1)
        found |= {"parent": node, "action": action}
        for key, leaves in trees.nodes().items():
            if key in found:
                tree.put(leaves, (columns, slot), found[key])
        for leaves in (trees.visits, trees.total, trees.child):
            leaves[columns, slot] = 0
        trees.child[columns, node, action] = torch.where(new, slot, following)
        trees.size += new
        _back_up(trees, columns, torch.where(new, slot, following), gamma, fixed)


def _back_up(trees: SearchTree, columns: Tensor, node: Tensor, gamma: float, fixed: bool) -> None:
    """Add the return from ``node [B]`` on to every edge on the way to the root."""
    ret = trees.value[columns, node]
    while (below := node > 0).any():
        edge = columns, trees.parent[columns, node], trees.action[columns, node]
        ret = torch.where(below, trees.reward[columns, node] + gamma * ret, 0.0)
        trees.visits.index_put_(edge, below.to(ret.dtype), accumulate=True)
        trees.total.index_put_(edge, ret, accumulate=True)
        if not fixed:
            mean = trees.total[edge] / trees.visits[edge].clamp(min=1)
            trees.low = torch.where(below, torch.minimum(trees.low, mean), trees.low)
            trees.high = torch.where(below, torch.maximum(trees.high, mean), trees.high)
        node = torch.where(below, edge[1], node)


def puct(trees: SearchTree, node: Tensor, c_puct: float) -> Tensor:
    """Score the actions of ``node [B]``: ``[B, A]``, minus infinity for those that are not legal.

    ``Q(s, a) + c P(s, a) sqrt(sum_b N(s, b)) / (1 + N(s, a))``, with Q of the player to move, normalized to [0, 1]; an
    action that was not tried has the mean of its node.
    """
    columns = torch.arange(len(node), device=node.device)
    visits, total = trees.visits[columns, node], trees.total[columns, node]
    count = visits.sum(-1, keepdim=True)
    mean = (total.sum(-1, keepdim=True) + trees.value[columns, node].unsqueeze(-1)) / (count + 1)
    q = torch.where(visits > 0, total / visits.clamp(min=1), mean)
    low, span = trees.low.unsqueeze(-1), (trees.high - trees.low).unsqueeze(-1)
    q = torch.where(span > 0, (q - low) / span.clamp(min=1e-12), 0.5).clamp(0.0, 1.0)
    q = torch.where(trees.sign[columns, node].unsqueeze(-1) < 0, 1.0 - q, q)
    score = q + c_puct * trees.prior[columns, node] * count.clamp(min=1).sqrt() / (1 + visits)
    return torch.where(trees.legal[columns, node], score, -torch.inf)


def transplant(trees: SearchTree, root: Tensor, keep: int) -> None:
    """Make node ``root [B]`` of every tree its root, in place, and keep the nodes below it.

    Args:
        root: 0: drop the whole tree, except its root.
        keep: maximum number of nodes kept; later ones are dropped, but their visits still count in the others.
    """
    n, space = trees.over.shape
    columns = torch.arange(n, device=root.device)
    below = torch.zeros_like(trees.over)
    below[columns, root] = True
    for node in range(1, space - 1):
        below[:, node] |= below[columns, trees.parent[:, node]] & (node < trees.size) & (root > 0)
    place = below.long().cumsum(1) - 1
    kept = below & (place < keep)
    place = torch.where(kept, place, 0)
    source = (~kept).long().sort(dim=1, stable=True).indices
    for leaves in trees.nodes().values():
        tree.map(lambda x: x.copy_(x[columns.unsqueeze(1), source]), leaves)
    trees.size = kept.sum(1)
    for leaves in (trees.child, trees.parent):
        leaves.copy_(place.gather(1, leaves.view(n, -1)).view_as(leaves))
    empty = torch.arange(space, device=root.device) >= trees.size.unsqueeze(1)
    for leaves in (trees.child, trees.visits, trees.total):
        leaves[empty | (root == 0).unsqueeze(1)] = 0


def log_gamma_noise(alpha: float, normal: Tensor, uniform: Tensor, boost: Tensor) -> Tensor:
    """Return logarithms of Gamma(alpha) draws ``[...]``; their softmax is Dirichlet.

    Marsaglia & Tsang 2000 (doi:10.1145/358407.358414), with the first of ``K`` proposals that is accepted; each is with
    probability above 0.95.

    Args:
        normal, uniform: ``[..., K]``, standard normal and uniform proposals.
        boost: ``[...]``, uniform, for the step from ``alpha + 1`` to ``alpha``.
    """
    d = alpha + 1.0 - 1.0 / 3.0
    v = (1.0 + normal / (9.0 * d) ** 0.5).clamp(min=0.0).pow(3)
    good = (v > 0) & (uniform.log() < 0.5 * normal.square() + d - d * v + d * v.log())
    first = good.int().argmax(-1, keepdim=True)
    drawn = (d * v).gather(-1, first).squeeze(-1).clamp(min=1e-30)
    return drawn.log() + boost.clamp(min=1e-30).log() / alpha
