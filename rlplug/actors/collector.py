"""Collection and asynchronous evaluation with Ray actors, on the learner's side. Ray is imported at their start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlplug import tree
from rlplug.actors import copies
from rlplug.actors.actor import Actor, EvalActor
from rlplug.api import Job, Rollout, Segment
from rlplug.buffer.episodes import side_by_side
from rlplug.collection.segment import CORE
from rlplug.context import ResolvedRun
from rlplug.contract.jobs import check_job
from rlplug.evaluation.evaluator import shares_of
from rlplug.host import copied
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.types import Batch, NamedWeights, Progress, RunError, Tree, groups_of

if TYPE_CHECKING:
    from rlplug.actors.pool import ActorPool


class RayCollector:
    """``api.Collector`` over Ray actors, each of which is a shard of this rank's environments."""

    def __init__(self, policy: BehaviorPolicy, resolved: ResolvedRun, progress: Progress) -> None:
        assert resolved.plan.actors is not None
        self.policy, self.resolved, self.progress = policy, resolved, progress
        self.cfg, self.env_ids = resolved.plan.actors, policy.ctx.env_ids
        share = resolved.config.num_envs // self.cfg.count
        self.shares = [self.env_ids[i : i + share] for i in range(0, len(self.env_ids), share)]
        self.pool: ActorPool = None  # type: ignore[assignment]  # until ``start``
        self._metrics = list[dict[str, float]]()  # of the environments' episodes, not logged yet
        self._buffers: dict[int, Batch] = {}  # one segment of all environments, by number of rows
        self._last_row: Tree = None
        self._since, self._waited = time.monotonic(), 0.0  # start of the interval, seconds waited in it
        columns = [slice(i, i + share) for i in range(0, len(self.env_ids), share)]
        with closing(policy.shard(self.env_ids[:1])) as probe:
            one = probe.spec
        self.spec = replace(one, row=tree.cat([one.row] * len(self.env_ids)), shards=columns)

    @property
    def in_flight(self) -> Sequence[int | None]:
        return [len(handle.requests) if handle in self.pool.alive else None for handle in self.pool.handles]

    def start(self) -> None:
        """Start the actors on the connected cluster.

        Raises:
            ConfigError: the actors cannot run as configured.
        """
        from rlplug.actors.pool import ActorPool

        first = self.env_ids[0] // len(self.shares[0])
        self.pool = ActorPool(self.cfg, self.shares, self.resolved, first, Actor)

    def submit(self, rollout: Rollout, shards: Sequence[int] | None = None) -> None:
        if self.pool.version != rollout.version:
            self.pool.broadcast(copies.acting_weights(self.policy), rollout.version)
        statistics = copies.statistics(self.policy) | {"env_steps": self.progress.env_steps}
        statistics["tasks"] = rollout.tasks
        self.pool.request(rollout.num_steps, rollout.mode, statistics, shards, rollout.version_steps)

    def poll(self, shards: int | None = None) -> list[Segment]:
        began = time.monotonic()
        if shards is None:
            handles = self.pool.alive
            oldest = min((handle.requests[0] for handle in handles), key=lambda request: request.version)
            columns = slice(0, len(self.env_ids))
            segments = [Segment(self._gather(), columns, 0, oldest.version, oldest.version_steps)]
        elif shards > len(self.pool.alive):
            raise RunError(f"the loop waits for {shards} actors at a time, but only {len(self.pool.alive)} are left")
        else:
            handles, segments = [], list[Segment]()
            for _ in range(shards):
                handle, request, part = self.pool.first()
                self._metrics += handle.state.pop("metrics", ())
                shard = self.pool.handles.index(handle)
                columns, versions = self.spec.shards[shard], (request.version, request.version_steps)
                segments.append(Segment(owned(part), columns, shard, *versions))
                handles.append(handle)
        self._waited += time.monotonic() - began
        self._metrics += [one for handle in handles for one in handle.state.pop("metrics", ())]
        copies.merge_exploration(self.policy, [handle.state for handle in handles])
        return segments

    def play(self, jobs: Sequence[Job], weights: NamedWeights) -> Iterator[tuple[int, Batch]]:
        """Distribute jobs to free actors, and yield the episodes as they end."""
        for job in jobs:
            check_job(job, weights, self.policy.algorithm, self.policy.ctx.spec)  # before an actor fails
        named = tree.map(lambda x: torch.as_tensor(x).detach().cpu().numpy(), dict(weights))
        statistics = copies.statistics(self.policy) | {"env_steps": self.progress.env_steps}
        acting, version = partial(copies.acting_weights, self.policy), self.progress.updates
        at = {id(job): n for n, job in enumerate(jobs)}
        for together, batches in self.pool.play(jobs, named, statistics, acting, version):
            yield from ((at[id(job)], owned(batch)) for job, batch in zip(together, batches, strict=True))

    def metrics(self) -> dict[str, float]:
        """Return the fractions of the time since the last call that the learner waited and that actors were idle."""
        now = time.monotonic()
        idle, busy = map(sum, zip(*(handle.drain() for handle in self.pool.handles), strict=True))
        shares = {"learner_idle": self._waited / (now - self._since), "actors_idle": idle / max(idle + busy, 1e-9)}
        self._since, self._waited = now, 0.0
        return shares

    def episode_metrics(self) -> list[dict[str, float]]:
        found, self._metrics = self._metrics, []
        return found

    def _gather(self) -> Batch:
        """Return one segment ``[T+1, B]`` with the columns of all actors; lost actors have no valid rows."""
        rows = self.pool.alive[0].requests[0].what[0]
        if rows not in self._buffers:
            self._buffers[rows] = tree.map(lambda x: torch.stack([x] * (rows + 1)), self.spec.row)
        segment, missing = self._buffers[rows], np.ones(len(self.env_ids), np.bool_)
        arrays = tree.map(torch.Tensor.numpy, segment)
        for handles, part in self.pool.gather():
            columns: Any = np.concatenate([handle.env_ids for handle in handles]) - self.env_ids[0]
            if columns[-1] - columns[0] < len(columns):  # contiguous; slices are faster
                columns = slice(columns[0], columns[-1] + 1)
            missing[columns] = False
            tree.put(arrays, np.s_[:, columns], part)
            del part  # so that Ray can reuse its memory for the next part
        if missing.any():
            if self._last_row is not None:  # row 0 repeats the last row of the previous segment
                tree.put(arrays, np.s_[:, missing], tree.take(self._last_row, np.s_[None, missing]))
            for part in (arrays, *groups_of(arrays).values()):
                for key in CORE.keys() & part.keys():
                    part[key][:, missing] = 0
        if self.cfg.on_failure == "ignore":
            self._last_row = copied(tree.take(arrays, -1))
        return segment

    def state(self) -> Tree:
        """Return the state of every actor after its last segment; ``env`` is None if environments cannot be saved."""
        states = [handle.state for handle in self.pool.handles]
        saved = all(state["collector"]["env"] is not None for state in states)
        return {"actors": states, "env": "actors" if saved else None, "metrics": [*self._metrics]}

    def load(self, state: Tree) -> None:
        self._metrics = list(state["metrics"])
        if self.pool:
            self.pool.load(state["actors"])

    def close(self) -> None:
        if self.pool:
            self.pool.close()


