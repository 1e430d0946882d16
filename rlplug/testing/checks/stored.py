"""Checks of buffers with their own data, in a run of the algorithm that their manifest names."""

from __future__ import annotations

from contextlib import closing

from rlplug import tree
from rlplug.registry import load
from rlplug.testing.checks.runs import Case, option_of, require, some

SAMPLES = 16


def fills_itself(name: str) -> bool:
    """Return whether a buffer stores no collected data, so that streams cannot test it."""
    return "collected" not in load("buffer", name).sources


def check_stored(case: Case, name: str) -> None:
    """Check that such a buffer is ready at once, and returns windows with the keys that the algorithm needs."""
    with closing(case.build(f"buffer={option_of('buffer', name)}")) as trainer:
        buffer, needs = trainer.buffer, trainer.ctx.needs
        require(buffer.ready(), "it needs no collection, but ready() is False at the start")
        for _ in range(SAMPLES):
            sample = buffer.sample()
            missing = sorted({"reward", "terminated", "truncated", "is_first", "valid", *needs.keys} - sample.keys())
            require(not missing, f"a sample lacks {some(missing)}")
            valid, rows = sample["valid"], needs.window.burn_in + needs.window.length + 1
            if needs.data == "windows":
                wanted = (rows, trainer.ctx.batch_size)
                require(
                    tuple(valid.shape) == wanted, f"'valid' of a sample is {list(valid.shape)}; expected {[*wanted]}"
                )
            require(valid.ndim == 2, f"a sample's leaves are [T+1, B, ...], but valid has shape {list(valid.shape)}")
            require(not valid[-1].any(), "the last row of a sample begins no transition: its 'valid' is False")
            require(valid[needs.window.burn_in :].any(0).all(), "a sample has columns that carry no loss: no valid row")
        row = tree.map(lambda leaf: leaf[0], sample)
        require(buffer.nbytes(row) > 0, "nbytes() returns 0 for its rows")
