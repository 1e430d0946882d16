"""Fabric of this rank, or its replacement in runs with one rank, and how a process is recognized as a rank."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import distributed

from rlplug.plan import Plan
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from lightning.fabric import Fabric

T = TypeVar("T")
_stores = itertools.count()
AnyFabric: TypeAlias = "Fabric | OneProcess"

TIMEOUT = timedelta(hours=2)
"""timeout of collectives, during which one rank may collect, restart its actors or record a video"""


class OneProcess:
    """The used methods of ``lightning.fabric.Fabric`` for a single rank, without its import of seconds."""

    global_rank = local_rank = 0
    world_size = 1
    is_global_zero = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def broadcast(self, x: T) -> T:
        return x

    def all_gather(self, x: Any) -> Any:
        return x[None]

    def barrier(self) -> None:
        """Return immediately."""


def launched_elsewhere() -> bool:
    """Return whether torchrun or srun started this process as one of several."""
    return distributed.is_torchelastic_launched() or _started_by_srun()


def _started_by_srun() -> bool:
    """Return whether srun started this process, which the batch script or shell of a job does not count as."""
    shell = "SLURM_PTY_PORT" in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1" and not shell


def require_started(plan: Plan) -> None:
    """Check that torchrun or srun, if it started this process, started one process per rank of the plan.

    Raises:
        ConfigError: the number of processes differs, so they would train separately or wait forever; or the plan
            restarts ranks, which needs processes started by rlplug.
    """
    if not launched_elsewhere():
        return
    torchrun = distributed.is_torchelastic_launched()
    launcher, size = ("torchrun", "WORLD_SIZE") if torchrun else ("srun", "SLURM_NTASKS")
    if (started := int(os.environ[size])) != plan.world_size:
        raise ConfigError(
            "hardware",
            f"{launcher} started {started} processes, but the run has {plan.world_size} ranks:"
            f" hardware.devices={plan.devices} on each of hardware.num_nodes={plan.num_nodes} machines",
        )
    if plan.max_restarts:
        said = f"works only for processes that rlplug starts; {launcher} started these: set it to 0"
        raise ConfigError("hardware.max_restarts", said)


def fabric_of(plan: Plan) -> AnyFabric:
    """Return the Fabric of this rank, connected to the other ranks; for a single rank, ``OneProcess``.

    Raises:
        ConfigError: the processes were started for another number of ranks.
    """
    if plan.world_size == 1:
        return OneProcess(torch.device("cpu" if plan.accelerator == "cpu" else "cuda:0"))
    from lightning.fabric import Fabric  # here, because the import takes seconds
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy

    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they log every rank
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")  # called by Fabric
    if _started_by_srun():
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(plan.devices))  # needed by Fabric, not set by srun -n
    try:
        fabric = Fabric(
            accelerator=plan.accelerator,
            strategy=DDPStrategy(timeout=TIMEOUT),  # not used to wrap modules
            devices=plan.devices,
            num_nodes=plan.num_nodes,
            plugins=[] if launched_elsewhere() else [LightningEnvironment()],
        )
        fabric.launch()
    except ValueError as error:
        raise ConfigError("hardware.devices", f"does not fit how the processes were started: {error}") from None
    return fabric


def one_rank() -> OneProcess:
    """Return the replacement of Fabric in a single process on the CPU."""
    return OneProcess(torch.device("cpu"))


def set_rank_env(rank: int, ranks: int, port: int, address: str = "127.0.0.1", alone: bool = False) -> None:
    """Set the environment variables by which Fabric recognizes this process as a rank.

    Args:
        address, port: endpoint of rank 0.
        alone: treat it as the only rank of its machine; otherwise all ranks are on this machine.
    """
    local = (0, rank, 1) if alone else (rank, 0, ranks)
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    os.environ.update({name: str(value) for name, value in zip(names, (*local, rank, ranks), strict=True)})
    os.environ.update(TORCHELASTIC_RUN_ID="rlplug", MASTER_ADDR=address, MASTER_PORT=str(port))


def shared_store() -> distributed.Store:
    """Return a store shared by the ranks; all must call this equally often, because the n-th stores match."""
    return distributed.PrefixStore(f"rlplug/{next(_stores)}", distributed.distributed_c10d._get_default_store())


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def explain_collective(error: BaseException) -> str | None:
    """Explain the failure of a collective because of another rank or the network; None: another error."""
    text = str(error)
    if not isinstance(error, distributed.DistNetworkError) and not re.search(r"gloo/transport|ncclRemoteError", text):
        return None
    if "Timed out waiting" in text:
        return f"another rank did not answer within {TIMEOUT}: it hangs, or its machine is lost"
    peer = re.search(r"\[([\d.]+|[\da-f:]+)\]:\d+", text)
    return f"a rank{f' on {peer[1]}' if peer else ''} has ended, or the network to it is down"
