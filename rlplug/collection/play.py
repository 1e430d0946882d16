"""Jobs: whole episodes, played on request in separate environments without lasting state."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Algorithm, Exploration, Job, VecEnv
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.finishing import stored
from rlplug.collection.nonfinite import check_bounds, check_segment
from rlplug.collection.segment import CORE
from rlplug.collection.shard import ShardCollector
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.contract.jobs import check_job
from rlplug.distributed.rng import global_state, load_global_state, seed_global_from
from rlplug.functional.returns import by_name, ended
from rlplug.host import on_cpu
from rlplug.nn.lanes import Lanes
from rlplug.types import Batch, Mode, NamedWeights, Role, RunError, Tree, Weights, groups_of

MOST_COLUMNS = 32
CHUNK = 32  # rows collected at a time


class Stopped(KeyboardInterrupt):
    """A stop was requested, and the run stops at a consistent point."""


@dataclass(eq=False)
class Player:
    """Plays jobs. The result of a job depends only on the weights, the entropy and the job's number.

    Every column plays a fixed number of episodes, so that short episodes are not over-represented.

    Args:
        make: creates environments, which are reused.
        role: role whose generator draws, and purpose of the environments.
        entropy: separates the seeds of these jobs from all others of the run.
        keys: keys of an episode to keep in addition to the stream's.
        name: name of the environment, for messages.
    """

    make: Callable[[EnvShard], VecEnv]
    algorithm: Algorithm
    ctx: RunContext
    role: Role
    entropy: Sequence[int]
    keys: Sequence[str]
    normalize: Callable[[Any], Any] | None = None
    exploration: Mapping[str, Exploration] = field(default_factory=dict[str, Exploration])
    name: str = "a job"
    ended: tuple[int, int] = (0, 0)  # of the last jobs: number of ended episodes, and of all episodes
    _shards: dict[tuple[int, ...], ShardCollector] = field(default_factory=dict[tuple[int, ...], ShardCollector])
    _programs: dict[Any, Any] = field(default_factory=dict[Any, Any])  # of lanes

    def shard(self, shard: EnvShard) -> ShardCollector:
        """Return the collector of a shard; the first call creates it and its environments."""
        key = (shard.num_envs, *shard.env_ids)
        if key not in self._shards:
            how = ((), self.exploration, self.keys, self.normalize, ())
            self._shards[key] = make_shard(self.make(shard), self.algorithm, self.ctx, shard, *how)
        return self._shards[key]

    def play_all(self, jobs: Iterable[Job], *given: Any) -> Iterator[Batch]:
        """Yield the episodes of each job; see ``play``. Candidates of a round act together in lanes if they can."""
        for together in rounds(jobs):
            for some in [together] if self._lanes(together[0]) else [[job] for job in together]:
                yield from self.play(some, *given)

    def _lanes(self, job: Job) -> int:
        """Return the number of lanes for candidates like this job's, even if there is only one; 0: no lanes."""
        explores = self.exploration and modes_of(job)[""] == "explore"
        count = 0 if explores or not self.ctx.traceable([self.algorithm]) else lanes_of(job)
        return count and count * self.shard(share_of(job, self.role)[0]).env.traits.independent

    def play(
        self,
        jobs: Sequence[Job],
        weights: NamedWeights | None = None,
        stop: Callable[[], bool] = lambda: False,
        prefix: Sequence[int] = (),
        columns: Sequence[int] | None = None,
        until: tuple[int, float] = (0, math.inf),
    ) -> list[Batch]:
        """Play a job, or several in lanes, and return the episodes of each, or of some columns; see ``api.Play``.

        Args:
            stop: called before every row; ``Stopped`` is raised if it returns True.
            prefix: numbers that precede the job's in the seed, because several sets of jobs are numbered from 0.
            until: minimum steps of a column, which plays further episodes until it has them; and seconds after which
                only the episodes that have ended are returned, ``{}`` if none has.

        Raises:
            RunError: the environments returned a value that is NaN or infinite, or failed too often.
            ConfigError, ValueError: see ``check_job``.
        """
        job, modes, (own, quota) = jobs[0], modes_of(jobs[0]), share_of(jobs[0], self.role, columns)
        if not (n := len(quota)):
            return [{}]
        lanes, acting = 0 if columns else self._lanes(job), [self._weights(job, weights or {}) for job in jobs]
        shard, leader = replace(own, env_ids=[*own.env_ids] * len(jobs)), job.number - job.number % (lanes or 1)
        collector, numbers = self.shard(shard), (leader, *(job.number for job in jobs))
        noise, *seeds = [np.random.SeedSequence([*self.entropy, *prefix, *[n] * (n > 0)]) for n in numbers]
        if lanes:
            places, inside = [n % lanes for n in numbers[1:]], partial(self.ctx.acting, own)
            collector.acting.lanes = Lanes(self.algorithm, acting, places, lanes, inside, self._programs).act
        # whether ``postprocess`` changes whole episodes and may read all keys
        whole = modes[""] != "greedy" and type(self.algorithm).postprocess is not Algorithm.postprocess
        keep = stored(self.ctx, self.keys if job.keys is None else (*job.keys, "is_success"))
        kept = EpisodeSplitter(np.tile(quota, len(jobs)), job.max_steps, self.ctx.spec.nested, until[0])
        collector.failed_episodes = 0
        tasks = None if job.task is None else tree.map(lambda *x: np.repeat(np.stack(x), n, 0), *[j.task for j in jobs])

        def begin() -> None:
            """Reset all columns together, and advance the seeds."""
            collector.reset(tasks, [int(one.generate_state(own.num_envs)[b]) for one in seeds for b in own.env_ids])
            kept.reset()
            seeds[:] = [one.spawn(2)[1] for one in seeds]  # the other child is the seed of noise

        with torch.inference_mode(), self._apart(noise.spawn(1)[0], modes):
            begin()
            end = time.monotonic() + until[1]
            ends = lambda: stop() or time.monotonic() >= end  # noqa: E731
            while kept.left.any() and time.monotonic() < end:
                if kept.capped[kept.left > 0].all():  # all columns with episodes left wait for a reset
                    begin()
                if stop():
                    raise Stopped
                segment = collector.collect(CHUNK, modes[""], ends, None if lanes else acting[0] or None)
                check_segment(segment, 0, shard.env_ids)
                check_bounds(segment, 0, shard.env_ids, collector.bounds, self.ctx.beyond, f" of {self.name}")
                kept.add(on_cpu(segment if whole else keep(segment)), collector.episode_metrics())
                self.ended = len(kept.played), max(len(kept.played), int(quota.sum()) * len(jobs))
                if collector.failed_episodes > quota.sum():
                    said = f"failed in {collector.failed_episodes} episodes, and ended {len(kept.played)}"
                    raise RunError(f"the environments of {self.name} {said} of {quota.sum() * len(jobs)}")
        if not kept.played:
            return [{}]
        played = [kept.batch(range(i, i + n)) for i in range(0, n * len(jobs), n)]
        if whole:
            with torch.inference_mode(), self.ctx.acting(own):
                played = [(keep(self.algorithm.postprocess(rows)), numbers) for rows, numbers in played]
        return [of_keys(rows | numbers, job.keys, self.ctx.spec.nested) for rows, numbers in played]

    def _weights(self, job: Job, weights: NamedWeights) -> Weights:
        """Return the weights that the job plays with instead of the algorithm's own."""
        check_job(job, weights, self.algorithm, self.ctx.spec)
        named = ((who, weights[name]) for who, name in job.policies.items())
        chosen: Weights = {f"{who}.{key}".removeprefix("."): x for who, part in named for key, x in part.items()}
        if job.candidate is not None:
            with torch.no_grad():
                chosen |= self.algorithm.candidate_weights(job.candidate)
        tensors = {key: x if isinstance(x, torch.Tensor) else torch.tensor(x) for key, x in chosen.items()}
        return {key: x.detach().to(self.ctx.device) for key, x in tensors.items()}

    @contextmanager
    def _apart(self, seeds: np.random.SeedSequence, modes: Mapping[str, Mode]) -> Iterator[None]:
        """Draw from these seeds, and let submodules act in their modes, inside the block; restore all afterwards."""
        generator, number = self.ctx.generators[self.role], int(seeds.generate_state(1)[0])
        before, everywhere = generator.get_state(), global_state(self.ctx.device)
        modules = [(extra, tree.map(torch.clone, extra.state_dict())) for extra in self.exploration.values()]
        children: list[Any] = [self.algorithm.get_submodule(who) for who in modes if who]
        generator.manual_seed(number)
        seed_global_from(number)
        for child, who in zip(children, filter(None, modes), strict=True):
            child.act = lambda step, carry, _, act=child.act, mode=modes[who]: act(step, carry, mode)
        try:
            yield
        finally:
            generator.set_state(before)
            load_global_state(everywhere, self.ctx.device)
            for extra, state in modules:
                extra.load_state_dict(state)
            for child in children:
                del child.act  # the method of its class is left

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()


