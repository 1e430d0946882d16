"""Jobs: whole episodes, played on request in separate environments without lasting state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Algorithm, Exploration, Job, VecEnv
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.finishing import stored
from rlplug.collection.nonfinite import beyond, bounds_of, check_segment
from rlplug.collection.segment import CORE, on_cpu
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard, RunContext
from rlplug.distributed.rng import global_state, load_global_state, seed_global_from
from rlplug.functional.returns import ended
from rlplug.types import Batch, ConfigError, EnvSpec, Role, RunError, Tree, Weights, groups_of

MOST_COLUMNS = 32
CHUNK = 32  # rows collected at a time
OF_EPISODE = ("return", "length", "success")  # keys of a job's batch with one number per episode


class Stopped(KeyboardInterrupt):
    """A stop was requested, and the run stops at a consistent point."""


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

    def __init__(
        self,
        make: Callable[[EnvShard], VecEnv],
        algorithm: Algorithm,
        ctx: RunContext,
        role: Role,
        entropy: Sequence[int],
        keys: Sequence[str],
        normalize: Callable[[Any], Any] | None = None,
        exploration: Mapping[str, Exploration] | None = None,
        name: str = "a job",
    ) -> None:
        self.make, self.algorithm, self.ctx, self.entropy = make, algorithm, ctx, entropy
        self.role: Role = role
        self.keys, self.normalize, self.exploration, self.name = keys, normalize, dict(exploration or {}), name
        self._envs: dict[tuple[int, ...], VecEnv] = {}

    def env(self, shard: EnvShard) -> VecEnv:
        """Return the environments of a shard; the first call creates them."""
        key = (shard.num_envs, *shard.env_ids)
        if key not in self._envs:
            self._envs[key] = self.make(shard)
        return self._envs[key]

    def play(
        self,
        job: Job,
        weights: Mapping[str, Weights] | None = None,
        stop: Callable[[], bool] = lambda: False,
        prefix: Sequence[int] = (),
        columns: Sequence[int] | None = None,
    ) -> Batch:
        """Return the episodes of a job, or of some of its columns; see ``api.Play``.

        Args:
            stop: called before every row; ``Stopped`` is raised if it returns True.
            prefix: numbers that precede the job's in the seed, because several sets of jobs are numbered from 0.

        Raises:
            RunError: the environments returned a value that is NaN or infinite, or failed too often.
            ConfigError, ValueError: see ``named_weights``.
        """
        shard, quota = share_of(job, self.role, columns)
        if not len(quota):
            return {}
        env, seeds = self.env(shard), np.random.SeedSequence([*self.entropy, *prefix, *[job.number] * (job.number > 0)])
        tasks = None if job.task is None else tree.map(lambda x: np.stack([x] * len(quota)), job.task)
        acting, exploration = self._weights(job, weights or {}), self.exploration if job.mode == "explore" else {}
        # whether ``postprocess`` changes whole episodes and may read all keys
        whole = job.mode != "greedy" and type(self.algorithm).postprocess is not Algorithm.postprocess
        kept, keep = EpisodeSplitter(quota, job.max_steps), stored(self.ctx, self.keys)
        bounds = bounds_of(env, self.ctx.spec)
        collector = make_shard(env, self.algorithm, self.ctx, shard, (), exploration, self.keys, self.normalize, ())

        def begin(seeds: np.random.SeedSequence) -> np.random.SeedSequence:
            """Reset all columns together, and return the seed sequence of the next reset."""
            collector.reset(tasks, seeds.generate_state(shard.num_envs)[[*shard.env_ids]].tolist())
            kept.reset()
            return seeds.spawn(1)[0]

        with self._apart(seeds.spawn(1)[0], exploration):
            seeds = begin(seeds)
            while kept.left.any():
                if kept.waits:
                    seeds = begin(seeds)
                if stop():
                    raise Stopped
                segment = collector.collect(CHUNK, job.mode, stop, acting)
                check_segment(segment, 0, shard.env_ids)
                if not self.ctx.beyond:
                    found = beyond(segment, 0, shard.env_ids, bounds)
                    self.ctx.beyond += [f"{said} of {self.name}" for said in found]
                if collector.failed_episodes > quota.sum():
                    times, ended = collector.failed_episodes, f"{len(kept.played)} of {quota.sum()}"
                    raise RunError(f"the environments of {self.name} failed in {times} episodes, and ended {ended}")
                kept.add(on_cpu(segment if whole else keep(segment)))
        rows, numbers = kept.batch()
        if whole:
            with torch.inference_mode(), self.ctx.acting(shard):
                rows = keep(self.algorithm.postprocess(rows))
        return rows | numbers

    def _weights(self, job: Job, weights: Mapping[str, Weights]) -> Weights | None:
        """Return the weights that the job plays with instead of the algorithm's own."""
        chosen = named_weights(job, weights, self.algorithm, self.ctx.spec)
        if job.candidate is not None:
            with torch.no_grad():
                chosen |= self.algorithm.candidate_weights(job.candidate)
        tensors = {key: x if isinstance(x, torch.Tensor) else torch.tensor(x) for key, x in chosen.items()}
        return {key: x.detach().to(self.ctx.device) for key, x in tensors.items()} or None

    @contextmanager
    def _apart(self, seeds: np.random.SeedSequence, exploration: Mapping[str, Exploration]) -> Iterator[None]:
        """Draw from these seeds inside the block; restore all generators and exploration modules afterwards."""
        generator, number = self.ctx.generators[self.role], int(seeds.generate_state(1)[0])
        before, everywhere = generator.get_state(), global_state(self.ctx.device)
        modules = [(extra, tree.map(torch.clone, extra.state_dict())) for extra in exploration.values()]
        generator.manual_seed(number)
        seed_global_from(number)
        try:
            yield
        finally:
            generator.set_state(before)
            load_global_state(everywhere, self.ctx.device)
            for extra, state in modules:
                extra.load_state_dict(state)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()


