"""Returns and advantages over stream rows (see ``rlplug.types``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlplug.types import Batch, EnvSpec, groups_of


def reverse_scan(decay: Tensor, x: Tensor) -> Tensor:
    """Solve ``y_t = x_t + decay_t * y_{t+1}`` with ``y_T = 0``, in ``log2(T)`` vectorised steps.

    After the step with stride ``d``, ``y_t`` holds its first ``2 d`` summands (Hillis & Steele 1986).

    Args:
        decay: ``[T, ...]``.
        x: ``[T, ...]``.

    Returns:
        ``y [T, ...]``.
    """
    length, stride = len(x), 1
    while stride < length:
        x = torch.cat((torch.addcmul(x[:-stride], decay[: length - stride], x[stride:]), x[-stride:]))
        decay = decay[:-stride] * decay[stride:]
        stride *= 2
    return x


def discounted_sum(
    reward: Tensor, valid: Tensor, before: Tensor, gamma: float, is_first: Tensor | None = None
) -> Tensor:
    """Compute ``R_t = gamma R_{t-1} + r_t`` in time order; its standard deviation normalizes rewards.

    RND runs it across ends of episodes (Burda et al. 2018, arXiv:1810.12894, section 2.4).

    Args:
        reward: ``[T, B]``; rows that are not valid are ignored.
        valid: ``[T, B]`` bool; other rows do not change ``R``.
        before: ``R_{-1} [B]``.
        gamma: discount factor.
        is_first: ``[T, B]`` bool, rows before which ``R`` is reset to 0; None: none.

    Returns:
        ``R [T, B]``.
    """
    decay = torch.where(valid, reward.new_tensor(gamma), 1.0)
    if is_first is not None:
        decay = torch.where(is_first, 0.0, decay)
    reward = torch.where(valid, reward, 0.0)
    reward = torch.cat((torch.addcmul(reward[:1], decay[:1], before), reward[1:]))
    return reverse_scan(decay.flip(0), reward.flip(0)).flip(0)


def ended(batch: Batch) -> Tensor:
    """Return which transitions ``[T, B]`` end the episode of their column: no agent is alive after them."""
    acted, groups = batch["valid"][:-1], groups_of(batch).values()
    if "alive" not in next(iter(groups)):
        return acted & (batch["terminated"] | batch["truncated"])[:-1]
    going = [part["alive"][1:].reshape(*acted.shape, -1).any(2) for part in groups]
    return acted & ~torch.stack(going).any(0)


def gae(
    reward: Tensor, value: Tensor, terminated: Tensor, valid: Tensor, gamma: float, lambda_: float
) -> tuple[Tensor, Tensor]:
    """Estimate generalized advantages: Schulman et al. 2016 (arXiv:1506.02438), equations 11, 12 and 16.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lambda * A_{t+1}``, where both
    ``t + 1`` terms vanish after termination. There is no argument for truncation: the row after a truncated one is
    the episode's final observation, whose value is the bootstrap target; it is not valid, so its advantage is zero
    and the next episode has no influence. The same holds for row T, if the segment ends within an episode.

    Args:
        reward: ``[T+1, B]``; rows that are not valid are ignored.
        value: ``[T+1, B]``, of every row's observation, final observations and row T too.
        terminated: ``[T+1, B]`` bool.
        valid: ``[T+1, B]`` bool; row T is ignored, since it begins no transition.
        gamma: discount factor.
        lambda_: weight of longer returns; 0: one-step TD error, 1: Monte Carlo.

    Returns:
        ``advantage [T+1, B]``, zero on rows that are not valid, and ``advantage + value``, the target
        of the value function.
    """
    valid = valid[:-1]
    discount = (~terminated[:-1]).to(value.dtype) * gamma
    delta = torch.addcmul(reward[:-1], discount, value[1:]) - value[:-1]
    advantage = reverse_scan(discount * valid * lambda_, torch.where(valid, delta, 0.0))
    advantage = torch.cat((advantage, torch.zeros_like(advantage[:1])))
    return advantage, advantage + value


def n_step(reward: Tensor, terminated: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the discounted rewards of a window up to the end of its episode or of the window.

    ``G = sum_{i<k} gamma^i r_i``, to which the target adds ``gamma^k V(row k)``: Watkins 1989; Sutton & Barto
    2018, equation 7.1. The first ``k <= n`` rows of a window are valid; row ``k`` is a final observation or the
    window's last row. A column whose row 0 is not valid holds no transition: k = 0.

    Args:
        reward: ``[n+1, B]``; rows that are not valid are ignored.
        terminated: ``[n+1, B]`` bool.
        valid: ``[n+1, B]`` bool; the last row is not read.
        gamma: discount factor.

    Returns:
        ``ret [B]``, the discounted sum; ``discount [B]``, ``gamma^k`` or 0 after termination;
        ``last [B]`` int64, ``k``: the row to bootstrap from.
    """
    n = len(reward) - 1
    length = valid[:-1].long().cumprod(0)
    running, last = length > 0, length.sum(0)
    power = torch.pow(gamma, torch.arange(n + 1, device=reward.device, dtype=reward.dtype))
    folded = torch.where(running, reward[:-1], 0.0) * power[:-1].view(-1, *(1,) * (reward.ndim - 1))
    ended = (terminated[:-1] & running).any(0)
    return folded.sum(0), power[last] * ~ended, last


