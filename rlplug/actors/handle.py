"""Handle of one actor: requests, liveness, and restarts after failures."""

from __future__ import annotations

import pickle
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import ray
from ray import ObjectRef
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from rlplug.actors.cluster import warn
from rlplug.plan import Actors
from rlplug.types import Batch, ConfigError, RunError, Tree

MAX_BACKOFF_S = 60.0
FULL = (ObjectStoreFullError, OutOfDiskError)
MAKE_ROOM = (
    "free disk space or raise hardware.ray.object_store_memory, or use a smaller model, or fewer rows or environments"
    " per round"
)


class Status(Enum):
    STARTING = auto()  # building its process or loading its state
    IDLE = auto()  # no requests
    PLAYING = auto()  # its oldest round is in progress
    PLAYED = auto()  # its oldest round is finished but not fetched
    RESTARTING = auto()  # failed; restarts after the backoff
    LOST = auto()  # failed; the run continues without it


@dataclass
class Request:
    """One round of collection by all actors, or jobs for one of them."""

    call: Literal["collect", "play"]
    what: tuple[Any, ...]  # rows and mode, or jobs and named weights
    statistics: Tree
    version: int
    weights: ObjectRef[Any]
    version_steps: int = 0


class Heartbeat:
    """The last known activity of an actor, from its answers to heartbeats and from results of its calls."""

    def __init__(self) -> None:
        self.seen, self.status = 0.0, ""  # time of its last step or request, and its activity then
        self._sent: tuple[ObjectRef[Any], float] | None = None  # unanswered heartbeat, and its time

    def note(self, status: str = "") -> None:
        """Note activity now; empty: of the same kind as before."""
        self.seen, self.status = time.monotonic(), status or self.status

    def silence(self, process: Any) -> float:
        """Send a heartbeat, or check for the answer to the last one; return the seconds without a sign of activity.

        Because the learner may have been busy, silence counts only from an unanswered heartbeat, or from the time in an
        answer.
        """
        if self._sent is None:
            answer = process.heartbeat.options(concurrency_group="heartbeat").remote()
            self._sent = answer, time.monotonic()
            return 0.0
        answer, at = self._sent
        if not ray.wait([answer], timeout=0)[0]:
            return time.monotonic() - at
        self._sent = None
        with suppress(RayError):  # its segment will raise the same error
            row, rows, seconds = ray.get(answer)
            self.seen = max(self.seen, at - seconds)
            self.status = f"at row {row} of {rows}" if rows else self.status
        return at - self.seen


