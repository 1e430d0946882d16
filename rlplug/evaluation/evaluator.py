"""Evaluation: whole episodes of the greedy policy in separate environments, and pictures of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlplug import tree
from rlplug.api import Algorithm, Job, Play, VecEnv
from rlplug.collection.play import MOST_COLUMNS, Player, Stopped, share_of
from rlplug.collection.stepping import make_shard
from rlplug.config import Eval
from rlplug.context import EnvShard, RunContext
from rlplug.envs.episode_metrics import numbers
from rlplug.envs.pictures import picture
from rlplug.envs.seeded import tell_once
from rlplug.functional.returns import ended
from rlplug.script import function_at
from rlplug.types import Batch, NamedWeights

PlayAll = Callable[[Sequence[Job], NamedWeights | None], Iterable[Batch]]
ALONE = EnvShard("eval", 1, range(1))
EVALUATION = 2  # separates the seeds of evaluation from training's


class Evaluator:
    """Plays the episodes of evaluations, in environments that are created once and reused.

    Args:
        cfg: number of episodes of the evaluation, and maximum steps of an episode.
        columns: columns to play in this process; None: all.
        keys: keys of an episode to keep in addition to the stream's; None: those that the algorithm's own evaluation
            may read.
    """

    def __init__(
        self,
        make: Callable[[EnvShard], VecEnv],
        algorithm: Algorithm,
        ctx: RunContext,
        cfg: Eval,
        normalize: Callable[[Any], Any] | None = None,
        columns: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        self.algorithm, self.cfg = algorithm, cfg
        self.job = Job(0, episodes=cfg.episodes, mode=cfg.mode)
        self.shard, _ = share_of(self.job, "eval", columns)
        self.own = own_evaluation(algorithm, cfg)
        """takes ``play`` and a number of episodes"""
        if keys is None:
            keys = [*(ctx.needs.keys if self.own else ()), *{"is_success"}.intersection(ctx.spec.extras)]
        entropy = (ctx.seed, EVALUATION)
        self.player = Player(make, algorithm, ctx, "eval", entropy, keys, normalize, name="an evaluation")

    def begin(self) -> VecEnv:
        """Return the environments; the first call creates them."""
        return self.player.shard(self.shard).env

    def evaluate(self, all_of: PlayAll) -> tuple[dict[str, float], Batch]:
        """Return the metrics of an evaluation, and returns and lengths of its greedy episodes, or of all it played.

        Args:
            all_of: plays jobs with the given weights and returns all episodes of each.

        Raises:
            RunError: ``own`` returns no ``eval/return_mean``, or something else than numbers.
        """
        if self.own is None:
            (batch,) = all_of([self.job], None)
            return self.metrics(batch), batch
        mode, played = self.job.mode, dict[bool, list[Batch]]({True: [], False: []})

        def play(jobs: Sequence[Job], weights: NamedWeights | None = None) -> Iterator[tuple[Job, Batch]]:
            asked = [replace(job, mode=mode) if mode == "random" or job.mode == "greedy" else job for job in jobs]
            for job, batch in zip(jobs, map(self.noted, all_of(asked, weights)), strict=True):
                played[job.mode == "greedy"].append({key: batch[key] for key in ("return", "length")})
                yield job, batch

        whose = self.cfg.function or type(self.algorithm).__name__
        metrics = numbers(self.own(play, self.cfg.episodes), whose, "eval/return_mean")
        return metrics, tree.cat(each) if (each := played[True] or played[False]) else {}

    def play(
        self,
        job: Job,
        number: int,
        weights: NamedWeights | None = None,
        stop: Callable[[], bool] = lambda: False,
        columns: Sequence[int] | None = None,
    ) -> Batch:
        """Play a job of evaluation ``number``, counted from 0; returns and raises as ``Player.play``."""
        total = self.shard.num_envs
        most, until = self.cfg.max_episode_steps, (-(-(self.cfg.steps or 0) // total), self.cfg.timeout_s or math.inf)
        job = replace(job, max_steps=most if job.max_steps == Job.max_steps else min(job.max_steps, most))
        return self.player.play([job], weights, stop, [number], columns, until)[0]

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the metrics of all episodes of ``job``, and report if they are fewer because of the timeout.

        With ``eval.steps`` or ``eval.timeout_s``, ``eval/episodes`` is their number; if it is 0, there are no others.
        """
        cfg, n = self.cfg, len(batch.get("return", ()))
        if self.player.ctx.rank == 0 and (n < cfg.episodes or batch["length"].sum() < (cfg.steps or 0)):
            said = f"rlplug: eval.timeout_s={cfg.timeout_s} ended an evaluation after {n} complete episodes"
            print(said, file=sys.stderr, flush=True)
        counted = {"eval/episodes": n} if cfg.steps or cfg.timeout_s else {}
        return (self.algorithm.episode_metrics(self.noted(batch)) if n else {}) | counted

    def noted(self, batch: Batch) -> Batch:
        """Return all episodes of a job; report once if some were cut before the environment's own limit."""
        most, first = self.cfg.max_episode_steps, self.player.ctx.rank == 0
        if first and (batch["length"] >= most).any() and (self.begin().spec.max_episode_steps or most + 1) > most:
            tell_once(f"eval.max_episode_steps={most} truncates episodes of an evaluation; their returns are partial")
        return batch

    def close(self) -> None:
        self.player.close()


def own_evaluation(algorithm: Algorithm, cfg: Eval) -> Callable[[Play, int], dict[str, float]] | None:
    """Return ``eval.function`` or the algorithm's own ``evaluate``; None: the episodes of one greedy job.

    Raises:
        ConfigError: there is no such function, or it takes other arguments.
    """
    if cfg.function is not None:
        return partial(function_at(cfg.function, "eval.function", ("algorithm", "play", "episodes")), algorithm)
    return None if type(algorithm).evaluate is Algorithm.evaluate else algorithm.evaluate


def shares_of(episodes: int, parts: int) -> list[range]:
    """Divide the columns of an evaluation among ``parts``; some parts may be empty."""
    shares = np.array_split(np.arange(min(episodes, MOST_COLUMNS)), parts)
    return [range(share[0], share[-1] + 1) if len(share) else range(0) for share in shares]


def pictures(
    env: VecEnv,
    algorithm: Algorithm,
    ctx: RunContext,
    episodes: int,
    normalize: Callable[[Any], Any] | None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[np.ndarray]:
    """Play greedy episodes in ``env``, yield an image ``[H, W, 3]`` uint8 before every step, and close ``env``.

    Raises:
        Stopped: ``stop()``, which is called before every image, returned True.
    """
    with closing(env):
        collector = make_shard(env, algorithm, ctx, ALONE, [ctx.seed], {}, (), normalize, ())
        collector.reset()
        while episodes:
            if stop():
                raise Stopped
            yield picture(env)
            episodes -= int(ended(collector.collect(1, "greedy"))[0, 0])
