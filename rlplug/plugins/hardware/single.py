"""Plans for one process: the processor, or one CUDA device."""

from __future__ import annotations

from typing import Literal

import torch

from rlplug.api import Context, Plan
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import ConfigError

MatmulPrecision = Literal["highest", "high", "medium"]
Precision = Literal["32-true", "bf16-mixed"]


class CPU:
    @settings
    class Config:
        threads: PositiveInt = option("Threads of torch in this process.")
        float32_matmul_precision: MatmulPrecision = option("Precision of float32 matrix products.")

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        return Plan("cpu", threads=self.cfg.threads, float32_matmul_precision=self.cfg.float32_matmul_precision)


class GPU:
    @settings
    class Config:
        precision: Precision = option("Arithmetic of forward and backward.")
        threads: PositiveInt = option("Threads of torch on the host.")
        float32_matmul_precision: MatmulPrecision = option("Precision of float32 matrix products.")

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        if not torch.cuda.is_available():
            raise ConfigError("hardware", "needs a CUDA device, and none is found here; hardware=cpu works")
        return Plan(
            "cuda",
            precision=self.cfg.precision,
            threads=self.cfg.threads,
            float32_matmul_precision=self.cfg.float32_matmul_precision,
        )


class Auto:
    @settings
    class Config:
        precision: Precision = option("Arithmetic of forward and backward, on a CUDA device.")
        threads: PositiveInt = option("Threads of torch in this process.")
        float32_matmul_precision: MatmulPrecision = option("Precision of float32 matrix products.")

    def __init__(self, cfg: Config, ctx: Context | None = None) -> None:
        self.cfg = cfg

    def plan(self) -> Plan:
        cuda = torch.cuda.is_available()
        return Plan(
            "cuda" if cuda else "cpu",
            precision=self.cfg.precision if cuda else "32-true",
            threads=self.cfg.threads,
            float32_matmul_precision=self.cfg.float32_matmul_precision,
        )