class ActorHandle:
    """The process of one actor, its requested rounds, and the state from which a new process continues.

    Args:
        index: index of the actor in the run.
        create: ``(env_ids)``: creates and begins to build its process; returns the process and the pending call.
    """

    def __init__(self, index: int, env_ids: Sequence[int], cfg: Actors, create: Callable[..., Any]) -> None:
        self.index, self.env_ids, self.cfg, self._create = index, env_ids, cfg, create
        self.status = Status.STARTING
        self.state: Tree = None  # after the last fetched segment
        self.requests: deque[Request] = deque()  # rounds with segments not fetched yet, oldest first
        self.heartbeat = Heartbeat()
        self.errors: list[str] = []  # errors since its last segment
        self.restart_at, self.played_at = 0.0, 0.0
        self._idle_s, self._busy_s = 0.0, 0.0  # idle and busy seconds since ``drain``
        self._play_errors = 0  # those while it played
        self._restarts = 0  # since the start of the run
        self._process: Any = None
        self._setup: deque[ObjectRef[Any]] = deque()  # pending calls before it can play
        self._rounds: deque[tuple[ObjectRef[Batch], ObjectRef[bytes]]] = deque()  # segment and state of each request
        self._next_state: Tree = None  # after the oldest round
        self._version = -1  # version of its weights

    def __str__(self) -> str:
        first, last = self.env_ids[0], self.env_ids[-1]
        return f"actor {self.index} (environment{f's {first}-{last}' if last > first else f' {first}'})"

    # ---- requests -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the process, with the state and the rounds of its predecessor."""
        self.status, self._version = Status.STARTING, -1
        self.heartbeat = Heartbeat()
        self.heartbeat.note("starting")
        self._process, built = self._create(self.env_ids)
        self._setup.append(built)
        if self.state:
            self.load(self.state)
        for request in self.requests:
            self._play(request)

    def load(self, state: Tree) -> None:
        """Restore ``state``, with new episodes if it failed there more than once."""
        self.state, self.status = state, Status.STARTING
        self._setup.append(self._process.load.remote(state, max(0, self._play_errors - 1)))

    def request(self, request: Request) -> None:
        """Request one more round."""
        self.requests.append(request)
        if self._process is not None:
            self._play(request)

    def _play(self, request: Request) -> None:
        if not self._rounds:
            self.heartbeat.note()
        weights = None if self._version == request.version else request.weights
        self._version = request.version
        call = getattr(self._process, request.call).options(num_returns=2)
        self._rounds.append(call.remote(*request.what, request.statistics, weights))
        if self.status is Status.IDLE:
            self.status = Status.PLAYING

    # ---- results --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> ObjectRef[Any] | None:
        """Return the next call to wait for; None: there is none."""
        if self.status is Status.STARTING:
            return self._setup[0]
        return self._rounds[0][1] if self.status is Status.PLAYING else None

    @property
    def segment(self) -> ObjectRef[Batch]:
        """Return the segment of the oldest round."""
        return self._rounds[0][0]

    def receive(self, returned: ObjectRef[Any]) -> None:
        """Receive the result of ``pending``.

        Raises:
            RayError: the call failed.
        """
        value: Any = ray.get(returned)
        if self.status is Status.PLAYING:
            state = pickle.loads(value)
            idle, busy = state.pop("spent", (0.0, 0.0)) if state else (0.0, 0.0)
            self._idle_s, self._busy_s = self._idle_s + idle, self._busy_s + busy
            self._next_state, self.status = state or self.state, Status.PLAYED
            self.played_at = time.monotonic()
            return
        self._setup.popleft()
        if self.state is None:
            self.state = value
        self.heartbeat.note("started")
        if not self._setup:
            self.status = Status.PLAYING if self._rounds else Status.IDLE

    def finish_round(self) -> None:
        """Remove the oldest round, whose segment has been fetched."""
        self.requests.popleft()
        self._rounds.popleft()
        self.state, self._next_state = self._next_state, None
        self.errors, self._play_errors = [], 0
        self.heartbeat.note()
        self.status = Status.PLAYING if self._rounds else Status.IDLE

    def drain(self) -> tuple[float, float]:
        """Return the idle and busy seconds of rounds that ended since the last call.

        The current round counts when it ends.
        """
        spent, self._idle_s, self._busy_s = (self._idle_s, self._busy_s), 0.0, 0.0
        return spent

    # ---- failures -------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise ``TimeoutError``, with its last activity, if it has made no step for too long."""
        starting = self.status is Status.STARTING
        limit = self.cfg.start_timeout_s if starting else self.cfg.timeout_s
        if self.heartbeat.silence(self._process) > limit:
            short = self.short_of() if starting else ""
            way = f"; the cluster has no {short} free: see hardware.actors.num_cpus and num_gpus" if short else ""
            way = way or ("; raise hardware.actors.start_timeout_s to allow more" if starting else "")
            raise TimeoutError(f"no step for {limit:g} s; last seen {self.heartbeat.status}{way}")

    def short_of(self) -> str:
        """Return the resources that the cluster lacks for it; empty: none."""
        free, needed = ray.available_resources(), {"CPU": self.cfg.num_cpus, "GPU": self.cfg.num_gpus}
        return " and ".join(what for what, n in needed.items() if free.get(what, 0.0) < n)

    def fail(self, error: Exception) -> None:
        """Kill the process, and restart it later or continue without it.

        Raises:
            ConfigError: it cannot run as configured.
            RunError: it failed too often, or must not fail.
        """
        self.errors.append(_explain(error))
        self._play_errors += self.status is not Status.STARTING and self.requests[0].call == "collect"  # not in a job
        self.close()
        failures = len(self.errors)
        if self.cfg.on_failure != "stop" or failures > 1:  # otherwise the run ends with the same text
            warn(f"{self}: {self.errors[-1]}")
        if self.cfg.on_failure == "ignore" and self.state is not None:
            self.status = Status.LOST
            self.requests.clear()
        elif self.cfg.on_failure == "stop" or failures > self.cfg.max_restarts:
            times = f" failed {failures} times in a row; the first error" if failures > 1 else ""
            raise RunError(f"{self}{times}: {self.errors[0]}")
        elif self._restarts == self.cfg.max_total_restarts:
            limit = f"was restarted {self._restarts} times (hardware.actors.max_total_restarts), and failed again"
            raise RunError(f"{self} {limit}: {self.errors[0]}")
        else:
            self._restarts += 1
            self.status = Status.RESTARTING
            self.restart_at = time.monotonic() + min(self.cfg.backoff_s * 2 ** (failures - 1), MAX_BACKOFF_S)

    def close(self) -> None:
        """End the process."""
        with suppress(Exception):  # it may be dead
            ray.kill(self._process)
        self._process = self._next_state = None
        self._setup.clear()
        self._rounds.clear()


def _explain(error: Exception) -> str:
    """Describe the failure of an actor; raise errors that a restart cannot fix."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ConfigError):
        raise cause from None
    if isinstance(cause, FULL):
        raise no_room(cause) from None
    if isinstance(cause, RunError | TimeoutError):
        return str(cause)
    if isinstance(error, RayActorError):
        pid, ip = (re.search(rf"{what}: (\S+)", str(error)) for what in ("pid", "ip"))
        where = f" (process {pid[1]} on {ip[1]})" if pid and ip else ""
        is_node = "node has died" in str(error) or "node died" in str(error)
        return f"its {'machine was lost' if is_node else 'process died'}{where}"
    return str(error)


def no_room(error: Exception) -> RunError:
    """Return the error for a lack of room in Ray's object store, reported by ``error``."""
    reason = str(error).strip().partition("\n")[0]
    return RunError(f"Ray's object store is full, and so is the disk behind it ({reason}); {MAKE_ROOM}")