def episode_sums(
    reward: np.ndarray, valid: np.ndarray, ended: np.ndarray, began: np.ndarray, total: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, int, int]]]:
    """Sum rewards and steps of the episodes in a segment, which may extend before and after it.

    Args:
        reward: ``[T, B]``, 0 on rows that are not valid.
        valid: ``[T, B]`` bool, rows with an action.
        ended: ``[T, B]`` bool, rows that end an episode.
        began: ``[T, B]`` bool, rows that begin an episode; an open one was interrupted.
        total: ``[B]`` float64, rewards of the open episodes before the segment.
        length: ``[B]`` int64, their steps.

    Returns:
        ``total`` and ``length`` after the segment, and (return, steps, column) of the ended episodes in time order.
    """
    returns, lengths = total + reward.cumsum(0, dtype=np.float64), length + valid.cumsum(0)

    def cuts(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.stack((begin, end), 1).reshape(-1, valid.shape[1])  # before row 0, after it, before row 1, ...

    b, at = np.nonzero(cuts(began, ended).T)  # by column, then in time order
    same, ends = b[1:] == b[:-1], at % 2 == 1  # whether a cut has a predecessor in its column; ends an episode

    def since(counted: np.ndarray) -> np.ndarray:
        return counted - np.where(np.append(False, same), np.roll(counted, 1), 0)  # since the previous cut

    totals, steps = cuts(returns - reward, returns)[at, b], cuts(lengths - 1, lengths)[at, b]
    in_time = np.flatnonzero(ends)[np.argsort(at[ends], kind="stable")]
    over = [*zip(*(x[in_time].tolist() for x in (since(totals), since(steps), b)), strict=True)]
    last = np.flatnonzero(np.append(~same, True))
    returns[-1, b[last]] -= totals[last]
    lengths[-1, b[last]] -= steps[last]
    return returns[-1], lengths[-1], over


def episode_metrics(batch: Batch, spec: EnvSpec | None = None) -> dict[str, float]:
    """Return mean and standard deviation of ``return [B]``, and the means of ``length``, ``success`` and ``metrics``.

    Given the ``spec`` of an environment with agents, also the mean return of every group and agent.
    """
    returns, lengths = (np.asarray(batch[key]) for key in ("return", "length"))
    return (
        {
            "eval/return_mean": float(returns.mean()),
            "eval/return_std": float(returns.std()),
            "eval/length_mean": float(lengths.mean()),
        }
        | ({"eval/success_mean": float(np.asarray(batch["success"]).mean())} if "success" in batch else {})
        | {f"eval/return/{name}": mean for name, mean in (_agent_returns(batch, spec) if spec is not None else ())}
        | own_means(batch)
    )


def metrics_of_jobs(played: Sequence[Batch]) -> dict[str, float]:
    """Return ``episode_metrics`` of the episodes of several jobs, as ``Play`` yields them."""
    keys = [key for key in ("return", "length", "success") if key in played[0]]
    return episode_metrics({key: torch.cat([batch[key] for batch in played]) for key in keys} | own_metrics(played))


def own_means(batch: Batch) -> dict[str, float]:
    """Return the means ``eval/<name>`` of the environment's own ``metrics``, each over the episodes that have it."""
    each = ((name, np.asarray(values)) for name, values in batch.get("metrics", {}).items())
    given = {f"eval/{name}": values[~np.isnan(values)] for name, values in each}
    # math.fsum does not depend on the order of the episodes
    return {name: math.fsum(values) / len(values) for name, values in given.items() if len(values)}


def by_name(metrics: Sequence[Mapping[str, float]]) -> Batch:
    """Return ``{"metrics": ...}`` of episodes, given those of each; ``{}``: there are none."""
    names = sorted({name for own in metrics for name in own})
    found = {name: torch.tensor([own.get(name, math.nan) for own in metrics], dtype=torch.float64) for name in names}
    return {"metrics": found} if found else {}


def by_episode(batch: Batch) -> list[dict[str, float]]:
    """Return the ``metrics`` of each episode; undoes ``by_name``."""
    found = {name: values.tolist() for name, values in batch.get("metrics", {}).items()}
    rows = (dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True))
    return [{name: x for name, x in row.items() if not math.isnan(x)} for row in rows]


def own_metrics(played: Sequence[Batch]) -> Batch:
    """Return ``{"metrics": ...}`` of the episodes of several batches, of which some may lack a metric; ``{}``: none."""
    names = sorted({name for batch in played for name in batch.get("metrics", ())})

    def of(batch: Batch, name: str) -> Tensor:
        return batch.get("metrics", {}).get(name, torch.full_like(batch["return"], math.nan))

    found = {name: torch.cat([of(batch, name) for batch in played]) for name in names}
    return {"metrics": found} if found else {}


def _agent_returns(batch: Batch, spec: EnvSpec) -> Iterator[tuple[str, float]]:
    """Yield the mean return of every group, if there are several, and of its agents: ``scouts``, ``scouts/north``."""
    for name, group in spec.groups.items() if spec.has_agents else ():
        part = batch[name] if spec.nested else batch
        valid = batch["valid"].view(*batch["valid"].shape, *(1 for _ in part["reward"].shape[2:]))
        means = torch.where(valid, part["reward"].double(), 0.0).sum(0).mean(0)
        if spec.nested:
            yield name, means.mean().item()
        for agent, mean in zip(group.agents, means.reshape(-1), strict=False):
            yield f"{name}/{agent}" if spec.nested else agent, mean.item()
