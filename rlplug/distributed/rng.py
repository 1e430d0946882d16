"""The generators that belong to nobody: those of Python, NumPy and torch in this process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GLOBAL = (random.seed, np.random.seed, torch.manual_seed)


def seed_generators(*entropy: int) -> None:
    """Let the generators that belong to nobody draw what is given by all of ``entropy``."""
    for seed, number in zip(GLOBAL, np.random.SeedSequence(entropy).generate_state(len(GLOBAL)), strict=True):
        seed(int(number))


def global_generators(device: torch.device) -> dict[str, Any]:
    """The state of those that belong to nobody, in a process that computes on ``device``."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state_all() if device.type == "cuda" else [],
    }


def set_global_generators(state: dict[str, Any], device: torch.device) -> list[str]:
    """What could not be set, in words."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.as_tensor(state["torch"]))
    if device.type != "cuda":
        return []
    if len(state["cuda"]) != torch.cuda.device_count():
        return [f"CUDA's own generators: there were {len(state['cuda'])} devices then, now {torch.cuda.device_count()}"]
    torch.cuda.set_rng_state_all(state["cuda"])
    return []
