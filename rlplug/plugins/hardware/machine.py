"""Hardware plans: CPU or CUDA ranks on one or more machines."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from rlplug.api import Context, Plan
from rlplug.plan import Actors, RayCluster
from rlplug.settings import NonNegativeInt, PositiveInt, option, settings
from rlplug.types import ConfigError

MatmulPrecision = Literal["highest", "high", "medium"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


@settings
class Config:
    devices: PositiveInt = option("Ranks on every machine, one device each.")
    num_nodes: PositiveInt = option("Machines; torchrun or SLURM starts their processes.")
    microbatches: PositiveInt = option("Parts of a batch whose gradients are accumulated, to save memory.")
    precision: Precision = option("Precision of the forward and backward pass; 16-mixed needs CUDA.")
    threads: Annotated[PositiveInt, Field(le=512)] = option("Torch threads per process.")
    float32_matmul_precision: MatmulPrecision = option("Precision of float32 matrix products.")
    max_restarts: NonNegativeInt = option("Number of automatic restarts of a failed run from its last checkpoint.")
    actors: Actors = option("Ray actors, which hold the environments.")
    ray: RayCluster = option("Ray cluster of the actors.")


class Auto:
    """Use CUDA devices if there are any, else the CPU."""

    Config = Config

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        return cuda_devices(self.cfg) if torch.cuda.is_available() else processors(self.cfg)


class CPU(Auto):
    """Use the CPU, with gloo."""

    def plan(self) -> Plan:
        return processors(self.cfg)


class GPU(Auto):
    """Use CUDA devices, with NCCL."""

    def plan(self) -> Plan:
        if not torch.cuda.is_available():
            raise ConfigError("hardware", "needs a CUDA device, but none was found; use hardware=cpu")
        return cuda_devices(self.cfg)


class OnRay(Auto):
    """Use the machines of a Ray cluster; Ray places the ranks."""

    def plan(self) -> Plan:
        if self.cfg.num_nodes > 1:
            raise ConfigError(
                "hardware.num_nodes",
                "does not apply to Ray, which chooses the machines: hardware.devices is the number of all ranks",
            )
        if 0 < self.cfg.ray.num_gpus < 1 and self.cfg.devices > 1:
            raise ConfigError(
                "hardware.ray.num_gpus",
                f"{self.cfg.ray.num_gpus:g} lets ranks share CUDA devices, which NCCL does not support; use 1, or"
                " hardware.devices=1",
            )
        if not self.cfg.ray.num_gpus:
            _check_precision(self.cfg)
        return replace(_plan(self.cfg, "cuda" if self.cfg.ray.num_gpus else "cpu"), launcher="ray")


class Slurm(Auto):
    """Use all tasks and machines of this process's SLURM job."""

    def plan(self) -> Plan:
        tasks, nodes = (os.environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NNODES"))
        if not tasks.isdigit() or not nodes.isdigit():
            raise ConfigError(
                "hardware", "this process is in no SLURM job: start it with srun python -m rlplug hardware=slurm ..."
            )
        if int(tasks) > 1 and "SLURM_STEP_ID" not in os.environ:
            raise ConfigError(
                "hardware", f"the job has {tasks} tasks, and this process is none of them: start it with srun"
            )
        each = os.environ.get("SLURM_TASKS_PER_NODE", "")
        if int(tasks) % int(nodes) or "," in each:
            raise ConfigError("hardware", f"{tasks} tasks on {nodes} machines: every machine needs the same number")
        self.cfg = replace(self.cfg, devices=int(tasks) // int(nodes), num_nodes=int(nodes))
        if self.cfg.devices > 1 and torch.cuda.device_count() == 1:
            raise ConfigError(
                "hardware",
                f"{self.cfg.devices} tasks are on this machine, and each sees one CUDA device instead of all: use srun"
                f" --gpus-per-node {self.cfg.devices} instead of --gpus-per-task 1",
            )
        return super().plan()


def processors(cfg: Config) -> Plan:
    """Return a CPU plan.

    Raises:
        ConfigError: there are fewer cores than ranks, or the CPU does not support the precision.
    """
    cores = os.cpu_count() or 1
    if cfg.devices > cores:
        raise ConfigError("hardware.devices", f"{cfg.devices} ranks are more than the {cores} cores of this machine")
    _check_precision(cfg)
    return _plan(cfg, "cpu")


def _check_precision(cfg: Config) -> None:
    if cfg.precision == "16-mixed":
        raise ConfigError("hardware.precision", "CPUs do not support float16; use bf16-mixed")


def cuda_devices(cfg: Config) -> Plan:
    """Return a CUDA plan.

    Raises:
        ConfigError: there are fewer CUDA devices than ranks, or they do not support the precision.
    """
    found = torch.cuda.device_count()
    if cfg.devices > found:
        raise ConfigError(
            "hardware.devices",
            f"needs {cfg.devices} CUDA devices, but {found} were found; use hardware.devices={found}",
        )
    if cfg.precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError("hardware.precision", f"{torch.cuda.get_device_name()} does not support bf16; use 16-mixed")
    return _plan(cfg, "cuda")


def _plan(cfg: Config, accelerator: Literal["cpu", "cuda"]) -> Plan:
    values: dict[str, Any] = {field.name: getattr(cfg, field.name) for field in fields(Config)}  # type: ignore[arg-type]
    if cfg.actors.evaluation and not cfg.actors.count:
        raise ConfigError("hardware.actors.evaluation", "needs actors that collect as well: hardware.actors.count=1")
    values["actors"] = cfg.actors if cfg.actors.count else None
    return Plan(accelerator=accelerator, **values)
