"""Plans for the ranks that learn together: on processors, or on CUDA devices; on one machine or several."""

from __future__ import annotations

import os
from typing import Literal

import torch

from rlplug.api import Context, Plan
from rlplug.settings import NonNegativeInt, PositiveInt, option, settings
from rlplug.types import ConfigError

Accelerator = Literal["cpu", "cuda"]
MatmulPrecision = Literal["highest", "high", "medium"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


@settings
class Ranks:
    """What all plans have in common."""

    devices: PositiveInt = option("Ranks on every machine, each with a device of its own.")
    num_nodes: PositiveInt = option("Machines; torchrun or SLURM starts their processes.")
    microbatches: PositiveInt = option("Parts of a batch that follow one another, which takes less memory.")
    threads: PositiveInt = option("Threads of torch in each process.")
    float32_matmul_precision: MatmulPrecision = option("Precision of float32 matrix products.")
    max_restarts: NonNegativeInt = option(
        "How often a run that broke off continues from its last checkpoint by itself."
    )


@settings
class Accelerated(Ranks):
    precision: Precision = option("Arithmetic of forward and backward on CUDA devices.")


class CPU:
    """Ranks on processors, over gloo."""

    @settings
    class Config(Ranks):
        pass

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        return processors(self.cfg)


class GPU:
    """Ranks on CUDA devices, over NCCL."""

    @settings
    class Config(Accelerated):
        pass

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        if not torch.cuda.is_available():
            raise ConfigError("hardware", "needs a CUDA device, and none is found here; hardware=cpu works")
        return cuda_devices(self.cfg)


class Auto:
    """CUDA devices if there are any, else processors."""

    @settings
    class Config(Accelerated):
        pass

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        return cuda_devices(self.cfg) if torch.cuda.is_available() else processors(self.cfg)


def processors(cfg: Ranks) -> Plan:
    """Raises:
    ConfigError: there are not as many cores.
    """
    cores = os.cpu_count() or 1
    if cfg.devices > cores:
        raise ConfigError("hardware.devices", f"{cfg.devices} ranks are more than the {cores} cores of this machine")
    return _plan(cfg, "cpu", "32-true")


def cuda_devices(cfg: Accelerated) -> Plan:
    """Raises:
    ConfigError: there are not as many, or they do not compute in this precision.
    """
    found = torch.cuda.device_count()
    if cfg.devices > found:
        raise ConfigError(
            "hardware.devices", f"{cfg.devices} CUDA devices are asked for, and {found} found: hardware.devices={found}"
        )
    if cfg.precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            "hardware.precision", f"{torch.cuda.get_device_name()} does not compute in bf16; 16-mixed works"
        )
    return _plan(cfg, "cuda", cfg.precision)


def _plan(cfg: Ranks, accelerator: Accelerator, precision: str) -> Plan:
    shared = {name: getattr(cfg, name) for name in Ranks.__pydantic_fields__}  # type: ignore[attr-defined]
    return Plan(accelerator=accelerator, precision=precision, **shared)
