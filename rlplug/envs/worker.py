"""The worker process of ``envs.subprocess``, and the protocol of both sides."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from rlplug import script, tree
from rlplug.envs.env_list import lead_of, rows_of
from rlplug.envs.numbering import numbered
from rlplug.envs.seeded import SeededList
from rlplug.envs.spaces import allocate
from rlplug.types import Batch, ConfigError, EnvSpec, RunError

STEP, CALL, DONE, FAILED = b"s", b"c", b"d", b"f"
NOT_CLOSED = 70
"""exit status of a worker with an environment that raised in ``close``"""
HEADER = struct.Struct("<cQ")


def work(channel: int, memory: int) -> None:
    """Run a worker. It ends when its channel closes, at the latest with the main process."""
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGUSR1",
        "SIGUSR2",
    ):  # sent to the process group, but meant for the main process
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    for descriptor in (channel, memory):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_main, daemon=True).start()
    with socket.socket(fileno=channel) as main:
        try:
            _serve(main, memory)
        except (EOFError, ConnectionError):
            return


def _serve(main: socket.socket, memory: int) -> None:
    try:
        objects, make, env_ids, listed, options = receive(main)
        script.loads(objects)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:  # definitions of the main module are missing here
        return send(main, FAILED, not_sent(error))
    try:
        envs = listed([numbered(make, i)() for i in env_ids], env_ids=env_ids, **options)
    except (ConfigError, RunError) as error:
        return send(main, FAILED, error)
    except (Exception, SystemExit) as error:
        what = f"the environment cannot be created in a process ({type(error).__name__}: {error})"
        return send(main, FAILED, ConfigError("env", f"{what}; env.vectorization=list shows where it fails"))
    try:
        send(main, DONE, envs.spec)
        n, columns = receive(main)[1]
        rows = columns_of(shared_rows(memory, envs.spec, n), columns)
        envs.place(rows)
        send(main, DONE, None)
        action = rows["action"]
        while True:
            call = None if read(main, 1) == STEP else body(main)
            try:
                if call is None:
                    envs.step(action)
                    main.sendall(STEP)
                else:
                    send(main, DONE, _answer(envs, *call))
            except RunError as error:
                send(main, FAILED, error)
    finally:
        try:
            for env in envs.envs:
                env.close()
        except (Exception, SystemExit):
            os._exit(NOT_CLOSED)


def not_sent(error: Exception) -> ConfigError:
    return ConfigError(
        "env.vectorization",
        f"the environment cannot be sent to a process ({type(error).__name__}: {error}); use list, or register it in a"
        " module: env.id=module:Name-v0",
    )


def _answer(envs: SeededList, name: str, argument: Any) -> Any:
    if name in ("reset", "assign"):
        getattr(envs, name)(*argument)
        return None
    if name == "metrics":
        return (envs.traits.metrics() if envs.traits.metrics else []), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = envs.state() if name == "state" else envs.load(argument)
    return answer, [str(warning.message) for warning in caught]


def _end_with_main() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def shared_rows(memory: int, spec: EnvSpec, n: int) -> Batch:
    """Return the rows and actions of ``n`` columns in the shared memory, which is resized to fit."""
    actions = {name: allocate(group.action, *lead_of(group, n)) for name, group in spec.groups.items()}
    like = rows_of(spec, n) | {"action": actions if spec.nested else next(iter(actions.values()))}
    offset = 0

    def place(x: np.ndarray) -> tuple[int, np.ndarray]:
        nonlocal offset
        start, offset = offset, offset + -(-max(x.nbytes, 1) // 64) * 64
        return start, x

    placed = tree.map(place, like)
    os.ftruncate(memory, offset)
    buffer = mmap.mmap(memory, offset)
    return tree.map(lambda at: np.ndarray(at[1].shape, at[1].dtype, buffer, at[0]), placed)


def columns_of(batch: Batch, columns: range) -> Batch:
    return tree.take(batch, slice(columns.start, columns.stop))


def send(channel: socket.socket, kind: bytes, message: Any) -> None:
    body = pickle.dumps(message)
    channel.sendall(HEADER.pack(kind, len(body)) + body)


def receive(channel: socket.socket) -> Any:
    read(channel, 1)
    return body(channel)


def body(channel: socket.socket) -> Any:
    (size,) = struct.unpack("<Q", read(channel, 8))
    return pickle.loads(read(channel, size))


def read(channel: socket.socket, size: int, look: Callable[[], None] | None = None) -> bytes:
    """Read exactly ``size`` bytes.

    Args:
        look: called after every ``ALIVE_EVERY`` seconds without data.
    """
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except TimeoutError:
            assert look is not None
            look()
            continue
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
