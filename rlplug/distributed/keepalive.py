"""Idle connections between ranks on several machines, to detect the loss of a machine.

A process that ends closes its connections, but a machine without power or network does not, and collectives wait for
it until their timeout, which has to exceed the longest collection. On an idle connection, the kernel sends TCP
keepalive probes independently of the processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlplug.distributed.fabric import AnyFabric
from rlplug.types import RunError

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""idle seconds before a probe, seconds between probes, and their number: half a minute in total"""
GRACE_S = 3.0
"""seconds for a collective that fails for the same reason to report it first"""
CONNECT_S = 60.0
GOODBYE = b"."


@contextmanager
def watch_ranks(fabric: AnyFabric, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call ``on_lost(reason)`` from another thread when a rank ends without leaving its block.

    Rank 0 watches all others, and they watch rank 0.

    Raises:
        RunError: rank 0 cannot be reached.
    """
    connections = _accept(fabric) if fabric.is_global_zero else _connect(fabric)
    closing = threading.Event()
    for name, connection in connections.items():
        threading.Thread(target=_watch, args=(name, connection, closing, on_lost), name=name, daemon=True).start()
    try:
        yield
        for connection in connections.values():
            with suppress(OSError):
                connection.sendall(GOODBYE)
    finally:
        closing.set()
        for connection in connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _watch(name: str, connection: socket.socket, closing: threading.Event, on_lost: Callable[[str], None]) -> None:
    try:
        if connection.recv(1) == GOODBYE:
            return
        reason = f"{name} has ended"
    except OSError:
        reason = f"{name} does not answer: its machine is down, or the network to it"
    if not closing.wait(GRACE_S):
        on_lost(reason)


def _connect(fabric: AnyFabric) -> dict[str, socket.socket]:
    """Return this rank's connection to rank 0, by name."""
    port, secret = fabric.broadcast((0, b""))
    host = os.environ["MASTER_ADDR"]
    try:
        connection = socket.create_connection((host, port), CONNECT_S)
        connection.sendall(secret + fabric.global_rank.to_bytes(4, "big"))
    except OSError as error:
        raise RunError(f"the first rank cannot be reached at {host}, port {port}: {error.strerror or error}") from error
    return {f"rank 0 ({host})": _keep_alive(connection)}


def _accept(fabric: AnyFabric) -> dict[str, socket.socket]:
    """Return the connections of rank 0 to all others, by name."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=fabric.world_size, dualstack_ipv6=both) as server:
        server.settimeout(CONNECT_S)
        secret = secrets.token_bytes(16)  # because other programs may connect to the port
        fabric.broadcast((server.getsockname()[1], secret))
        connections: dict[str, socket.socket] = {}
        while len(connections) < fabric.world_size - 1:
            try:
                connection, (host, *_) = server.accept()
            except TimeoutError:
                raise RunError(f"only {len(connections) + 1} of {fabric.world_size} ranks reached the first") from None
            connection.settimeout(CONNECT_S)
            greeting = b""
            with suppress(OSError):
                greeting = connection.recv(20, socket.MSG_WAITALL)
            if greeting[:16] == secret:
                rank = int.from_bytes(greeting[16:], "big")
                connections[f"rank {rank} ({host.removeprefix('::ffff:')})"] = _keep_alive(connection)
            else:
                connection.close()
    return connections


def _keep_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # system-dependent
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
