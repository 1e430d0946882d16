"""Fabric of a rank, and what lets Fabric recognise it as one of several."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric as Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

from rlplug.plan import Plan
from rlplug.types import ConfigError

PATIENCE = timedelta(hours=2)
"""for which ranks wait for one another: the first one evaluates alone"""


def launched_elsewhere() -> bool:
    """Is this process one of several that torchrun or srun started?"""
    return TorchElasticEnvironment.detect() or _started_by_srun()


def _started_by_srun() -> bool:
    """A batch script of a job with several tasks is none of them, and neither is what is typed into a shell."""
    typed = "SLURM_PTY_PORT" in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1" and not typed


def require_started(plan: Plan) -> None:
    """Raises:
    ConfigError: torchrun or srun started another number of processes than there are to be ranks, which would learn
        each for itself or wait for one another; or the ranks are not theirs to start again.
    """
    if not launched_elsewhere():
        return
    who, name = ("torchrun", "WORLD_SIZE") if TorchElasticEnvironment.detect() else ("srun", "SLURM_NTASKS")
    if (started := int(os.environ[name])) != plan.world_size:
        raise ConfigError(
            "hardware",
            f"{who} started {started} processes, and this is for {plan.world_size}, hardware.devices={plan.devices} on"
            f" each of hardware.num_nodes={plan.num_nodes}",
        )
    if plan.max_restarts:
        raise ConfigError(
            "hardware.max_restarts", f"is for processes that rlplug starts itself, and {who} started these; 0 is right"
        )


def fabric_of(plan: Plan) -> Fabric:
    """Fabric of this rank, which has met the others.

    Raises:
        ConfigError: it was started as one of another number of ranks.
    """
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they would say that ranks are there
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")  # Fabric calls it
    strategy: Any = DDPStrategy(timeout=PATIENCE) if plan.world_size > 1 else "auto"  # wraps nothing: see learner
    if _started_by_srun():
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(plan.devices))  # Fabric asks for it, srun -n leaves it out
    try:
        fabric = Fabric(
            accelerator=plan.accelerator,
            strategy=strategy,
            devices=plan.devices,
            num_nodes=plan.num_nodes,
            plugins=[precision_of(plan)] if launched_elsewhere() else [precision_of(plan), LightningEnvironment()],
        )
        fabric.launch()
    except ValueError as error:
        raise ConfigError("hardware.devices", f"does not fit how the processes were started: {error}") from None
    return fabric


def precision_of(plan: Plan) -> Precision:
    """What Fabric computes in. Losses are scaled by the learner, whose gradients are clipped and summed over ranks."""
    if plan.precision == "32-true":
        return Precision()
    unused = torch.amp.GradScaler(plan.accelerator, enabled=False) if plan.precision == "16-mixed" else None
    return MixedPrecision(plan.precision, plan.accelerator, unused)  # type: ignore[arg-type]


def one_rank() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=LightningEnvironment())


def set_rank_env(rank: int, ranks: int, port: int, address: str = "127.0.0.1", alone: bool = False) -> None:
    """Let Fabric recognise this process as one of several.

    Args:
        address, port: where the first one listens.
        alone: it is treated as the only one of its machine, else all are on this one.
    """
    local = (0, rank, 1) if alone else (rank, 0, ranks)
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    os.environ.update({name: str(value) for name, value in zip(names, (*local, rank, ranks), strict=True)})
    os.environ.update(TORCHELASTIC_RUN_ID="rlplug", MASTER_ADDR=address, MASTER_PORT=str(port))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
