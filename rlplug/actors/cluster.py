"""The Ray cluster of a run: one on this machine, started and stopped with the run, or one that exists already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import Any

import ray
import torch

from rlplug.actors import AUTH_MODE
from rlplug.distributed.signals import handle_signals
from rlplug.plan import Plan, RayCluster, require_room
from rlplug.types import ConfigError

CONNECT_S = 5.0
"""seconds in which a cluster has to accept a connection"""
SETTINGS = b"\x04"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
"""of HTTP/2, which Ray speaks and answers with settings"""


class Cluster:
    """This process's connection to a Ray cluster.

    Args:
        address: of the cluster that another process of this run has started; None: as ``cfg`` says.

    Raises:
        ConfigError: the cluster does not answer, or this process may not join it.
    """

    def __init__(self, cfg: RayCluster, address: str | None = None) -> None:
        self._owned = not ray.is_initialized()  # otherwise another part of this program closes it
        if self._owned:
            _connect(cfg, address or cfg.address)

    @property
    def invitation(self) -> tuple[str, dict[str, str]]:
        """The address, and the environment variables that other processes of this user need before they import Ray."""
        return ray.get_runtime_context().gcs_address, {k: v for k, v in os.environ.items() if k == AUTH_MODE}

    def require(self, plan: Plan) -> None:
        """Check that the whole cluster has the resources that a plan needs.

        Raises:
            ConfigError: its actors and ranks need more.
        """
        there = ray.cluster_resources()
        require_room(plan, {key: there.get(key, 0.0) for key in ("CPU", "GPU")}, "the cluster")

    def close(self) -> None:
        if self._owned:
            ray.shutdown()


def _connect(cfg: RayCluster, address: str | None) -> None:
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    if address is None:
        options |= {"address": "local", "include_dashboard": False}
        options |= {"num_cpus": os.cpu_count(), "num_gpus": torch.cuda.device_count()}
        if cfg.object_store_memory is not None:
            options["object_store_memory"] = cfg.object_store_memory
    else:
        _check_answers(address)
        options["address"] = address
    try:
        with handle_signals(signal.getsignal(signal.SIGTERM), [signal.SIGTERM]):  # Ray would replace the handler
            ray.init(**options)
    except Exception as error:  # of many kinds, also plain Exception
        reason = str(error).strip().partition("\n")[0]
        if address is None:
            raise ConfigError("hardware.ray", f"Ray cannot be started: {reason}") from error
        raise ConfigError(
            "hardware.ray.address",
            f"Ray cannot be joined at {address}: {reason}; this machine has to be part of the cluster:"
            f" ray start --address={address}",
        ) from error
    for name in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_answers(address: str) -> None:
    """Check that Ray listens at ``address``; Ray itself would try for half a minute.

    Raises:
        ConfigError: it does not.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("hardware.ray.address", f"{address!r} is not host:port, as ray start --head prints it")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            connection.sendall(GREETING)
            answer = connection.recv(9)
        if answer[3:4] != SETTINGS:
            raise OSError("another program listens there")
    except OSError as error:
        raise ConfigError(
            "hardware.ray.address",
            f"no Ray answers at {address} ({error.strerror or error}); start a cluster with ray start --head, or set"
            " null to use this machine alone",
        ) from None


def warn(line: str) -> None:
    """Print a line for the user."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)
