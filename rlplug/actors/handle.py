"""One actor as the learner sees it."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from rlplug.types import Batch, Mode, Tree


class Status(Enum):
    STARTING = auto()
    """its process is being built, or loads its state"""
    IDLE = auto()
    """it has nothing to play"""
    PLAYING = auto()
    """its oldest round is not finished"""
    PLAYED = auto()
    """its oldest round is finished, and not fetched yet"""
    RESTARTING = auto()
    """it failed, and is started again after a while"""
    LOST = auto()
    """it failed, and the run goes on without it"""


@dataclass
class Request:
    """One round of collection, the same for all actors."""

    rows: int
    mode: Mode
    statistics: Tree
    version: int
    weights: ObjectRef[Any]


class ActorHandle:
    """The process of one actor, the rounds it was asked for, and the state from which a new process continues.

    Args:
        index: number of the actor in the whole run.
        create: creates its process and begins to build what it plays with; returns the process and the pending call.
    """

    def __init__(
        self, index: int, env_ids: Sequence[int], create: Callable[[Sequence[int]], tuple[Any, ObjectRef[Any]]]
    ) -> None:
        self.index, self.env_ids, self._create = index, env_ids, create
        self.status = Status.STARTING
        self.state: Tree = None
        """after the last segment that was fetched"""
        self.requests: deque[Request] = deque()
        """rounds whose segments were not fetched yet, oldest first"""
        self.last_seen, self.last_status = 0.0, ""
        """when it last made a step or got something to do, and what it did then"""
        self.failures, self.play_failures, self.first_error = 0, 0, ""
        """since its last segment: all of them, those that happened while it played, and what the first one was"""
        self.restart_at = 0.0
        self._process: Any = None
        self._setup: deque[ObjectRef[Any]] = deque()  # calls that have to return before it can play
        self._rounds: deque[tuple[ObjectRef[Batch], ObjectRef[bytes]]] = deque()  # segment and state of each request
        self._next_state: Tree = None  # after the oldest round
        self._version = -1  # of the weights it has
        self._heartbeat: ObjectRef[Any] | None = None
        self._heartbeat_sent = 0.0

    def __str__(self) -> str:
        first, last = self.env_ids[0], self.env_ids[-1]
        return f"actor {self.index} (environment{f's {first}-{last}' if last > first else f' {first}'})"

    # ---- what it is told ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the process, and give it the state and the rounds that an earlier one had."""
        self.status, self._version = Status.STARTING, -1
        self.last_seen, self.last_status = time.monotonic(), "starting"
        self._process, built = self._create(self.env_ids)
        self._setup.append(built)
        if self.state is not None:
            self.load(self.state)
        for request in self.requests:
            self._play(request)

    def load(self, state: Tree) -> None:
        """Continue from ``state``; with new episodes, if it failed there more than once."""
        self.state = state
        if self._process is not None:
            self._setup.append(self._process.load.remote(state, max(0, self.play_failures - 1)))
            self.status = Status.STARTING

    def request(self, request: Request) -> None:
        """Ask for one more round."""
        self.requests.append(request)
        if self._process is not None:
            self._play(request)

    def _play(self, request: Request) -> None:
        if not self._rounds:
            self.last_seen = time.monotonic()
        weights = None if self._version == request.version else request.weights
        self._version = request.version
        collect = self._process.collect.options(num_returns=2)
        self._rounds.append(collect.remote(request.rows, request.mode, request.statistics, weights))
        if self.status is Status.IDLE:
            self.status = Status.PLAYING

    # ---- what it returns ------------------------------------------------------------------------------------------

    @property
    def pending(self) -> ObjectRef[Any] | None:
        """The call that has to return next; None: there is nothing to wait for."""
        if self.status is Status.STARTING:
            return self._setup[0]
        return self._rounds[0][1] if self.status is Status.PLAYING else None

    @property
    def segment(self) -> ObjectRef[Batch]:
        """That of the oldest round."""
        return self._rounds[0][0]

    def receive(self) -> None:
        """Take the result of ``pending``, which has returned.

        Raises:
            RayError: the call failed.
        """
        assert self.pending is not None
        value: Any = ray.get(self.pending)
        if self.status is Status.PLAYING:
            self._next_state, self.status = pickle.loads(value), Status.PLAYED
            return
        self._setup.popleft()
        if self.state is None:
            self.state = value
        self.last_seen, self.last_status = time.monotonic(), "started"
        if not self._setup:
            self.status = Status.PLAYING if self._rounds else Status.IDLE

    def finish_round(self) -> None:
        """Forget the oldest round, whose segment was fetched."""
        self.requests.popleft()
        self._rounds.popleft()
        self.state, self._next_state = self._next_state, None
        self.failures, self.play_failures, self.first_error = 0, 0, ""
        self.last_seen = time.monotonic()
        self.status = Status.PLAYING if self._rounds else Status.IDLE

    def silent_for(self) -> float:
        """Ask for a sign of life, and return the seconds since the last environment step, as far as is known.

        The learner may have been busy for long: silence is counted only from a heartbeat that was sent and not
        answered, or from what an answer says.
        """
        if self._heartbeat is None:
            heartbeat = self._process.heartbeat.options(concurrency_group="heartbeat")
            self._heartbeat, self._heartbeat_sent = heartbeat.remote(), time.monotonic()
            return 0.0
        if not ray.wait([self._heartbeat], timeout=0)[0]:
            return time.monotonic() - self._heartbeat_sent
        with suppress(RayError):  # its segment will raise the same
            row, rows, seconds = ray.get(self._heartbeat)
            self.last_seen = max(self.last_seen, self._heartbeat_sent - seconds)
            if rows:
                self.last_status = f"at row {row} of {rows}"
        self._heartbeat = None
        return self._heartbeat_sent - self.last_seen

    # ---- when it fails --------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Count a failure, and end the process."""
        self.failures += 1
        self.play_failures += self.status is not Status.STARTING
        self.first_error = self.first_error or reason
        self.close()

    def restart_in(self, seconds: float) -> None:
        self.status, self.restart_at = Status.RESTARTING, time.monotonic() + seconds

    def give_up(self) -> None:
        self.status = Status.LOST
        self.requests.clear()

    def close(self) -> None:
        """End the process."""
        with suppress(Exception):  # it may be gone
            ray.kill(self._process)
        self._process = self._heartbeat = self._next_state = None
        self._setup.clear()
        self._rounds.clear()
