"""Global generators of Python, NumPy and torch in this process. Components draw from ``ctx`` instead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_SEEDERS = (random.seed, np.random.seed, torch.manual_seed)


def seed_global(seed: int) -> None:
    """Give every global generator the same seed."""
    for seeder in _SEEDERS:
        seeder(seed % 2**32)


def seed_global_from(*entropy: int) -> None:
    """Give every global generator a different seed, derived from all of ``entropy``."""
    for seeder, number in zip(_SEEDERS, np.random.SeedSequence(entropy).generate_state(len(_SEEDERS)), strict=True):
        seeder(int(number))


def global_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the global generators, with CUDA's if ``device`` is a CUDA device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state_all() if device.type == "cuda" else [],
    }


def load_global_state(state: dict[str, Any], device: torch.device) -> list[str]:
    """Restore the global generators.

    Returns:
        Descriptions of what could not be restored.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.as_tensor(np.array(state["torch"])))  # a copy, because arrays from Ray are read-only
    if device.type != "cuda":
        return []
    if len(state["cuda"]) != torch.cuda.device_count():
        found = torch.cuda.device_count()
        return [f"CUDA's global generators: the checkpoint has {len(state['cuda'])} devices, this machine {found}"]
    torch.cuda.set_rng_state_all(state["cuda"])
    return []
