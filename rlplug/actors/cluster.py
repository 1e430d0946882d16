"""The Ray cluster of a run: one on this machine, started and stopped with the run, or one that exists already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, cast

import psutil
import torch

from rlplug.actors import AUTH_MODE
from rlplug.distributed.signals import handle_signals
from rlplug.plan import Plan, RayCluster, require_room
from rlplug.types import ConfigError, RunError

# What it reads ends with the process that it belongs to, which holds the pipe.
WATCHDOG = """
read -r _
case "$(ps -o stat= -p "$1")" in
    ""|Z*) echo "rlplug: this run, or Ray on this machine, was killed, and both ended; resume continues it" >&2 ;;
esac
kill -9 "$@" 2>/dev/null
"""
CONNECT_S = 5.0  # in which a cluster has to accept a connection
HEADERS, SETTINGS = b"\x01", b"\x04"  # of HTTP/2, which Ray speaks: it answers the greeting with settings
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
NO_MORE = b"\0\0\5\0\1\0\0\0\1" + b"\0" * 5  # an empty message of gRPC, which ends the call
CALL = {":method": "POST", ":scheme": "http", ":path": "/ray.rpc.NodeInfoGcsService/CheckAlive", ":authority": "ray"}
CALL |= {"content-type": "application/grpc", "te": "trailers"}


def connect(plan: Plan, first: bool, has_actors: bool, broadcast: Callable[[Any], Any]) -> ExitStack:
    """Connect this rank to the Ray cluster that all ranks share; return what ends the connection.

    Args:
        first: whether this is the first rank, which starts the cluster if there is none.
        broadcast: gives every rank the first rank's value.

    Raises:
        ConfigError: as ``connected``.
    """
    with ExitStack() as stack:
        address = stack.enter_context(connected(plan)) if first else ""
        address, auth_mode = broadcast((address, os.environ.get(AUTH_MODE)))
        if not first and has_actors:
            if auth_mode is not None:
                os.environ[AUTH_MODE] = auth_mode
            stack.enter_context(connected(plan, address))
        return stack.pop_all()


@contextmanager
def connected(plan: Plan, address: str | None = None) -> Iterator[str]:
    """Connect this process to a Ray cluster, and yield its address.

    Args:
        address: of the cluster that the first rank uses; None: the one that the plan names, with room for all of it.

    Raises:
        ConfigError: the cluster does not answer or is too small, or this process may not join it.
        RunError: no cluster can be started on this machine.
    """
    import ray  # here: Ray reads the environment when it is imported

    assert plan.ray is not None
    with ExitStack() as stack:
        if not ray.is_initialized():  # otherwise another part of this program ends the connection
            others = _descendants()
            _init(plan.ray, address or plan.ray.address)
            stack.enter_context(_ended_with_this(_descendants() - others, ray.shutdown))
        if address is None:
            there = ray.cluster_resources()
            require_room(plan, {key: there.get(key, 0.0) for key in ("CPU", "GPU")}, "the cluster")
        yield ray.get_runtime_context().gcs_address


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _init(cfg: RayCluster, address: str | None) -> None:
    import ray
    from ray._private import ray_constants  # whose switch no argument of ray.init reaches: it takes loopback for "any"

    options: dict[str, Any] = {"address": address or "local", "logging_level": logging.ERROR, "log_to_driver": True}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": cfg.object_store_memory}
        options |= {"num_cpus": os.cpu_count(), "num_gpus": torch.cuda.device_count()}
    else:
        _require_answer(address)
    spans, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, cfg.address is not None
    try:
        with handle_signals(signal.getsignal(signal.SIGTERM), [signal.SIGTERM]):  # Ray would replace the handler
            ray.init(**options)
    except SystemExit:  # by Ray's handler
        raise KeyboardInterrupt(signal.SIGTERM) from None
    except Exception as error:  # of many kinds, also plain Exception
        reason = str(error).strip().partition("\n")[0]
        if address is None:
            raise RunError(f"Ray cannot be started on this machine: {reason}") from error
        raise ConfigError(
            "hardware.ray.address",
            f"Ray cannot be joined at {address}: {reason}; this machine has to be part of the cluster:"
            f" ray start --address={address}",
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = spans
    for name in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _ended_with_this(processes: Collection[psutil.Process], shutdown: Callable[[], None]) -> Iterator[None]:
    """While the block runs, let Ray's processes be killed when this one is; some of them would live on for a minute.

    If the one that stands for this machine, the raylet, dies, Ray ends this process without a word: that is told. If
    the one that knows the cluster, the GCS, dies, Ray would try for a minute to reach it: that ends this process.
    """
    over = threading.Event()

    def watch(gcs: psutil.Process) -> None:
        while not over.wait(1.0):
            if not gcs.is_running() or gcs.status() == psutil.STATUS_ZOMBIE:
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                os._exit(1)  # calls of Ray would not return; the watchdog says what happened

    for gcs in processes:
        if gcs.name() == "gcs_server":
            threading.Thread(target=watch, args=[gcs], daemon=True).start()
    raylet_first = sorted(processes, key=lambda process: process.name() != "raylet")
    words = ["/bin/sh", "-c", WATCHDOG, "sh", *(str(process.pid) for process in raylet_first)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as watchdog:
        try:
            yield
        finally:
            over.set()
            shutdown()
            watchdog.kill()


def _require_answer(address: str) -> None:
    """Check that Ray listens at ``address`` and takes this machine's token; Ray itself would try for a minute."""
    from ray._private.authentication import authentication_token_setup

    token = cast(Any, authentication_token_setup).AuthenticationTokenLoader.instance().get_token_for_http_header()
    words = [word.encode() for header in (CALL | token).items() for word in header]
    call = b"".join(b"\0" * (i % 2 == 0) + _length(word) + word for i, word in enumerate(words))
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            answer = connection.makefile("rb")
            connection.sendall(GREETING)
            kind, said = _frame(answer)
            if kind != SETTINGS:
                raise OSError("another program listens there")
            connection.sendall(len(call).to_bytes(3, "big") + HEADERS + b"\4\0\0\0\1" + call + NO_MORE)
            while kind not in (HEADERS, b""):
                kind, said = _frame(answer)
    except OSError as error:
        raise ConfigError(
            "hardware.ray.address",
            f"no Ray answers at {address} ({error.strerror or error}); start a cluster with ray start --head, or set"
            " null to use this machine alone",
        ) from None
    if b"InvalidAuthToken" in said:
        raise ConfigError(
            "hardware.ray.address",
            f"Ray at {address} asks for its token: copy ~/.ray/auth_token of the cluster's first machine to this one",
        )


def _frame(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """Return the kind of the next frame of HTTP/2 and its content; nothing where there is none."""
    head = stream.read(9)
    return head[3:4], stream.read(int.from_bytes(head[:3], "big")) if head[3:4] <= b"\x09" else b""


def _length(word: bytes) -> bytes:
    n = len(word)
    return bytes([n] if n < 127 else [127, (n - 127) % 128 + 128, (n - 127) // 128])


def warn(line: str) -> None:
    """Print a line for the user."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)
