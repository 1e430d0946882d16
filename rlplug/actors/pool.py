"""The actors of one rank: asked for rounds, watched, and made anew where they fail."""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from rlplug.actors.actor import Actor, Aggregator, Copy
from rlplug.actors.cluster import say
from rlplug.context import ResolvedRun
from rlplug.plan import Actors
from rlplug.registry.installed import installed
from rlplug.types import Batch, ConfigError, Mode, RunError, Tree

PULSE = 1.0
"""seconds between two looks at those that are waited for"""
REPORT = 10.0
"""seconds after which a wait is spoken of"""
START = 300.0
"""seconds in which an actor has to come up: machines may have to be found, libraries loaded"""
LONGEST_BACKOFF = 60.0
FULL = (ObjectStoreFullError, OutOfDiskError)
ROOM = (
    "more disk or hardware.ray.object_store_memory gives Ray more room; a smaller model, fewer rows or environments in"
    " a round need less"
)


@dataclass
class Request:
    """One round of collection, the same for all actors."""

    rows: int
    mode: Mode
    statistics: Tree
    version: int
    weights: ObjectRef[Any]


@dataclass
class Member:
    """One actor, and all that is needed to make it anew."""

    index: int
    env_ids: Sequence[int]
    handle: Any = None
    starting: deque[ObjectRef[Any]] = field(default_factory=deque)
    """what has to be done before it can play"""
    asked: deque[Request] = field(default_factory=deque)
    """rounds that were not received yet, oldest first"""
    playing: deque[tuple[ObjectRef[Batch], ObjectRef[bytes]]] = field(default_factory=deque)
    """their segments, and the state behind each"""
    state: Tree = None
    """behind the last segment that was received"""
    next_state: Tree = None
    """behind the oldest one of ``playing``, if that is there"""
    version: int = -1
    """of the weights that it has"""
    word: ObjectRef[Any] | None = None
    """the answer to where it is"""
    questioned: float = 0.0
    """when that was asked"""
    heard: float = 0.0
    """when it last did something, or got something to do"""
    said: str = "starting"
    failures: int = 0
    """since its last segment"""
    stumbles: int = 0
    """those of them that happened while it played"""
    why: str = ""
    """what went wrong first, of these"""
    due: float | None = None
    """when it is made anew"""
    lost: bool = False

    def __str__(self) -> str:
        first, last = self.env_ids[0], self.env_ids[-1]
        return f"actor {self.index} (environment{f's {first}-{last}' if last > first else f' {first}'})"

    @property
    def awaited(self) -> ObjectRef[Any] | None:
        """What it has to give next; None: nothing."""
        if self.starting:
            return self.starting[0]
        return self.playing[0][1] if self.playing and self.next_state is None else None


