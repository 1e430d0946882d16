"""Lists of environments in worker processes, which write their rows into memory that all share."""

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

from rlplug import tree
from rlplug.envs.checking import check_seeds
from rlplug.envs.env_list import tell_once
from rlplug.envs.goals import EnvGoals, goals_of
from rlplug.envs.spec_json import mismatch
from rlplug.envs.worker import CALL, FAILED, NOT_CLOSED, STEP, columns_of, not_sent, read, send, shared_rows
from rlplug.types import Batch, ConfigError, EnvSpec, EnvTraits, RunError, Tree

ALIVE_EVERY = 1.0  # seconds after which a worker that says nothing is looked at
PATIENCE = 5.0  # seconds in which a worker should end when asked to
ENTRY = "import sys; sys.path[:] = {path!r}; from rlplug.envs.worker import work; work({channel}, {memory})"


class Subprocess:
    """Single environments in worker processes, as one ``VecEnv``: row for row what one ``EnvList`` of them gives.

    A worker is a fresh interpreter, neither forked nor given the main module: it is safe beside threads, and starts
    from scripts without a guard. It holds an ``EnvList`` of several columns, whose arrays are a part of one anonymous
    shared memory; a step costs it one byte each way. Memory and workers end with this process, however it ends.

    The arrays that ``reset`` and ``step`` return are overwritten by the next call.

    Args:
        make: makes one environment; it is pickled, and nothing of it may be defined in the main module.
        env_ids: the environments' global numbers.
        workers: how many processes at most; None: as many as there are cores.
        options: as of ``EnvList``.

    Raises:
        ConfigError: the environments cannot be made, not sent to a process, or not served.
    """

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        env_ids: Sequence[int],
        workers: int | None = None,
        check_bounds: bool = True,
        **options: Any,
    ) -> None:
        self.num_envs = n = len(env_ids)
        self.traits = EnvTraits(check_bounds=check_bounds, goals=partial(_goals, make))
        try:
            pickle.dumps(make)
        except Exception as error:
            raise not_sent(error) from error
        memory = _anonymous_file()
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _end, self._workers)
        try:
            for ids in np.array_split(np.arange(n), min(workers or _cores(), n)):
                self._workers.append(_Worker(range(int(ids[0]), int(ids[-1]) + 1), [env_ids[i] for i in ids], memory))
            for worker in self._workers:
                worker.send((make, worker.env_ids, options))
            specs: list[EnvSpec] = self._answers()
            self.spec = specs[0]
            for worker, spec in zip(self._workers, specs, strict=True):
                if difference := mismatch(self.spec, spec):
                    raise ConfigError("env", f"environment {worker.env_ids[0]} is not like the first one: {difference}")
            self._rows = shared_rows(memory, self.spec, n)
            self._call("place", [(n, worker.columns) for worker in self._workers])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
        self._action: np.ndarray = self._rows.pop("action")
        if options.get("remake") is None:
            del self._rows["restarted"]
        self._first = {key: self._rows[key] for key in ("obs", *self.spec.extras)}

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin episode 0 of every column.

        Raises:
            ValueError: not one seed a column.
            RunError: an environment raises, or says what its spaces do not allow; or a worker died.
        """
        check_seeds(seeds, self.num_envs)
        self._call("reset", [[int(seeds[i]) for i in worker.columns] for worker in self._workers])
        return dict(self._first)

    def step(self, action: np.ndarray) -> Batch:
        """One step of every column; a column whose row is final begins its next episode instead.

        Raises:
            RunError: as ``reset``.
        """
        self._action[:] = action
        for worker in self._workers:
            worker.go()
        self._answers()
        return dict(self._rows)

    def state(self) -> Tree | None:
        """As of one ``EnvList`` with all columns. Warns as that does."""
        states = self._tell(self._call("state", [None] * len(self._workers)))
        if any(state is None for state in states):
            return None
        joined = {key: [x for state in states for x in state[key]] for key in ("seeds", "episodes", "actions")}
        return joined | {"obs": tree.map(np.array, self._rows["obs"])}

    def load(self, state: Tree) -> None:
        """Replay every column's current episode. Warns where an environment did not do the same again."""
        parts = [
            {key: [state[key][i] for i in worker.columns] for key in ("seeds", "episodes", "actions")}
            | {"obs": columns_of(state["obs"], worker.columns)}
            for worker in self._workers
        ]
        self._tell(self._call("load", parts))

    def close(self) -> None:
        """End all workers. May be called twice."""
        self._close()

    def _call(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """The same call to every worker, with an argument each."""
        for worker, argument in zip(self._workers, arguments, strict=True):
            worker.send((name, argument))
        return self._answers()

    def _tell(self, answers: Sequence[tuple[Any, Sequence[str]]]) -> list[Any]:
        """Repeat the workers' warnings, each one once; the answers without them."""
        for text in dict.fromkeys(text for _, texts in answers for text in texts):
            warnings.warn(text, stacklevel=3)
        return [answer for answer, _ in answers]

    def _answers(self) -> list[Any]:
        """Of every worker, so that all are ready for the next call; then the first error is raised."""
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
    """A worker process, seen from the main one."""

    def __init__(self, columns: range, env_ids: Sequence[int], memory: int) -> None:
        self.columns, self.env_ids = columns, list(env_ids)
        self.channel, theirs = socket.socketpair()
        with theirs:
            code = ENTRY.format(path=sys.path, channel=theirs.fileno(), memory=memory)
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,  # never written to: its end is the end of this process
                pass_fds=(theirs.fileno(), memory),
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ,
            )
        self.channel.settimeout(ALIVE_EVERY)

    def go(self) -> None:
        """Have it step. If it has died, ``receive`` says so."""
        with suppress(OSError):
            self.channel.sendall(STEP)

    def send(self, message: Any) -> None:
        """Have it make a call. If it has died, ``receive`` says so."""
        self.channel.settimeout(None)
        with suppress(OSError):
            send(self.channel, CALL, message)
        self.channel.settimeout(ALIVE_EVERY)

    def receive(self) -> Any:
        """Its answer to the last message.

        Raises:
            RunError, ConfigError: the error that it met, or it died.
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
        """Have it close its environments; kill it if it does not."""
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
        """Called while it says nothing."""
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
        hint = "; mostly the machine has run out of memory" if how.endswith("SIGKILL") else ""
        return RunError(f"the worker process of environments {few} {how}{hint}")


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.channel.fileno() >= 0:
            worker.channel.shutdown(socket.SHUT_RDWR)
    for worker in workers:
        worker.end()


def _anonymous_file() -> int:
    """A file without a name, in memory where the system can: nothing is left of it when all who hold it end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlplug")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _goals(make: Callable[[], gymnasium.Env[Any, Any]]) -> EnvGoals | None:
    """Return goals as of ``EnvList``, by an environment in this process."""
    env = make()
    try:
        return goals_of(env)
    finally:
        env.close()
