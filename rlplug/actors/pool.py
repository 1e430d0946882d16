"""The actors of one rank: requests, health checks and restarts."""

from __future__ import annotations

import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError

from rlplug.actors.actor import Aggregator, RemotePolicy
from rlplug.actors.cluster import warn
from rlplug.actors.handle import FULL, MAKE_ROOM, ActorHandle, Request, Status, no_room
from rlplug.api import Job
from rlplug.collection.play import rounds
from rlplug.context import ResolvedRun
from rlplug.plan import Actors
from rlplug.registry.discovery import installed
from rlplug.script import dumps
from rlplug.types import Mode, RunError, Tree

POLL_S = 1.0  # interval of health checks while waiting
REPORT_S = 10.0  # reports a wait after this time


class ActorPool:
    """Collects segments from actors, and restarts failed actors.

    Every segment comes with the state after it, so a restarted actor continues exactly after its last fetched segment.
    An actor that fails there again begins new episodes.

    Args:
        shares: environments of each actor.
        first: index in the run of the first actor.
        kind: class of the actors.

    Raises:
        ConfigError: an actor cannot run as configured.
        RunError: an actor fails too often during its start.
    """

    def __init__(
        self, cfg: Actors, shares: Sequence[Sequence[int]], resolved: ResolvedRun, first: int, kind: type[RemotePolicy]
    ) -> None:
        self.cfg = cfg
        self.version = -1  # version of the last broadcast weights
        self._weights: Any = None
        # so that heartbeats are answered during collection
        actor: Any = ray.remote(concurrency_groups={"heartbeat": 1}, max_restarts=0)(kind)  # type: ignore[call-overload]
        actor = actor.options(num_cpus=cfg.num_cpus, num_gpus=cfg.num_gpus)
        plan, spec, versions = replace(resolved.plan, threads=1), pickle.dumps(resolved.spec), installed()
        objects = dumps(resolved.config.raw | {"callbacks": []})  # which are called by ranks

        def create(env_ids: Sequence[int]) -> tuple[Any, ObjectRef[Any]]:
            process = actor.remote()
            return process, process.build.remote(
                resolved.config.raw, objects, spec, env_ids, plan, list(sys.path), versions
            )

        self.handles = [ActorHandle(first + i, share, cfg, create) for i, share in enumerate(shares)]
        aggregator: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Aggregator)  # type: ignore[call-overload]
        self._aggregators = [aggregator.remote() for _ in range(min(cfg.num_aggregation_workers, len(shares)))]
        try:
            for handle in self.handles:
                handle.start()
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> list[ActorHandle]:
        """Return all actors that are not lost."""
        return [handle for handle in self.handles if handle.status is not Status.LOST]

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def load(self, states: Sequence[Tree]) -> None:
        """Restore the state of every actor."""
        for handle, state in zip(self.handles, states, strict=True):
            handle.load(state)

    def broadcast(self, weights: Any, version: int) -> None:
        """Send weights to all actors, for rounds requested later.

        Raises:
            RunError: Ray's object store is full.
        """
        self.version, self._weights = version, _stored(weights)

    def request(
        self, rows: int, mode: Mode, statistics: Tree, actors: Sequence[int] | None = None, version_steps: int = 0
    ) -> None:
        """Request one more round from all actors, or some, with the last broadcast weights."""
        request = Request("collect", (rows, mode), statistics, self.version, self._weights, version_steps)
        for handle in self.handles if actors is None else [self.handles[i] for i in actors]:
            if handle.status is not Status.LOST:
                handle.request(request)

    def play(
        self, jobs: Sequence[Job], named: Any, statistics: Tree, weights: Callable[[], Any], version: int
    ) -> Iterator[tuple[Sequence[Job], Any]]:
        """Yield jobs that were played together, and the episodes of each, as they end; free actors take the next ones.

        Actors receive no other requests meanwhile. The jobs of a failed actor go to the next free one.

        Args:
            weights: returns the weights of ``version``, called if they are not the last broadcast ones.

        Raises:
            ConfigError, RunError: see ``gather``.
        """
        acting = self._weights if version == self.version else _stored(weights())
        stored = _stored(named)
        waiting = deque(rounds(jobs, -(-len(jobs) // len(self.alive))))
        playing: dict[ActorHandle, list[Job]] = {}
        while waiting or playing:
            for handle in self.handles:
                if handle.status in (Status.LOST, Status.RESTARTING) and handle in playing:
                    waiting.appendleft(playing.pop(handle))
                    handle.requests.clear()
                if handle.status is Status.IDLE and waiting:
                    playing[handle] = waiting.popleft()
                    handle.request(Request("play", (playing[handle], stored), statistics, version, acting))
            self._look_after(POLL_S, for_all=False)
            for handle in [handle for handle in playing if handle.status is Status.PLAYED]:
                if (episodes := self._segment(handle)) is not None:
                    handle.finish_round()
                    yield playing.pop(handle), episodes

    def gather(self) -> Iterator[tuple[Sequence[ActorHandle], Any]]:
        """Yield the segments of the oldest round, each with the actors that collected it.

        Ray can reuse the memory of a segment once the caller has dropped it, before the next one.

        Raises:
            ConfigError: an actor cannot run as configured.
            RunError: an actor failed too often, or may not fail.
        """
        self._wait()
        aggregators = self._aggregators or [None]
        groups: Any = np.array_split(np.array(self.alive, dtype=object), len(aggregators))
        for aggregator, group in zip(aggregators, groups, strict=True):
            with suppress(RayError):  # fetching them one by one finds the failed actor
                if aggregator is not None and len(group):
                    yield group, self._fetch(group, aggregator)
                    continue
            for handle in group:
                while handle.status is not Status.LOST:
                    if (segment := self._segment(handle)) is not None:
                        yield [handle], segment
                        del segment  # so that Ray can reuse its memory for the next one
                        break
                    self._wait()
        for handle in self.alive:
            handle.finish_round()

    def first(self) -> tuple[ActorHandle, Request, Any]:
        """Return the first finished segment, with its actor and request.

        Raises:
            ConfigError: an actor cannot run as configured.
            RunError: an actor failed too often, or may not fail.
        """
        while True:
            self._wait(for_all=False)
            ready = [handle for handle in self.handles if handle.status is Status.PLAYED]
            handle = min(ready, key=lambda handle: handle.played_at)
            if (segment := self._segment(handle)) is not None:
                request = handle.requests[0]
                handle.finish_round()
                return handle, request, segment

    def _segment(self, handle: ActorHandle) -> Any:
        """Return the oldest segment of an actor; None: it is lost, and the actor has failed."""
        try:
            return self._fetch([handle])
        except RayError as error:
            self._fail(handle, error)

    def _fetch(self, group: Sequence[ActorHandle], aggregator: Any = None) -> Any:
        """Return the oldest segments of some actors as one; raise ``RayError`` if it is lost or does not arrive."""
        segments = [handle.segment for handle in group]
        segment = aggregator.concatenate.remote(*segments) if aggregator else segments[0]
        start = time.monotonic()
        while (left := start + self.cfg.timeout_s - time.monotonic()) > 0:
            try:
                return ray.get(segment, timeout=min(left, REPORT_S))
            except GetTimeoutError:
                waited = time.monotonic() - start
                warn(f"waiting for the segment of {' and '.join(map(str, group))}, collected {waited:.0f} s ago")
        raise GetTimeoutError(f"its segment did not arrive within {self.cfg.timeout_s:g} s; {MAKE_ROOM}")

    def close(self) -> None:
        for handle in self.handles:
            handle.close()
        for aggregator in self._aggregators:
            with suppress(Exception):
                ray.kill(aggregator)

    # ---- waiting --------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Process results and failures of actors, and return whether the oldest round is complete."""
        return not self._look_after(0.0)

    def _wait(self, for_all: bool = True) -> None:
        """Wait until every actor, or one, has started and finished its oldest round."""
        reported = time.monotonic()
        while waiting := self._look_after(POLL_S, for_all):
            now = time.monotonic()
            if not for_all and any(handle.status is Status.PLAYED for handle in self.handles):
                return
            if now - reported > REPORT_S:
                reported = now
                seen = [f"{h}, {h.heartbeat.status}, {now - h.heartbeat.seen:.0f} s ago" for h in waiting]
                warn(f"waiting for {'; '.join(seen)}")
                if any(h.status is Status.STARTING for h in waiting) and (short := waiting[0].short_of()):
                    warn(f"the cluster has no {short} free for another actor")

    def _look_after(self, timeout: float, for_all: bool = True) -> list[ActorHandle]:
        """Wait for results, restart and kill actors as due, and return the actors still pending."""
        for handle in self.handles:
            if handle.status is Status.RESTARTING and time.monotonic() >= handle.restart_at:
                handle.start()
        restarting = any(handle.status is Status.RESTARTING for handle in self.handles)
        timeout = min(timeout, 0.1) if restarting else timeout
        waiting = {ref: handle for handle in self.handles if (ref := handle.pending) is not None}
        if restarting and not waiting:
            time.sleep(timeout)
        timeout = 0.0 if not for_all and any(handle.status is Status.PLAYED for handle in self.handles) else timeout
        returned = ray.wait(list(waiting), num_returns=len(waiting) if for_all else 1, timeout=timeout)[0]
        for ref, handle in waiting.items():
            try:
                if ref in returned:
                    handle.receive(ref)
                else:
                    handle.check_alive()
            except (RayError, TimeoutError) as error:
                self._fail(handle, error)
        return [h for h in self.handles if h.pending is not None or h.status is Status.RESTARTING]

    def _fail(self, handle: ActorHandle, error: Exception) -> None:
        handle.fail(error)
        if not self.alive:
            raise RunError(f"no actor is left; the last one was {handle}: {handle.errors[-1]}")


def _stored(x: Any) -> ObjectRef[Any]:
    """Put ``x`` into Ray's object store; raise ``RunError`` if it is full."""
    try:
        return ray.put(x)
    except FULL as error:
        raise no_room(error) from None