def named_weights(job: Job, weights: Mapping[str, Weights], algorithm: Algorithm, spec: EnvSpec) -> Weights:
    """Check a job, and return the weights that its policies select, keyed by their names in the algorithm.

    Raises:
        ConfigError: it has a task, but the environment offers none.
        ValueError: the weights are missing, or the algorithm does not act with them.
    """
    if job.task is not None and "tasks" not in spec.offers:
        raise ConfigError("env", f"job {job.number} has a task, but this environment has none; use another")
    chosen: Weights = {}
    for who, name in job.policies.items():
        if name not in weights:
            given = ", ".join(map(repr, weights)) or "none"
            raise ValueError(f"job {job.number} plays with the weights {name!r}; available: {given}")
        chosen |= {f"{who}.{key}".removeprefix("."): x for key, x in weights[name].items()}
    if unknown := chosen.keys() - {*algorithm.actor_keys()}:
        said = f"which {type(algorithm).__name__}.actor_keys() does not name"
        raise ValueError(f"job {job.number} plays with {min(unknown)!r}, {said}")
    return chosen


def share_of(job: Job, role: Role, columns: Sequence[int] | None = None) -> tuple[EnvShard, np.ndarray]:
    """Return the given columns of a job (None: all), and the number of episodes for each to play."""
    total = min(job.episodes, MOST_COLUMNS)
    shard = EnvShard(role, total, range(total) if columns is None else columns)
    return shard, np.bincount(np.arange(job.episodes) % total)[[*shard.env_ids]]


