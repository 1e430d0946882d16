"""The actors of one rank: they are asked for rounds, watched, and restarted when they fail."""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from rlplug.actors.actor import Actor, Aggregator, RemotePolicy
from rlplug.actors.cluster import warn
from rlplug.actors.handle import ActorHandle, Request, Status
from rlplug.context import ResolvedRun
from rlplug.plan import Actors
from rlplug.registry.installed import installed
from rlplug.types import Batch, ConfigError, RunError, Tree

POLL_S = 1.0
"""seconds between two looks at the actors that are waited for"""
REPORT_S = 10.0
"""seconds after which a wait is reported"""
START_S = 300.0
"""seconds that an actor may take to start: a cluster may have to find a machine, and libraries are loaded"""
MAX_BACKOFF_S = 60.0
FULL = (ObjectStoreFullError, OutOfDiskError)
MAKE_ROOM = (
    "more disk or hardware.ray.object_store_memory gives Ray more room; a smaller model, fewer rows or environments in"
    " a round need less"
)


class ActorPool:
    """Collects segments from actors, and restarts actors that fail.

    Every segment comes with the state after it, so that a restarted actor continues exactly where the last segment
    ended that was fetched. An actor that fails there again begins new episodes.

    Args:
        cfg: the actors' resources, and what to do when they fail.
        shares: the environments of each actor.
        resolved: the run; an actor computes with one thread.
        first: number of the first actor in the whole run.
        kind: what they do.

    Raises:
        ConfigError: an actor cannot run as configured.
        RunError: an actor fails too often while it starts.
    """

    def __init__(
        self,
        cfg: Actors,
        shares: Sequence[Sequence[int]],
        resolved: ResolvedRun,
        first: int = 0,
        kind: type[RemotePolicy] = Actor,
    ) -> None:
        self.cfg = cfg
        # heartbeats are answered while a segment is being collected
        actor: Any = ray.remote(concurrency_groups={"heartbeat": 1}, max_restarts=0)(kind)  # type: ignore[call-overload]
        actor = actor.options(num_cpus=cfg.num_cpus, num_gpus=cfg.num_gpus)
        plan, spec, versions = replace(resolved.plan, threads=1), pickle.dumps(resolved.spec), installed()

        def create(env_ids: Sequence[int]) -> tuple[Any, ObjectRef[Any]]:
            process = actor.remote()
            return process, process.build.remote(resolved.config.raw, spec, env_ids, plan, list(sys.path), versions)

        self.handles = [ActorHandle(first + i, share, create) for i, share in enumerate(shares)]
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
        """All actors but those that the run goes on without."""
        return [handle for handle in self.handles if handle.status is not Status.LOST]

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def load(self, states: Sequence[Tree]) -> None:
        """Let every actor continue from its state."""
        for handle, state in zip(self.handles, states, strict=True):
            handle.load(state)

    def request(self, request: Request) -> None:
        """Ask every actor for one more round."""
        for handle in self.alive:
            handle.request(request)

    def put(self, weights: Any) -> ObjectRef[Any]:
        """Store weights for all actors.

        Raises:
            RunError: there is no room for them.
        """
        try:
            return ray.put(weights)
        except FULL as error:
            raise RunError(_full(error)) from None

    def gather(self) -> Iterator[tuple[list[ActorHandle], Batch]]:
        """Yield the segments of the oldest round, each with the actors that collected it.

        They come one after another: Ray can reuse the memory of a segment once the caller has dropped it.

        Raises:
            ConfigError: an actor cannot run as configured.
            RunError: an actor failed too often, or may not fail.
        """
        self._wait()
        for aggregator, group in self._groups():
            with suppress(RayError):  # fetching them one by one tells whose it was
                if aggregator is not None:
                    yield group, self._fetch(group, aggregator)
                    continue
            for handle in group:
                while handle.status is not Status.LOST:
                    try:
                        yield [handle], self._fetch([handle])
                        break
                    except RayError as error:
                        self._fail(handle, error)
                        self._wait()
        for handle in self.alive:
            handle.finish_round()

    def _fetch(self, group: Sequence[ActorHandle], aggregator: Any = None) -> Batch:
        """Return the oldest segments of some actors as one.

        Raises:
            RayError: it is lost, or does not come.
        """
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

    def _groups(self) -> list[tuple[Any, list[ActorHandle]]]:
        """Return which aggregator concatenates whose segments; None: they are fetched one by one."""
        alive, n = self.alive, len(self._aggregators)
        if not n:
            return [(None, [handle]) for handle in alive]
        cuts = [len(alive) * i // n for i in range(n + 1)]
        return [(self._aggregators[i], alive[cuts[i] : cuts[i + 1]]) for i in range(n) if cuts[i] < cuts[i + 1]]

    def close(self) -> None:
        for handle in self.handles:
            handle.close()
        for aggregator in self._aggregators:
            with suppress(Exception):
                ray.kill(aggregator)

    # ---- waiting --------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look after the actors, and return whether the oldest round can be gathered without waiting."""
        return not self._look_after(0.0)

    def _wait(self) -> None:
        """Wait until every actor has started and has finished the oldest round that it was asked for."""
        reported = time.monotonic()
        while waiting := self._look_after(POLL_S):
            now = time.monotonic()
            if now - reported > REPORT_S:
                reported = now
                warn(
                    f"waiting for {'; '.join(f'{h}, {h.last_status}, {now - h.last_seen:.0f} s ago' for h in waiting)}"
                )
                if any(h.status is Status.STARTING for h in waiting) and (short := self._short_of()):
                    warn(f"the cluster has no {short} free for another actor at the moment")

    def _short_of(self) -> str:
        """Return the resources of which the cluster has too few free for an actor; empty: none."""
        free, needed = ray.available_resources(), {"CPU": self.cfg.num_cpus, "GPU": self.cfg.num_gpus}
        return " and ".join(what for what, n in needed.items() if free.get(what, 0.0) < n)

    def _look_after(self, timeout: float) -> list[ActorHandle]:
        """Receive results, restart actors whose time has come, and end those that hang.

        Returns:
            The actors that are still waited for after ``timeout`` seconds.
        """
        for handle in self.handles:
            if handle.status is Status.RESTARTING and time.monotonic() >= handle.restart_at:
                handle.start()
        restarting = any(handle.status is Status.RESTARTING for handle in self.handles)
        timeout = min(timeout, 0.1) if restarting else timeout
        waiting = {ref: handle for handle in self.handles if (ref := handle.pending) is not None}
        if waiting:
            for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)[0]:
                handle = waiting.pop(ref)
                try:
                    handle.receive()
                except RayError as error:
                    self._fail(handle, error)
            for handle in waiting.values():
                self._check_alive(handle)
        elif restarting:
            time.sleep(timeout)
        return [h for h in self.handles if h.pending is not None or h.status is Status.RESTARTING]

    def _check_alive(self, handle: ActorHandle) -> None:
        """End an actor that has made no step for too long."""
        starting = handle.status is Status.STARTING
        limit = START_S if starting else self.cfg.timeout_s
        if handle.silent_for() > limit:
            reason = f"no step for {limit:g} s; last seen {handle.last_status}"
            if starting and (short := self._short_of()):
                reason += f"; the cluster has no {short} free: see hardware.actors.num_cpus and num_gpus"
            self._fail(handle, TimeoutError(reason))

    def _fail(self, handle: ActorHandle, error: Exception) -> None:
        """End an actor that failed; restart it later, or go on without it.

        Raises:
            ConfigError: it cannot run as configured.
            RunError: it failed too often, or may not fail.
        """
        reason = _explain(error)
        warn(f"{handle}: {reason}")
        handle.fail(reason)
        if self.cfg.on_failure == "ignore" and handle.state is not None:
            handle.give_up()
            if not self.alive:
                raise RunError(f"no actor is left; the last one was {handle}: {reason}")
        elif self.cfg.on_failure == "stop" or handle.failures > self.cfg.max_restarts:
            times = f" failed {handle.failures} times in a row; the first error" if handle.failures > 1 else ""
            raise RunError(f"{handle}{times}: {handle.first_error}")
        else:
            handle.restart_in(min(self.cfg.backoff_s * 2 ** (handle.failures - 1), MAX_BACKOFF_S))


def _explain(error: Exception) -> str:
    """Return what happened to an actor, in words.

    Raises:
        ConfigError: it cannot run as configured.
        RunError: Ray has no room left.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ConfigError):
        raise cause from None
    if isinstance(cause, FULL):
        raise RunError(_full(cause)) from None
    if isinstance(cause, RunError | TimeoutError):
        return str(cause)
    if isinstance(error, RayActorError):
        pid, ip = (re.search(rf"{what}: (\S+)", str(error)) for what in ("pid", "ip"))
        where = f" (process {pid[1]} on {ip[1]})" if pid and ip else ""
        is_node = "node has died" in str(error) or "node died" in str(error)
        return f"its {'machine was lost' if is_node else 'process died'}{where}"
    return str(error)


def _full(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"Ray's object store is full, and so is the disk behind it ({first_line}); {MAKE_ROOM}"