def owned(batch: Batch) -> Batch:
    """Return arrays as tensors of their own, because Ray uses the memory of the arrays again."""
    return tree.map(lambda x: torch.from_numpy(x.copy()), batch)


class AsyncEval:
    """Evaluates during training, one evaluation at a time: the episodes of ``Evaluator``, divided among actors.

    Raises:
        ConfigError: the actors cannot run as configured.
    """

    def __init__(self, policy: BehaviorPolicy, resolved: ResolvedRun) -> None:
        from rlplug.actors.pool import ActorPool

        actors = resolved.plan.actors
        assert actors is not None
        self.policy, self.playing = policy, False
        self.env_steps = 0  # steps of the policy in the current or last evaluation
        shares = [share for share in shares_of(policy.config.eval.episodes, actors.evaluation) if len(share)]
        # because episodes of a lost actor would be missing from the mean
        cfg = replace(actors, num_aggregation_workers=0, on_failure="recreate")
        self.pool = ActorPool(cfg, shares, resolved, actors.count, EvalActor)

    def begin(self, env_steps: int) -> None:
        """Begin to evaluate the current policy."""
        self.env_steps, self.playing = env_steps, True
        self.pool.broadcast(copies.acting_weights(self.policy), self.pool.version + 1)
        self.pool.request(env_steps, "greedy", copies.statistics(self.policy))

    def wait(self, stop: Callable[[], bool]) -> Batch | None:
        """Wait for the results of the episodes, and return them once; None if ``stop()`` returns True first."""
        while not self.pool.poll():
            if stop():
                return None
            time.sleep(0.05)
        self.playing = False
        return side_by_side([owned(numbers) for _, numbers in self.pool.gather()])

    def close(self) -> None:
        self.pool.close()
