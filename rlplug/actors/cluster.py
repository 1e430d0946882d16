"""A Ray to live on: one of this machine, started and stopped here, or a cluster that is there already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from typing import Any

import ray
import torch

from rlplug.actors import AUTHENTICATION
from rlplug.distributed.signals import handling
from rlplug.plan import Plan, RayCluster, require_room
from rlplug.types import ConfigError

ANSWERS = 5.0
"""seconds in which a cluster takes a connection"""
SETTINGS = b"\x04"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
"""of HTTP/2, as Ray speaks it: what answers with settings is no other server"""


class Cluster:
    """This process's connection.

    Args:
        address: of the one that another process of this run has started; None: as ``cfg`` says.

    Raises:
        ConfigError: it does not answer, or is not for this process.
    """

    def __init__(self, cfg: RayCluster, address: str | None = None) -> None:
        self.own = not ray.is_initialized()  # else whoever connected ends it
        if self.own:
            _connect(cfg, address or cfg.address)

    @property
    def invitation(self) -> tuple[str, dict[str, str]]:
        """For other processes of this user: where it is, and what has to stand in their environment before Ray is
        loaded."""
        return ray.get_runtime_context().gcs_address, {k: v for k, v in os.environ.items() if k == AUTHENTICATION}

    def require(self, plan: Plan) -> None:
        """Raises:
        ConfigError: actors, and ranks beside them, need more than the whole cluster has.
        """
        there = ray.cluster_resources()
        require_room(plan, {key: there.get(key, 0.0) for key in ("CPU", "GPU")}, "the cluster")

    def close(self) -> None:
        if self.own:
            ray.shutdown()


def _connect(cfg: RayCluster, address: str | None) -> None:
    options: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": True}
    if address is None:
        options |= {"address": "local", "num_cpus": os.cpu_count(), "num_gpus": torch.cuda.device_count()}
        if cfg.object_store_memory is not None:
            options["object_store_memory"] = cfg.object_store_memory
    else:
        _check_answers(address)
        options = {"address": address, "logging_level": logging.ERROR, "log_to_driver": True}
    try:
        with handling(signal.getsignal(signal.SIGTERM), [signal.SIGTERM]):  # Ray puts a handler of its own there
            ray.init(**options)
    except Exception as error:  # of many kinds, some of them bare
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "hardware.ray.address" if address else "hardware.ray",
            f"Ray cannot be {'joined at ' + address if address else 'started'}: {first}"
            + ("; this machine has to be one of the cluster: ray start --address=" + address if address else ""),
        ) from error
    for name in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_answers(address: str) -> None:
    """Ray itself would try for half a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("hardware.ray.address", f"{address!r} is no host:port, as ray start --head prints it")
    try:
        with socket.create_connection((host, int(port)), ANSWERS) as connection:
            connection.sendall(GREETING)
            answer = connection.recv(9)
        if answer[3:4] != SETTINGS:
            raise OSError("what answers is not Ray")
    except OSError as error:
        raise ConfigError(
            "hardware.ray.address",
            f"no Ray answers at {address} ({error.strerror or error}); ray start --head starts a cluster, and null one"
            " of this machine",
        ) from None


def say(line: str) -> None:
    """Tell whoever watches the run."""
    print(f"rlplug: {line}", file=sys.stderr, flush=True)