class Crew:
    """Segments of actors, whatever becomes of the actors.

    Every segment comes with the state behind it, so that an actor made anew goes on exactly where the last segment
    ended that was received. One that fails there again begins new episodes.

    Args:
        cfg: with what, and what to do when they fail.
        shares: the environments of each actor.
        resolved: the run; actors have one thread each.
        first: number of the first actor in the whole run.
        kind: what they are.

    Raises:
        ConfigError: an actor cannot be made.
        RunError: one dies of it.
    """

    def __init__(
        self,
        cfg: Actors,
        shares: Sequence[Sequence[int]],
        resolved: ResolvedRun,
        first: int = 0,
        kind: type[Copy] = Actor,
    ) -> None:
        self.cfg, self.versions, self.raw = cfg, installed(), resolved.config.raw
        self.plan, self.spec = replace(resolved.plan, threads=1), pickle.dumps(resolved.spec)
        self.members = [Member(first + i, share) for i, share in enumerate(shares)]
        # words are answered while a segment is being played
        self._actor: Any = ray.remote(concurrency_groups={"word": 1}, max_restarts=0)(kind)  # type: ignore[call-overload]
        aggregator: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Aggregator)  # type: ignore[call-overload]
        self._aggregators = [aggregator.remote() for _ in range(min(cfg.num_aggregation_workers, len(shares)))]
        try:
            for member in self.members:
                self._start(member)
            self._wait()
        except BaseException:
            self.close()
            raise

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> None:
        """Give every actor one more round to play."""
        for member in self.members:
            if not member.lost:
                member.asked.append(request)
                if member.due is None:
                    self._give(member, request)

    def put(self, weights: Any) -> ObjectRef[Any]:
        """Weights, once for all actors.

        Raises:
            RunError: there is no room for them.
        """
        try:
            return ray.put(weights)
        except FULL as error:
            raise RunError(_full(error)) from None

    def gather(self) -> Iterator[tuple[list[Member], Batch]]:
        """The segments of the oldest round that was asked for, each with those it is of.

        One after another: who lets go of a segment gives Ray its room for the next.

        Raises:
            RunError: actors failed too often, or as they must not.
        """
        self._wait()
        for aggregator, group in self._groups():
            with suppress(RayError):  # of whom, fetching them one by one tells
                if aggregator is not None:
                    yield group, self._arrived(group, aggregator)
                    continue
            for member in group:
                while not member.lost:
                    try:
                        yield [member], self._arrived([member])
                        break
                    except RayError as error:
                        self._failed(member, error)
                        self._wait()
        for member in self.members:
            if not member.lost:
                member.asked.popleft()
                member.playing.popleft()
                member.state, member.next_state = member.next_state, None
                member.failures, member.stumbles, member.why, member.heard = 0, 0, "", time.monotonic()

    def _arrived(self, group: Sequence[Member], aggregator: Any = None) -> Batch:
        """The oldest segment of some, beside one another.

        Raises:
            RayError: it is lost, or does not come.
        """
        segments = [member.playing[0][0] for member in group]
        segment = aggregator.beside.remote(*segments) if aggregator else segments[0]
        begun = time.monotonic()
        while (left := begun + self.cfg.timeout_s - time.monotonic()) > 0:
            try:
                return ray.get(segment, timeout=min(left, REPORT))
            except GetTimeoutError:
                waited = time.monotonic() - begun
                say(f"waiting for the segment of {' and '.join(map(str, group))}, played {waited:.0f} s ago")
        raise GetTimeoutError(f"its segment was played, but did not come in {self.cfg.timeout_s:g} s; {ROOM}")

    def _groups(self) -> list[tuple[Any, list[Member]]]:
        living = [member for member in self.members if not member.lost]
        n = len(self._aggregators)
        if not n:
            return [(None, [member]) for member in living]
        cuts = [len(living) * i // n for i in range(n + 1)]
        return [(self._aggregators[i], living[cuts[i] : cuts[i + 1]]) for i in range(n) if cuts[i] < cuts[i + 1]]

    # ---- one actor ------------------------------------------------------------------------------------------------

    def _start(self, member: Member) -> None:
        """Make an actor, or make it anew and give it what it was asked for."""
        member.due, member.version, member.heard, member.said = None, -1, time.monotonic(), "starting"
        options = {"num_cpus": self.cfg.num_cpus, "num_gpus": self.cfg.num_gpus}
        member.handle = self._actor.options(**options).remote()
        build = member.handle.build
        member.starting.append(
            build.remote(self.raw, self.spec, member.env_ids, self.plan, list(sys.path), self.versions)
        )
        if member.state is not None:
            self.load(member, member.state)
        for request in member.asked:
            self._give(member, request)

    def load(self, member: Member, state: Tree) -> None:
        """Let an actor go on where ``state`` says."""
        member.state = state
        if member.due is None and not member.lost:
            member.starting.append(member.handle.load.remote(state, max(0, member.stumbles - 1)))

    def _give(self, member: Member, request: Request) -> None:
        if not member.playing:
            member.heard = time.monotonic()
        weights = None if member.version == request.version else request.weights
        member.version = request.version
        play = member.handle.collect.options(num_returns=2)
        member.playing.append(play.remote(request.rows, request.mode, request.statistics, weights))

    def _failed(self, member: Member, error: Exception) -> None:
        """Make an actor anew, later; or do without it.

        Raises:
            ConfigError: it cannot run as configured.
            RunError: it failed too often, or must not fail.
        """
        why = _explained(error)
        say(f"{member}: {why}")
        member.failures += 1
        member.stumbles += not member.starting
        member.why = member.why or why
        self._end(member)
        if self.cfg.on_failure == "ignore" and member.state is not None:
            member.lost = True
            member.asked.clear()
            if all(other.lost for other in self.members):
                raise RunError(f"no actor is left; the last one, {member}: {why}")
        elif self.cfg.on_failure == "stop" or member.failures > self.cfg.max_restarts:
            times = f" failed {member.failures} times in a row, and first so" if member.failures > 1 else ""
            raise RunError(f"{member}{times}: {member.why}")
        else:
            wait = min(self.cfg.backoff_s * 2 ** (member.failures - 1), LONGEST_BACKOFF)
            member.due = time.monotonic() + wait

    def _end(self, member: Member) -> None:
        with suppress(Exception):  # it may be gone
            ray.kill(member.handle)
        member.handle = member.word = member.next_state = None
        member.starting.clear()
        member.playing.clear()

    def close(self) -> None:
        for member in self.members:
            self._end(member)
        for aggregator in self._aggregators:
            with suppress(Exception):
                ray.kill(aggregator)

    # ---- waiting --------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until every actor has started, and has played the oldest round that it was asked for."""
        spoken = time.monotonic()
        while awaited := self._look(PULSE):
            if time.monotonic() - spoken > REPORT:
                spoken = time.monotonic()
                say(f"waiting for {'; '.join(f'{m}, {m.said}, {spoken - m.heard:.0f} s ago' for m in awaited)}")
                if any(m.starting for m in awaited) and (busy := self._no_room()):
                    say(f"the cluster has no {busy} free for another actor at the moment")

    def _no_room(self) -> str:
        """Of what other programs leave too little; empty: of nothing."""
        free, needed = ray.available_resources(), {"CPU": self.cfg.num_cpus, "GPU": self.cfg.num_gpus}
        return " and ".join(what for what, n in needed.items() if free.get(what, 0.0) < n)

    def poll(self) -> bool:
        """Look after the actors; would ``gather`` give its round at once?"""
        return not self._look(0.0)

    def _look(self, patience: float) -> list[Member]:
        """Receive what there is, make anew whose time has come, and give up who does nothing.

        Returns:
            Those that are still waited for, after ``patience`` seconds.
        """
        for member in self.members:
            if member.due is not None and time.monotonic() >= member.due:
                self._start(member)
        later = [member for member in self.members if member.due is not None]
        awaited = {ref: member for member in self.members if (ref := member.awaited) is not None}
        if awaited:
            patience = min(patience, 0.1) if later else patience
            for ref in ray.wait(list(awaited), num_returns=len(awaited), timeout=patience)[0]:
                self._receive(awaited.pop(ref), ref)
        elif later and patience:
            time.sleep(min(patience, 0.1))
        for member in awaited.values():
            self._listen(member)
        return [member for member in self.members if member.awaited is not None or member.due is not None]

    def _receive(self, member: Member, ref: ObjectRef[Any]) -> None:
        try:
            value = ray.get(ref)
        except RayError as error:
            self._failed(member, error)
            return
        if not member.starting:
            member.next_state = pickle.loads(value)
            return
        member.starting.popleft()
        if member.state is None:
            member.state = value
        member.heard, member.said = time.monotonic(), "started"

    def _listen(self, member: Member) -> None:
        """Hear where an actor is; give it up if it has not moved for too long.

        Nobody may have looked for long: only what it answered counts, or that it was asked and did not answer.
        """
        now = time.monotonic()
        if member.word is None:
            member.word, member.questioned = member.handle.word.options(concurrency_group="word").remote(), now
            return
        silent = now - member.questioned
        if ray.wait([member.word], timeout=0)[0]:
            with suppress(RayError):  # which its segment will tell as well
                row, rows, still = ray.get(member.word)
                member.heard = max(member.heard, member.questioned - still)
                if rows:
                    member.said = f"at row {row} of {rows}"
            silent, member.word = member.questioned - member.heard, None
        patience = START if member.starting else self.cfg.timeout_s
        if silent > patience:
            why = f"did nothing for {patience:g} s; its last word: {member.said}"
            if member.starting and (busy := self._no_room()):
                why += f"; the cluster has no {busy} free: see hardware.actors.num_cpus and num_gpus"
            self._failed(member, TimeoutError(why))


def _explained(error: Exception) -> str:
    """What happened to an actor, in words.

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
        gone = "machine is gone" if "node has died" in str(error) or "node died" in str(error) else "process died"
        return f"its {gone}{where}"
    return str(error)


def _full(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"Ray's object store is full, and so is the disk behind it ({said}); {ROOM}"
