"""Connections between the ranks of several machines, on which nothing is said: they are there to break.

A process that ends closes its connections, at which collectives fail or go on waiting, as the backend has it. A machine
that loses its power or its network closes nothing, and collectives wait for as long as the first rank may evaluate
alone. Here the kernel asks for signs of life (TCP keepalive).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lightning.fabric import Fabric

from rlplug.types import RunError

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""seconds of silence until the kernel asks, seconds until it asks again, and how often: half a minute in all"""
GRACE = 3.0
"""seconds in which a failed collective may say more about it"""
REACHED = 60.0
"""seconds for the connections to be made"""
GOODBYE = b"."


@contextmanager
def listening(fabric: Fabric, lost: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, ``lost(what)`` is called in another thread once a rank is gone that did not leave its own.

    The first rank listens to all others, and they to the first: where it ends, so do they.

    Raises:
        RunError: the first rank cannot be reached.
    """
    wires = _wires(fabric)
    over = threading.Event()
    for who, wire in wires.items():
        threading.Thread(target=_listen, args=(who, wire, over, lost), name=who, daemon=True).start()
    try:
        yield
        for wire in wires.values():
            with suppress(OSError):
                wire.sendall(GOODBYE)
    finally:
        over.set()
        for wire in wires.values():
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()


def _listen(who: str, wire: socket.socket, over: threading.Event, lost: Callable[[str], None]) -> None:
    try:
        if wire.recv(1) == GOODBYE:
            return
        what = f"{who} has ended"
    except OSError:
        what = f"{who} does not answer any more: its machine is down, or the network to it"
    if not over.wait(GRACE):
        lost(what)


def _wires(fabric: Fabric) -> dict[str, socket.socket]:
    """Those of this rank, by whom they lead to."""
    if fabric.is_global_zero:
        return _reached_by(fabric)
    port, password = fabric.broadcast((0, b""))  # the first rank says
    host = os.environ["MASTER_ADDR"]
    try:
        wire = _lasting(socket.create_connection((host, port), REACHED))
        wire.sendall(password + fabric.global_rank.to_bytes(4, "big"))
    except OSError as error:
        raise RunError(f"the first rank cannot be reached at {host}, port {port}: {error.strerror or error}") from error
    return {f"rank 0 ({host})": wire}


def _reached_by(fabric: Fabric) -> dict[str, socket.socket]:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=fabric.world_size, dualstack_ipv6=both) as server:
        server.settimeout(REACHED)
        password = secrets.token_bytes(16)
        fabric.broadcast((server.getsockname()[1], password))
        wires: dict[str, socket.socket] = {}
        while len(wires) < fabric.world_size - 1:
            try:
                wire, (host, *_) = server.accept()
            except TimeoutError:
                raise RunError(f"only {len(wires) + 1} of {fabric.world_size} ranks reached the first one") from None
            wire.settimeout(REACHED)
            said = b""
            with suppress(OSError):
                said = wire.recv(20, socket.MSG_WAITALL)
            if said[:16] == password:  # and no stranger
                wires[f"rank {int.from_bytes(said[16:], 'big')} ({host.removeprefix('::ffff:')})"] = _lasting(wire)
            else:
                wire.close()
    return wires


def _lasting(wire: socket.socket) -> socket.socket:
    """For a connection that may be silent for as long as both ends are there."""
    wire.settimeout(None)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # every Linux has them
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return wire
