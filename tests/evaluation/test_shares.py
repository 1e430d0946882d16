"""Ranks share an evaluation out, and play the episodes that one rank would play."""

from __future__ import annotations

import json

import pytest

from rlplug.agent import evaluate
from rlplug.config import compose
from rlplug.evaluation.evaluator import shares_of
from rlplug.run.launch import train


@pytest.mark.parametrize("vectorization", ["list", "native"])  # columns that are independent, and columns that are not
def test_two_ranks_play_the_episodes_of_one(tmp_path, vectorization):
    words = ["algo=ppo", "env=cartpole", f"env.vectorization={vectorization}", "total_steps=1100", "model.hidden=[8]"]
    train(compose([*words, "eval.episodes=5", "eval.every=0", "hardware=2cpu", "logger.only=[]"]), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    alone = evaluate(tmp_path, ["hardware=cpu"])
    for name in ("eval/return_mean", "eval/return_std", "eval/length_mean"):
        assert summary[name] == pytest.approx(alone[name], rel=1e-9)


def test_every_column_belongs_to_one_share():
    assert shares_of(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert shares_of(100, 2) == [range(16), range(16, 32)]
    assert shares_of(1, 2) == [range(1), range(0)]
