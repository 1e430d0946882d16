"""The Ray cluster of a run: a local one, started and stopped with the run, or an existing one."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch

from rlplug.actors import AUTH_MODE
from rlplug.distributed.signals import handle_signals
from rlplug.plan import Plan, RayCluster, require_room
from rlplug.types import ConfigError, RunError

# Its input ends with the process that holds the pipe.
WATCHDOG = """
read -r _
case "$(ps -o stat= -p "$1")" in
    ""|Z*) echo "rlplug: this run, or Ray on this machine, was killed, and both ended; resume continues it" >&2 ;;
esac
kill -9 "$@" 2>/dev/null
"""
RECONNECT_S = 5  # without the control service of a local cluster before its processes end; Ray's default is a minute
CONNECT_S = 5.0
"""timeouts in seconds of a cluster's connection and of its answer"""


def connect(plan: Plan, first: bool, has_actors: bool, broadcast: Callable[[Any], Any]) -> ExitStack:
    """Connect this rank to the Ray cluster of all ranks; return a stack that closes the connection.

    Args:
        first: whether this is rank 0, which starts the cluster if there is none.
        broadcast: returns the argument of rank 0 on every rank.

    Raises:
        ConfigError: see ``connected``.
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
        address: address of rank 0's cluster; None: that of the plan, which must have room for the whole plan.

    Raises:
        ConfigError: the cluster does not answer, is too small, or rejects this process.
        RunError: a cluster cannot be started on this machine.
    """
    import ray  # here, because Ray reads the environment at import

    assert plan.ray is not None
    with ExitStack() as stack:
        if not ray.is_initialized():  # otherwise another part of this program closes the connection
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
    from ray._private import ray_constants  # a switch without an argument of ray.init: it treats loopback as "any"

    options: dict[str, Any] = {"address": address or "local", "logging_level": logging.ERROR, "log_to_driver": True}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": cfg.object_store_memory}
        options |= {"num_cpus": os.cpu_count(), "num_gpus": torch.cuda.device_count()}
        options["_system_config"] = {"gcs_rpc_server_reconnect_timeout_s": RECONNECT_S}
    elif cfg.address is not None:
        _require_answer(address)
    spans, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, cfg.address is not None
    try:
        with handle_signals(signal.getsignal(signal.SIGTERM), [signal.SIGTERM]):  # Ray replaces the handler
            ray.init(**options)
    except SystemExit:  # from Ray's handler
        raise KeyboardInterrupt(signal.SIGTERM) from None
    except Exception as error:  # of various types, including plain Exception
        reason = str(error).strip().partition("\n")[0]
        if address is None:
            raise RunError(f"Ray cannot be started on this machine: {reason}") from error
        raise ConfigError(
            "hardware.ray.address",
            f"Ray cannot be joined at {address}: {reason}; this machine must be part of the cluster:"
            f" ray start --address={address}",
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = spans
    for name in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _ended_with_this(processes: Collection[psutil.Process], shutdown: Callable[[], None]) -> Iterator[None]:
    """Inside the block, kill Ray's processes when this one ends; some would otherwise live for another minute.

    If the raylet, the node's process, or the GCS, the cluster's control service, dies, Ray ends this process; print the
    reason.
    """
    raylet_first = sorted(processes, key=lambda process: process.name() != "raylet")
    words = ["/bin/sh", "-c", WATCHDOG, "sh", *(str(process.pid) for process in raylet_first)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as watchdog:
        try:
            yield
        finally:
            shutdown()
            watchdog.kill()


def _require_answer(address: str) -> None:
    """Check that Ray answers at ``address`` and accepts this machine's token; ``ray.init`` would retry for a minute."""
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
                f"Ray at {address} requires a token: copy ~/.ray/auth_token from the cluster's first machine to this"
                " one",
            )
        reason = "another program listens there"
    raise ConfigError(
        "hardware.ray.address",
        f"no Ray cluster answers at {address} ({reason}); start one with ray start --head, or use null to run on"
        " this machine only",
    )


def warn(line: str) -> None:
    """Print a line for the user."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)
