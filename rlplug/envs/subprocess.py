"""Lists of environments in worker processes, which write their rows to shared memory."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlplug import script, tree
from rlplug.envs.checking import check_seeds
from rlplug.envs.env_list import EnvList
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.goals import EnvGoals, goals_of
from rlplug.envs.numbering import numbered
from rlplug.envs.seeded import SeededList, first_of, observed, tell_once
from rlplug.envs.spec_json import mismatch
from rlplug.envs.worker import CALL, FAILED, NOT_CLOSED, STEP, columns_of, not_sent, read, send, shared_rows
from rlplug.types import Batch, ConfigError, EnvSpec, EnvTraits, RunError, Tree

ALIVE_EVERY = 1.0  # seconds between checks that a silent worker is alive
PATIENCE = 5.0  # seconds in which a worker should end after a request
ENTRY = "import sys; sys.path[:] = {path!r}; from rlplug.envs.worker import work; work({channel}, {memory})"


def check_workers(cfg: Any) -> None:
    """Raise ``ConfigError`` if ``cfg.workers`` would have no effect."""
    if cfg.workers is not None and cfg.vectorization != "subprocess":
        raise ConfigError("env.workers", f"has no effect with env.vectorization={cfg.vectorization}; use subprocess")


class Subprocess:
    """Environments in worker processes as one ``VecEnv``, with the same rows as one list of them.

    A worker is a fresh interpreter, which is not forked and does not import the main module: it is safe with threads,
    and scripts need no ``__main__`` guard. It holds a list of several columns, whose arrays are part of one anonymous
    shared memory; a step sends one byte each way. Memory and workers end with this process, however it ends.

    The arrays that ``reset`` and ``step`` return are overwritten by the next call.

    Args:
        make: makes one environment; it is pickled, and must not use definitions of the main module.
        env_ids: the environments' global numbers.
        workers: maximum number of processes; None: number of cores.
        listed: the list's class.
        options: as for ``listed``.

    Raises:
        ConfigError: the environments cannot be made or sent to a process, or are not supported.
    """

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self,
        make: Callable[[], Any],
        env_ids: Sequence[int],
        workers: int | None = None,
        check_bounds: bool = True,
        listed: type[SeededList] = EnvList,
        **options: Any,
    ) -> None:
        self.num_envs = n = len(env_ids)
        goals = partial(_goals, make) if listed is EnvList else None
        self._workers: list[_Worker] = []
        metrics = partial(_metrics, self._workers)
        self.traits = EnvTraits(check_bounds=check_bounds, goals=goals, metrics=metrics)
        try:
            objects = script.dumps()
            pickle.dumps(make)
        except Exception as error:
            raise not_sent(error) from error
        memory = _anonymous_file()
        self._close = weakref.finalize(self, _end, self._workers)
        try:
            for ids in np.array_split(np.arange(n), min(workers or _cores(), n)):
                self._workers.append(_Worker(range(int(ids[0]), int(ids[-1]) + 1), [env_ids[i] for i in ids], memory))
            for worker in self._workers:
                worker.send((objects, make, worker.env_ids, listed, options))
            specs: list[EnvSpec] = self._answers()
            self.spec = specs[0]
            for worker, spec in zip(self._workers, specs, strict=True):
                if difference := mismatch(self.spec, spec):
                    raise ConfigError("env", f"environment {worker.env_ids[0]} differs from the first: {difference}")
            self._rows = shared_rows(memory, self.spec, n)
            self._call("place", [(n, worker.columns) for worker in self._workers])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
        self._action: Tree = self._rows.pop("action")
        if options.get("remake") is None:
            del self._rows["restarted"]
        self._first = first_of(self.spec, self._rows)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start episode 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
            RunError: an environment raises, or returns values outside its spaces; or a worker died.
        """
        check_seeds(seeds, self.num_envs)
        own = [[int(seeds[i]) for i in worker.columns] for worker in self._workers]
        self._call("reset", [*zip(own, self._shares(tasks), strict=True)])
        return dict(self._first)

    def assign(self, tasks: Tree) -> None:
        self._call("assign", [(own,) for own in self._shares(tasks)])

    def _shares(self, tasks: Tree) -> list[Tree]:
        """Return the tasks of every worker's columns."""
        return [None if tasks is None else columns_of(tasks, worker.columns) for worker in self._workers]

    def step(self, action: Tree) -> Batch:
        """Step every column; a column whose row is final starts its next episode instead.

        Raises:
            RunError: as for ``reset``.
        """
        tree.put(self._action, slice(None), action)
        for worker in self._workers:
            worker.go()
        self._answers()
        return dict(self._rows)

    def state(self) -> Tree | None:
        """Return the state of one list with all columns, with the same warnings."""
        states = self._tell(self._call("state", [None] * len(self._workers)))
        if any(state is None for state in states):
            return None
        joined = {key: [x for state in states for x in state[key]] for key in states[0] if key != "obs"}
        return joined | {"obs": tree.map(np.array, observed(self.spec, self._rows))}

    def load(self, state: Tree) -> None:
        """Replay every column's current episode. Warns if an environment does not reproduce it."""
        parts = [
            {key: [state[key][i] for i in worker.columns] for key in state if key not in ("obs", METRICS)}
            | {"obs": columns_of(state["obs"], worker.columns)}
            | ({METRICS: state.get(METRICS, ())} if worker is self._workers[0] else {})
            for worker in self._workers
        ]
        self._tell(self._call("load", parts))

    def close(self) -> None:
        """End all workers. May be called twice."""
        self._close()

    def _call(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Make the same call in every worker, with one argument each."""
        for worker, argument in zip(self._workers, arguments, strict=True):
            worker.send((name, argument))
        return self._answers()

    def _tell(self, answers: Sequence[tuple[Any, Sequence[str]]]) -> list[Any]:
        """Repeat the workers' warnings, each once; return the answers without them."""
        for text in dict.fromkeys(text for _, texts in answers for text in texts):
            warnings.warn(text, stacklevel=3)
        return [answer for answer, _ in answers]

    def _answers(self) -> list[Any]:
        """Return every worker's answer; raise the first error after all are ready for the next call."""
        answers: list[Any] = []
        errors: list[Exception] = []
        for worker in self._workers:
            try:
                answers.append(worker.receive())
            except (RunError, ConfigError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers


class _Worker:
    """The main process's handle of a worker process."""

    def __init__(self, columns: range, env_ids: Sequence[int], memory: int) -> None:
        self.columns, self.env_ids = columns, list(env_ids)
        self.channel, theirs = socket.socketpair()
        with theirs:
            code = ENTRY.format(path=sys.path, channel=theirs.fileno(), memory=memory)
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                pass_fds=(theirs.fileno(), memory),
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ,
            )
        self.channel.settimeout(ALIVE_EVERY)

    def go(self) -> None:
        """Request a step. If the worker has died, ``receive`` raises."""
        with suppress(OSError):
            self.channel.sendall(STEP)

    def send(self, message: Any) -> None:
        """Request a call. If the worker has died, ``receive`` raises."""
        self.channel.settimeout(None)
        with suppress(OSError):
            send(self.channel, CALL, message)
        self.channel.settimeout(ALIVE_EVERY)

    def receive(self) -> Any:
        """Return the answer to the last message.

        Raises:
            RunError, ConfigError: the worker's error, or it died.
        """
        try:
            kind = read(self.channel, 1, self._look)
            if kind == STEP:
                return None
            (size,) = struct.unpack("<Q", read(self.channel, 8, self._look))
            answer = pickle.loads(read(self.channel, size, self._look))
        except (EOFError, ConnectionError):
            raise self._died() from None
        if kind == FAILED:
            raise answer
        return answer

    def end(self) -> None:
        """Close the worker's environments and end it; kill it if it does not end."""
        self.channel.close()
        try:
            if self.process.wait(PATIENCE) == NOT_CLOSED:
                tell_once("an environment raised in close(); env.vectorization=list shows what")
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _look(self) -> None:
        """Check that the silent worker is alive."""
        if self.process.poll() is not None:
            raise EOFError

    def _died(self) -> RunError:
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            how = "closed its channel"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        few = ", ".join(map(str, self.env_ids[:8])) + (", ..." if len(self.env_ids) > 8 else "")
        hint = "; usually because the machine ran out of memory" if how.endswith("SIGKILL") else ""
        return RunError(f"the worker process of environments {few} {how}{hint}")


def _metrics(workers: Sequence[_Worker]) -> list[tuple[int, dict[str, float]]]:
    """Return column and metrics of the episodes that ended since the last call."""
    for worker in workers:
        worker.send(("metrics", None))
    return [(worker.columns[i], own) for worker in workers for i, own in worker.receive()[0]]


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.channel.fileno() >= 0:
            worker.channel.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.end()


def _anonymous_file() -> int:
    """Return an anonymous file, in memory if the system supports it; it disappears with the processes that hold it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlplug")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _goals(make: Callable[[], gymnasium.Env[Any, Any]]) -> EnvGoals | None:
    """Return the goals of ``EnvList``, from an environment in this process."""
    env = numbered(make, 0)()
    try:
        return goals_of(env)
    finally:
        env.close()
