"""Evaluation: whole episodes of the greedy policy, in environments of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlplug.api import Algorithm, VecEnv
from rlplug.collection.episodes import Episodes
from rlplug.collection.in_process import make_shard
from rlplug.collection.nonfinite import check_segment
from rlplug.context import EnvShard, RunContext
from rlplug.types import RunError

MOST_COLUMNS = 32
LONGEST = 27_000  # steps after which an episode is counted as it stands: 30 minutes of Atari, as is usual there
EVALUATION = 2  # tells evaluation's seeds from training's
CHUNK = 32  # rows that are collected at a time
Played: TypeAlias = list[tuple[float, int]]  # return and length of every episode


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and does so where nothing is half done."""


class Evaluator:
    """Plays episodes, in environments that are made once and kept.

    Every column plays a number of episodes fixed beforehand, so that short ones are not over-represented.

    Args:
        episodes: of the whole evaluation.
        columns: which of its columns are played here; None: all.
    """

    def __init__(
        self,
        make: Callable[[EnvShard], VecEnv],
        algorithm: Algorithm,
        ctx: RunContext,
        episodes: int,
        normalize: Callable[[Any], Any] | None = None,
        columns: Sequence[int] | None = None,
    ) -> None:
        total = min(episodes, MOST_COLUMNS)
        self.shard = EnvShard("eval", total, range(total) if columns is None else columns)
        self.quota = np.bincount(np.arange(episodes) % total)[list(self.shard.env_ids)]
        self.make, self.algorithm, self.ctx, self.normalize = make, algorithm, ctx, normalize
        self.env: VecEnv | None = None

    def begin(self) -> VecEnv:
        """Return the environments; the first call makes them."""
        if self.env is None:
            self.env = self.make(self.shard)
        return self.env

    def play(self, number: int, stop: Callable[[], bool] = lambda: False) -> Played:
        """Return (return, length) of every episode.

        Args:
            number: chooses the episodes' seeds, and what the policy draws.
            stop: asked before every row; if it says so, ``Stopped`` is raised.

        Raises:
            RunError: the environments gave a value that is NaN, infinite or out of bounds, or failed too often.
        """
        if not len(self.quota):
            return []
        env, env_ids = self.begin(), self.shard.env_ids
        entropy = np.random.SeedSequence([self.ctx.seed, EVALUATION, number])
        seeds = entropy.generate_state(self.shard.num_envs)[list(env_ids)].tolist()
        self.ctx.generators["eval"].manual_seed(int(entropy.spawn(1)[0].generate_state(1)[0]))
        collector = make_shard(env, self.algorithm, self.ctx, self.shard, seeds, keys=(), normalize=self.normalize)
        counted, left, played = Episodes(len(self.quota)), self.quota.copy(), Played()
        while left.any():
            if stop():
                raise Stopped
            counted.add(collector.collect(CHUNK, "greedy", stop))
            check_segment(collector.raw_segment(CHUNK), 0, env_ids, collector.bounds)
            if collector.failed_episodes > self.quota.sum():
                failed, ended = collector.failed_episodes, f"{len(played)} of {self.quota.sum()}"
                raise RunError(f"the environments of an evaluation failed in {failed} episodes, and ended {ended}")
            for episode_return, length, env in counted.drain(LONGEST):
                if left[column := int(env)]:
                    left[column] -= 1
                    played.append((episode_return, int(length)))
        return played

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


def shares_of(episodes: int, parts: int) -> list[range]:
    """Share the columns of an evaluation out among ``parts`` that play it together; some may get none."""
    shares = np.array_split(np.arange(min(episodes, MOST_COLUMNS)), parts)
    return [range(share[0], share[-1] + 1) if len(share) else range(0) for share in shares]


def summary(played: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return mean and standard deviation of the returns, and the mean length."""
    returns, lengths = zip(*played, strict=True)
    return {
        "eval/return_mean": float(np.mean(returns)),
        "eval/return_std": float(np.std(returns)),
        "eval/length_mean": float(np.mean(lengths)),
    }
