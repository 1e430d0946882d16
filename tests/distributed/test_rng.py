"""Generators of a process, saved and set again."""

from __future__ import annotations

import warnings

import torch

from rlplug.distributed.rng import global_state, load_global_state

CPU = torch.device("cpu")


def test_a_read_only_state_is_loaded_in_silence():
    """What Ray hands to an actor that is restarted may not be written to, and torch warns of tensors that share it."""
    state = global_state(CPU)
    state["torch"].flags.writeable = False
    drawn = torch.rand(3)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_global_state(state, CPU)
    finally:
        torch.set_warn_always(always)
    assert torch.equal(torch.rand(3), drawn)
