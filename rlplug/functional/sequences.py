"""Rollout chunks and replayed sequences for recurrent models, and their n-step targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from rlplug import tree
from rlplug.functional.returns import n_step
from rlplug.types import Batch, ConfigError

Steps: TypeAlias = int | tuple[int, int]
"""rewards in a target; or the lowest and the highest number, of which one is drawn for each sample"""
Draw: TypeAlias = Callable[[int, int], Tensor]
"""draws integers in ``[0, high)`` for every column of a sample: ``ctx.randint(high, B)``"""


def longest(n: Steps) -> int:
    """Return the maximum number of rewards in a target, which is the length of a window.

    Raises:
        ConfigError: the range is decreasing.
    """
    low, high = (n, n) if isinstance(n, int) else n
    if low > high:
        raise ConfigError("algo.n_step", f"[{low}, {high}] is no range; the first number should be the smaller one")
    return high


def drawn_steps(n: Steps, valid: Tensor, draw: Draw | None, lead: int = 1) -> Tensor:
    """Return which rows of the windows are in targets of ``n`` rewards, drawn for each column: a subset of ``valid``.

    Args:
        valid: ``[n+1, ..., B]``, or with agents ``[n+1, ..., B, N]``.
        draw: draws the numbers of a range; None: all have the maximum.
        lead: axes before that of ``B``.
    """
    if isinstance(n, int) or draw is None:
        return valid
    steps = n[0] + draw(n[1] - n[0] + 1, valid.shape[lead])
    row = torch.arange(len(valid), device=valid.device)
    return valid & (row.view(-1, *(1,) * (valid.ndim - 1)) < steps.view(-1, *(1,) * (valid.ndim - lead - 1)))


def carry_before(batch: Batch) -> Batch:
    """Return the recurrent state before row 0, ``[B, ...]``, from ``carry``; an empty batch without one."""
    return tree.map(lambda x: x[0], batch.get("carry", {}))


def chunks(batch: Batch, length: int) -> Batch:
    """Split a rollout into chunks of ``length`` rows, each with the recurrent state before it.

    The chunks of a column are adjacent, so their order does not depend on the sharding of columns. If ``T`` is not
    a multiple of ``length``, the last chunk is padded with copies of row T-1 that are not valid. Row T is dropped:
    it begins no transition.

    Args:
        batch: leaves ``[T+1, B, ...]``, among them ``valid`` and ``carry``.
        length: rows of a chunk; a shorter rollout is one chunk.

    Returns:
        Leaves ``[length, B * ceil(T / length), ...]``; those of ``carry`` are ``[1, B * ceil(T / length), ...]``.
    """
    rows = len(batch["valid"]) - 1
    length = min(length, rows)
    index = torch.arange(-(-rows // length) * length, device=batch["valid"].device)
    there, index = index < rows, index.clamp(max=rows - 1)

    def fold(x: Tensor) -> Tensor:
        return x.reshape(-1, length, *x.shape[1:]).movedim(0, 2).flatten(1, 2)

    def before(x: Tensor) -> Tensor:
        return x[index[::length]].transpose(0, 1).flatten(0, 1).unsqueeze(0)

    steps = {key: leaf for key, leaf in batch.items() if key != "carry"}
    out = tree.map(fold, tree.take(steps, index))
    out["valid"] = fold(batch["valid"][index] & there[:, None])
    return out | {"carry": tree.map(before, batch["carry"])}


def n_step_rows(
    reward: Tensor, terminated: Tensor, valid: Tensor, gamma: float, n: Steps, draw: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``n_step`` from every row of a sequence that is followed by ``n`` rows, for a range the maximum.

    Args:
        reward: ``[L+n, B]``, or ``[L+n, B, N]`` as ``terminated`` and ``valid``; rows that are not valid are ignored.
        terminated: ``[L+n, B]`` bool.
        valid: ``[L+n, B]`` bool; the last row is not read.
        gamma: discount factor.
        n: rewards in a target.
        draw: draws the numbers of a range, one for each sequence; None: its maximum.

    Returns:
        ``ret [L, B]``, the discounted sums; ``discount [L, B]``, ``gamma^k`` or 0 after termination;
        ``last [L, B]`` int64, the row of the sequence to bootstrap from. Rows that are not valid hold no
        transition: 0, 1 and the row itself.
    """
    reward, terminated, valid = (x.unfold(0, longest(n) + 1, 1).movedim(-1, 0) for x in (reward, terminated, valid))
    ret, discount, k = n_step(reward, terminated, drawn_steps(n, valid, draw, 2), gamma)
    return ret, discount, k + torch.arange(len(k), device=k.device).view(-1, *(1,) * (k.ndim - 1))