def modes_of(job: Job) -> dict[str, Mode]:
    """Return the mode of the algorithm, under an empty name, and those of its submodules."""
    return {"": job.mode} if isinstance(job.mode, str) else {"": "explore", **job.mode}


def lanes_of(job: Job) -> int:
    """Return the number of jobs like this one that act together in lanes; 0: it has no candidate, or many episodes."""
    return 0 if job.candidate is None else MOST_COLUMNS // job.episodes


def rounds(jobs: Iterable[Job], most: int = MOST_COLUMNS) -> list[list[Job]]:
    """Group successive jobs, at most ``most``, that may act in lanes: only candidate, task and number differ."""

    def like(job: Job) -> Any:
        n = lanes_of(job)
        return replace(job, number=job.number // n, candidate=None, task=job.task is None) if n else id(job)

    alike = [[*group] for _, group in groupby(jobs, like)]
    return [group[i : i + most] for group in alike for i in range(0, len(group), most)]


def of_keys(batch: Batch, keys: Sequence[str] | None, nested: Collection[str]) -> Batch:
    """Return the part of a job's episodes that is sent back; see ``api.Job.keys``."""
    return batch if keys is None else tree.only(batch, (*keys, *OF_EPISODE), nested if keys else ())


def share_of(job: Job, role: Role, columns: Sequence[int] | None = None) -> tuple[EnvShard, np.ndarray]:
    """Return the given columns of a job (None: all), and the number of episodes that each of them plays."""
    total = min(job.episodes, MOST_COLUMNS)
    shard = EnvShard(role, total, range(total) if columns is None else columns)
    each = job.episodes // total + (np.arange(total) < job.episodes % total)
    return shard, each[[*shard.env_ids]]


class EpisodeSplitter:
    """Cuts segments into episodes, and keeps a fixed number per column.

    Args:
        quota: number of episodes to keep from every column, ``[B]``.
        max_steps: steps after which an episode is truncated; its column then waits for ``reset``.
        groups: groups of agents whose returns are also counted separately.
        steps: steps that a column must have; further episodes are kept until then.

    Attributes:
        left: number of episodes still to be kept from every column, ``[B]``.
        capped: columns that wait for ``reset``, ``[B]`` bool.
    """

    def __init__(self, quota: np.ndarray, max_steps: int, groups: Sequence[str] = (), steps: int = 0) -> None:
        self.left, self._steps_left = quota.copy(), [steps] * len(quota)
        self.max_steps, self.groups = max_steps, groups
        self.played: list[tuple[Any, ...]] = []  # return, length, rows, metrics, column, returns of groups
        self.reset()

    def reset(self) -> None:
        """Drop open episodes: all columns begin new ones."""
        n = len(self.left)
        self._counted, self.capped = EpisodeStats(n, self.groups), np.zeros(n, np.bool_)
        self._rows: list[list[Batch]] = [[] for _ in range(n)]  # rows of the open episode of every column
        self._steps = np.zeros(n, np.int64)
        self._ended: list[deque[tuple[Batch, Mapping[str, float]]]] = [deque() for _ in range(n)]
        self._metrics: list[deque[Mapping[str, float]]] = [deque() for _ in range(n)]  # of episodes that ended

    def add(self, segment: Batch, metrics: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        """Add a segment ``[T+1, B]``, truncating episodes at ``max_steps``, and ``metrics``; see ``EnvTraits``."""
        for b, own in metrics:
            self._metrics[b].append(own)
        arrays, over = tree.map(torch.Tensor.numpy, segment), ended(segment).numpy()
        for b in range(len(self.left)):
            self._cut(arrays, over[:, b], b)
        self._counted.add(segment)
        for total, length, b, *by_group in self._counted.drain():
            if self.left[b]:
                self._steps_left[b] -= length
                self.left[b] = max(self.left[b] - 1, self._steps_left[b] > 0)
                self.played.append((total, length, *self._ended[b].popleft(), b, by_group))

    def _cut(self, arrays: Batch, over: np.ndarray, b: int) -> None:
        """Add the episodes of a column, which end where ``over [T]``, and keep the rows of the open one."""
        first, rows = arrays["is_first"][:, b], np.flatnonzero(arrays["valid"][:-1, b])
        if self.capped[b]:
            arrays["valid"][:, b], rows = False, rows[:0]
        while len(rows):
            if first[rows[0]]:  # the previous episode was interrupted
                self._rows[b], self._steps[b] = [], 0
            room = self.max_steps - self._steps[b]
            breaks, ends = np.flatnonzero(first[rows[1:]]), np.flatnonzero(over[rows])
            n = min(len(rows), room, *(breaks[:1] + 1), *(ends[:1] + 1))
            last, self._steps[b] = rows[n - 1], self._steps[b] + n
            if n == room and not over[last]:
                self._truncate(arrays, b, last)
            if self.left[b]:
                self._rows[b].append(tree.take(arrays, (rows[:n], b)))
            if over[last] or self.capped[b]:
                self._end(arrays, b, last + 1, self._metrics[b].popleft() if over[last] and self._metrics[b] else {})
            rows = rows[len(rows) if self.capped[b] else n :]

    def _truncate(self, arrays: Batch, b: int, last: int) -> None:
        """Truncate the episode of a column after row ``last``, and ignore later rows."""
        arrays["valid"][last + 1 :, b], self.capped[b] = False, True
        for part in groups_of(arrays).values():
            part["truncated"][last, b] |= part.get("alive", arrays["valid"])[last, b] & ~part["terminated"][last, b]
            if "alive" in part:
                part["alive"][last + 1 :, b] = False

    def _end(self, arrays: Batch, b: int, final: int, metrics: Mapping[str, float]) -> None:
        """Assemble an episode; row ``final`` is its final observation."""
        if self.left[b]:
            row = tree.take(arrays, (np.array([final]), b))
            for part in (row, *groups_of(row).values()):
                for key in CORE.keys() & part.keys():
                    part[key][:] = 0
            self._ended[b].append((tree.cat([*self._rows[b], row]), metrics))
        self._rows[b], self._steps[b] = [], 0

    def drain(self) -> list[Batch]:
        """Return the rows, as arrays, of the episodes that ended since the last call."""
        played, self.played = self.played, []
        return [rows for _, _, rows, *_ in played]

    def state(self) -> Tree:
        """Return the open episodes, none of which is truncated."""
        rows = [tree.cat(pieces) if pieces else {} for pieces in self._rows]
        return {"rows": rows, "steps": self._steps, "counted": self._counted.state()}

    def load(self, state: Tree) -> None:
        self._rows = [[rows] if rows else [] for rows in state["rows"]]
        self._steps = state["steps"]
        self._counted.load(state["counted"])

    def batch(self, columns: range) -> tuple[Batch, Batch]:
        """Return the episodes of ``columns`` as ``[L+1, episodes]``, in order of their ends, and ``OF_EPISODE``."""
        played = [episode for episode in self.played if episode[4] in columns]
        returns, lengths, episodes, metrics, _, by_group = zip(*played, strict=True)
        longest = np.arange(max(lengths) + 1)
        padded = [tree.take(rows, np.minimum(longest, n)) for n, rows in zip(lengths, episodes, strict=True)]
        batch = tree.map(lambda *leaves: torch.from_numpy(np.stack(leaves, 1)), *padded)
        numbers = {"return": torch.tensor(returns, dtype=torch.float64), "length": torch.tensor(lengths)}
        numbers |= {"success": batch["is_success"][-1].double()} if "is_success" in batch else {}
        groups = dict(zip(self.groups, torch.tensor(by_group, dtype=torch.float64).unbind(-1), strict=True))
        return batch, numbers | by_name(metrics) | ({"returns": groups} if groups else {})