class EpisodeSplitter:
    """Cuts segments into episodes, and keeps a fixed number per column.

    Args:
        quota: episodes to keep of every column, ``[B]``.
        max_steps: steps after which an episode is truncated; its column then waits for ``reset``.
    """

    def __init__(self, quota: np.ndarray, max_steps: int) -> None:
        self.left, self.max_steps = quota.copy(), max_steps
        self.played: list[tuple[float, int, Batch]] = []  # return, length and rows
        self.reset()

    def reset(self) -> None:
        """Drop open episodes: all columns begin new ones."""
        n = len(self.left)
        self._counted, self._capped = EpisodeStats(n), np.zeros(n, np.bool_)
        self._rows: list[list[Batch]] = [[] for _ in range(n)]  # rows of the open episode of every column
        self._steps = np.zeros(n, np.int64)
        self._ended: list[deque[Batch]] = [deque() for _ in range(n)]

    @property
    def waits(self) -> bool:
        """Return whether every column with episodes left waits for ``reset``."""
        return bool(self._capped[self.left > 0].all())

    def add(self, segment: Batch) -> None:
        """Add a segment ``[T+1, B]``, truncating episodes at ``max_steps``."""
        arrays, over = tree.map(torch.Tensor.numpy, segment), ended(segment).numpy()
        for b in range(len(self.left)):
            self._cut(arrays, over[:, b], b)
        self._counted.add(segment)
        for total, length, b in self._counted.drain():
            if self.left[b]:
                self.left[b] -= 1
                self.played.append((total, length, self._ended[b].popleft()))

    def _cut(self, arrays: Batch, over: np.ndarray, b: int) -> None:
        """Add the episodes of a column, which end where ``over [T]``, and keep the rows of the open one."""
        first, rows = arrays["is_first"][:, b], np.flatnonzero(arrays["valid"][:-1, b])
        if self._capped[b]:
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
            if over[last] or self._capped[b]:
                self._end(arrays, b, last + 1)
            rows = rows[len(rows) if self._capped[b] else n :]

    def _truncate(self, arrays: Batch, b: int, last: int) -> None:
        """Truncate the episode of a column after row ``last``, and ignore later rows."""
        arrays["valid"][last + 1 :, b], self._capped[b] = False, True
        for part in groups_of(arrays).values():
            part["truncated"][last, b] |= part.get("alive", arrays["valid"])[last, b] & ~part["terminated"][last, b]
            if "alive" in part:
                part["alive"][last + 1 :, b] = False

    def _end(self, arrays: Batch, b: int, final: int) -> None:
        """Assemble an episode; row ``final`` is its final observation."""
        if self.left[b]:
            row = tree.take(arrays, (np.array([final]), b))
            for part in (row, *groups_of(row).values()):
                for key in CORE.keys() & part.keys():
                    part[key][:] = 0
            self._ended[b].append(tree.cat([*self._rows[b], row]))
        self._rows[b], self._steps[b] = [], 0

    def drain(self) -> list[tuple[float, int, Batch]]:
        """Return (return, length, rows as arrays) of the episodes that ended since the last call."""
        played, self.played = self.played, []
        return played

    def state(self) -> Tree:
        """Return the open episodes, none of which is truncated."""
        rows = [tree.cat(pieces) if pieces else {} for pieces in self._rows]
        return {"rows": rows, "steps": self._steps, "counted": self._counted.state()}

    def load(self, state: Tree) -> None:
        self._rows = [[rows] if rows else [] for rows in state["rows"]]
        self._steps = state["steps"]
        self._counted.load(state["counted"])

    def batch(self) -> tuple[Batch, Batch]:
        """Return the episodes as columns, ``[L+1, episodes]``, in order of their ends, and their ``OF_EPISODE``."""
        returns, lengths, episodes = zip(*self.played, strict=True)
        longest = np.arange(max(lengths) + 1)
        padded = [tree.take(rows, np.minimum(longest, n)) for n, rows in zip(lengths, episodes, strict=True)]
        batch = tree.map(lambda *leaves: torch.from_numpy(np.stack(leaves, 1)), *padded)
        numbers = {"return": torch.tensor(returns, dtype=torch.float64), "length": torch.tensor(lengths)}
        return batch, numbers | ({"success": batch["is_success"][-1].double()} if "is_success" in batch else {})