def n_step_transitions(batch: Batch, gamma: float, n: Steps = 1, draw: Draw | None = None) -> Batch:
    """Combine each window of transitions into one: row 0, and the row that its target bootstraps from.

    Args:
        batch: leaves ``[n+1, B, ...]``: ``obs``, ``action``, ``reward``, ``terminated``, ``valid``, optionally
            ``action_mask``. Row 0 is valid, as in a replay's sample; with agents, which have ``alive``, it may not be.
        gamma: discount factor.
        n: rewards in a target; a number, or the maximum of a range, is the length of the window.
        draw: draws the numbers of a range, one for each window; None: its maximum.

    Returns:
        ``returns`` and ``discount`` of ``n_step``; ``obs``, ``action`` and ``action_mask`` of row 0, and of agents
        ``valid``; ``next_obs`` and ``next_action_mask`` of the row to bootstrap from. Leaves ``[B, ...]``.
    """
    keys = [key for key in ("obs", "action_mask") if key in batch]
    first = tree.take({key: batch[key] for key in (*keys, "action", *["valid"] * ("alive" in batch))}, 0)
    if batch["valid"].shape[0] == 2:
        ret, discount, to = batch["reward"][0], torch.where(batch["terminated"][0], 0.0, gamma), 1
    else:
        valid = drawn_steps(n, batch["valid"], draw)
        ret, discount, last = n_step(batch["reward"], batch["terminated"], valid, gamma)
        to = last, torch.arange(len(ret), device=ret.device)
    following = tree.take({f"next_{key}": batch[key] for key in keys}, to)
    return first | following | {"returns": ret, "discount": discount}


def n_step_sequences(batch: Batch, gamma: float, n: Steps, burn_in: int = 0, draw: Draw | None = None) -> Batch:
    """Compute n-step targets of the ``L`` rows of a sequence between the burn-in and the last ``n`` rows.

    Args:
        batch: leaves ``[burn_in+L+n, B, ...]``: ``obs``, ``action``, ``reward``, ``terminated``, ``valid``,
            ``is_first``, ``carry`` (``[1, B, ...]``), optionally ``action_mask``.
        gamma: discount factor.
        n: rewards in a target.
        burn_in: rows that only warm up a recurrent state.
        draw: draws the numbers of a range, one for each sequence; None: its maximum.

    Returns:
        ``obs``, ``is_first`` and ``carry`` unchanged, for an unroll; ``returns``, ``discount`` and ``last`` of
        ``n_step_rows``, where ``last`` counts from the end of the burn-in; ``action``, ``valid`` and
        ``action_mask`` of the ``L`` rows, and ``next_action_mask`` of those to bootstrap from: ``[L, B, ...]``.
    """
    reward, terminated, valid, action = (batch[key][burn_in:] for key in ("reward", "terminated", "valid", "action"))
    ret, discount, last = n_step_rows(reward, terminated, valid, gamma, n, draw)
    out = {key: batch[key] for key in ("obs", "is_first", "carry") if key in batch}
    out |= {
        "action": action[: len(ret)],
        "valid": valid[: len(ret)],
        "returns": ret,
        "discount": discount,
        "last": last,
    }
    if "action_mask" in batch:
        mask, columns = batch["action_mask"][burn_in:], torch.arange(last.shape[1], device=last.device)
        out |= {"action_mask": mask[: len(ret)], "next_action_mask": mask[last, columns]}
    return out


def n_step_segment(batch: Batch, gamma: float, n: Steps) -> Batch:
    """Compute n-step targets of all ``T`` rows of a collected segment; those of its last rows use fewer steps.

    Args:
        batch: leaves ``[T+1, B, ...]``, as for ``n_step_sequences``; row T is not valid.
        gamma: discount factor.
        n: maximum number of rewards in a target, or a range, whose maximum it takes.

    Returns:
        As ``n_step_sequences``, with ``L = T``.
    """
    more = [-1] * (longest(n) - 1)  # copies of row T, which begin no transition either
    return n_step_sequences(tree.map(lambda x: torch.cat((x, x[more])), batch), gamma, n) | {"obs": batch["obs"]}
