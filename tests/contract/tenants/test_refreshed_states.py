"""Recurrent states that are computed again and given back: the buffer keeps those, and not what was collected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlplug import hookimpl, tree
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case
from tests.contract.tenants.learners import FILES
from tests.installing import install, site  # noqa: F401  fixtures

RUN = [
    *("algo=refreshing", "env=stateless_cartpole", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=1"),
    *("model.hidden=16", "model.torso.hidden=[16]", "buffer.capacity=1000"),
]


@pytest.fixture(autouse=True)
def learners(install):  # noqa: F811
    install("rlplug-learners", "rlplug_learners", FILES)


class Watch:
    """The whole stream as it was collected, and what was fed back last."""

    def __init__(self, trainer):
        self.rows, self.index, self.fed = [], None, {}
        feedback = trainer.buffer.feedback

        def fed(index, values):
            self.index, self.fed = index.clone(), tree.map(torch.clone, values)
            feedback(index, values)

        trainer.buffer.feedback = fed
        trainer.hooks.register(self)

    @hookimpl
    def rlplug_collected(self, run, segment):
        kept = {key: tree.take(segment.batch[key], slice(-1)) for key in ("obs", "is_first", "carry")}
        self.rows.append(tree.map(torch.clone, kept))


def run(refresh, total=2400):
    trainer = build(compose([*RUN, f"algo.refresh={refresh}", f"total_steps={total}"]), Path())
    watch = Watch(trainer)
    trainer.loop.run(trainer)
    return trainer, watch, tree.cat(watch.rows)


def stored(trainer, row, column):
    """States in the buffer before rows ``row [n]`` of the columns ``column [n]``."""
    return tree.take(trainer.buffer.rings.read(row, column, 0)["carry"], 0)


def test_the_buffer_keeps_the_state_that_was_computed_last():
    trainer, watch, stream = run(True)
    trainer.close()
    row, column = np.divmod(watch.index.numpy(), 2)
    freshest = {}
    for i, states in enumerate(zip(*[leaf.unbind() for leaf in tree.leaves(watch.fed["carry"])], strict=True)):
        for b, place in enumerate(zip((row + 4 * i).tolist(), column.tolist(), strict=True)):
            freshest[place] = [state[b] for state in states]
    assert len(freshest) > len(set(zip(row, column, strict=True)))
    rows, columns = (np.array(x) for x in zip(*freshest, strict=True))
    kept = stored(trainer, rows, columns)
    for leaf, values in zip(tree.leaves(kept), zip(*freshest.values(), strict=True), strict=True):
        assert torch.equal(leaf, torch.stack(values))
    closed = rows < len(stream["is_first"])
    collected = tree.take(stream["carry"], (rows[closed], columns[closed]))
    for leaf, old in zip(tree.leaves(kept), tree.leaves(collected), strict=True):
        assert not torch.equal(leaf[torch.from_numpy(closed)], old)


def error(refresh):
    """How far stored states are from those of the present weights, unrolled from the beginning of the run."""
    trainer, _, stream = run(refresh)
    with torch.no_grad():
        _, states = trainer.algorithm.states(stream, trainer.algorithm.initial_carry(2))
    (ring,) = trainer.buffer.rings
    first = -(-ring.first // 4)
    row = np.arange(first, len(stream["is_first"]) // 4 - 4) * 4
    fresh = tree.map(lambda x: x[row // 4].flatten(0, 1), states)
    kept = stored(trainer, row.repeat(2), np.tile(np.arange(2), len(row)))
    collected = tree.map(lambda x: x[row].flatten(0, 1), stream["carry"])
    trainer.close()
    if not refresh:
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(collected), strict=True))
    return np.mean([(a - b).abs().mean().item() for a, b in zip(tree.leaves(kept), tree.leaves(fresh), strict=True)])


def test_states_are_stale_unless_they_are_refreshed():
    stale, refreshed = error(False), error(True)
    print(f"stored states are {stale:.4f} from those of the present weights; refreshed ones {refreshed:.4f}")
    assert refreshed < 0.6 * stale


def test_refreshed_states_resume_bit_for_bit():
    check_resumes(Case("refreshing", "stateless_cartpole", tuple(RUN[5:])), updates=40)
