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
from typing import Any

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
CONNECT_S = 5.0
"""seconds in which a cluster has to accept a connection, and then to answer"""


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
    elif cfg.address is not None:
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
    """Check that Ray answers at ``address`` and accepts this machine's token; ``ray.init`` would try for a minute."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    limits = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_gcs_rpc_server_reconnect_timeout_s": f"{CONNECT_S:.0f}"}
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if "InvalidAuthToken" in done.stderr:
            raise ConfigError(
                "hardware.ray.address",
                f"Ray at {address} asks for its token: copy ~/.ray/auth_token of the cluster's first machine to this"
                " one",
            )
        reason = "another program listens there"
    raise ConfigError(
        "hardware.ray.address",
        f"no Ray answers at {address} ({reason}); start a cluster with ray start --head, or set null to use this"
        " machine alone",
    )


def warn(line: str) -> None:
    """Print a line for the user."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)
