"""Values and choices of slates: Ie et al. 2019 (arXiv:1905.12767). A user watches document ``i`` of slate ``A`` with
probability ``v_i / (v_0 + sum_{j in A} v_j)``, and none of them with ``v_0 / (...)``, where ``v`` are positive scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
"""iterations of Dinkelbach's method, which converges faster than linearly: five suffice for a thousand documents"""


def slate_value(v: Tensor, q: Tensor, none: Tensor, q_none: Tensor, slate: Tensor) -> Tensor:
    """Return the value of slates, the mean of their documents' values over the user's choice: equation 16.

    Args:
        v, q: scores and values of the documents, ``[..., n]``.
        none, q_none: score and value of watching nothing, ``[...]``.
        slate: documents, ``[..., k]`` int64, all different.

    Returns:
        ``[...]``.
    """
    v, q = v.gather(-1, slate), q.gather(-1, slate)
    return (none * q_none + (v * q).sum(-1)) / (none + v.sum(-1))


def top_k(v: Tensor, q: Tensor, k: int) -> Tensor:
    """Return the ``k`` documents with the largest ``v q``, ``[..., k]``: section 5.3. It may miss the best slate."""
    return (v * q).topk(k, -1).indices


def greedy_slate(v: Tensor, q: Tensor, none: Tensor, q_none: Tensor, k: int) -> Tensor:
    """Build slates ``[..., k]`` by adding the document that makes the value largest, one at a time: section 5.3."""
    total, weight, chosen = none * q_none, none, list[Tensor]()
    taken = torch.zeros_like(v, dtype=torch.bool)
    for _ in range(k):
        value = (total.unsqueeze(-1) + v * q) / (weight.unsqueeze(-1) + v)
        best = torch.where(taken, -torch.inf, value).argmax(-1, keepdim=True)
        total, weight = total + (v * q).gather(-1, best).squeeze(-1), weight + v.gather(-1, best).squeeze(-1)
        taken = taken.scatter(-1, best, True)
        chosen.append(best)
    return torch.cat(chosen, -1)


def exact_slate(v: Tensor, q: Tensor, none: Tensor, q_none: Tensor, k: int) -> Tensor:
    """Return the slate with the largest value, ``[..., k]``.

    It solves the fractional linear program of section 5.2, ``max_x (v_0 q_0 + sum x_i v_i q_i) / (v_0 + sum x_i v_i)``
    over ``x in [0, 1]^n, sum x = k``, whose solutions are whole slates, by Dinkelbach's method (1967,
    doi:10.1287/mnsc.13.7.492): with the present value ``l``, the next slate has the largest ``v_i (q_i - l)``. Values
    rise, faster than linearly, until the best slate is found.
    """
    slate = top_k(v, q, k)
    for _ in range(min(ROUNDS, v.shape[-1])):
        value = slate_value(v, q, none, q_none, slate)
        slate = (v * (q - value.unsqueeze(-1))).topk(k, -1).indices
    return slate
