"""IMPALA beside its paper: what its update does with segments, some of which older weights played."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from rlplug.config import compose
from rlplug.functional import gae, vtrace
from rlplug.plugins.algo.impala import IMPALA
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.checks.runs import Case, play
from rlplug.types import ConfigError
from tests.plugins.acting import make, move, segment

RUN = ["algo=impala", "env=cartpole", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=1"]
RUN += ["rollout_fragment_length=8", "train_batch_size=64", "log.every=512"]


def column(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


# ---- the loss --------------------------------------------------------------------------------------------------------


RECURRENT = [([], True), (["model=lstm"], False), (["model=attention"], True)]


@pytest.mark.parametrize(("overrides", "shared"), RECURRENT, ids=["mlp", "lstm", "attention"])
def test_the_terms_are_those_of_section_4(overrides, shared):
    algorithm = make(
        IMPALA, "impala", overrides=overrides, vf_share_layers=shared, entropy_coeff=0.1, vf_loss_coeff=0.3
    )
    batch = segment(algorithm)
    move(algorithm)
    losses = algorithm.forward(batch, ("policy",))
    logp, value = algorithm.logp(batch), algorithm.values(batch)
    assert (losses.metrics["ratio"] - 1.0).abs().max() > 0.01
    rows = batch["reward"], value, batch["terminated"], batch["valid"]
    target, advantage = vtrace(logp - batch["logp"], *rows, 0.99)
    assert_close(losses.terms["policy"], -logp * advantage)
    assert_close(losses.terms["value"], 0.3 * (value - target).square())
    assert_close(losses.terms["entropy"], -0.1 * losses.metrics["mean_entropy"])


def test_no_gradient_goes_through_targets_and_ratios():
    """The gradient is that of fixed targets: of ``-log pi A``, and of a squared error."""
    algorithm = make(IMPALA, "impala", entropy_coeff=0.0)
    batch = segment(algorithm)
    move(algorithm)
    terms = algorithm.forward(batch, ("policy",)).terms
    sum(term[batch["valid"]].mean() for term in terms.values()).backward()
    grads = [p.grad.clone() for p in algorithm.parameters()]
    with torch.no_grad():
        logp, value = algorithm.logp(batch), algorithm.values(batch)
        rows = batch["reward"], value, batch["terminated"], batch["valid"]
        target, advantage = vtrace(logp - batch["logp"], *rows, 0.99)
    algorithm.zero_grad()
    loss = -algorithm.logp(batch) * advantage + 0.5 * (algorithm.values(batch) - target).square()
    loss[batch["valid"]].mean().backward()
    for p, grad in zip(algorithm.parameters(), grads, strict=True):
        assert_close(p.grad, grad)


def test_without_the_correction_a_segment_counts_as_the_present_policy_s():
    """Targets are returns up to the end of the segment, and advantages those of GAE, whoever acted."""
    algorithm = make(IMPALA, "impala", vtrace=False)
    batch = segment(algorithm)
    move(algorithm)
    losses = algorithm.forward(batch, ("policy",))
    assert (losses.metrics["ratio"] - 1.0).abs().max() > 0.01
    value, valid = algorithm.values(batch), batch["valid"]
    advantage, returns = gae(batch["reward"], value, batch["terminated"], valid, 0.99, 1.0)
    assert_close(losses.terms["policy"][valid], (-algorithm.logp(batch) * advantage)[valid])
    assert_close(losses.terms["value"][valid], 0.5 * (value - returns).square()[valid])


# ---- data ------------------------------------------------------------------------------------------------------------


def test_noise_that_changes_actions_is_refused():
    """The log-probability of the action that is executed would not be known."""
    with pytest.raises(ConfigError, match=r"exploration\.epsilon_greedy: changes actions, which impala cannot learn"):
        build(compose([*RUN, "exploration=[epsilon_greedy]"]), Path())


@pytest.mark.parametrize("buffer", ["replay", "rollout", "episodes", "sequence"])
def test_another_buffer_is_refused_with_those_that_fit(buffer):
    words = "learns from segments in order; use buffer=circular or queue"
    with pytest.raises(ConfigError, match=f"buffer: {buffer} gives .*impala {words}"):
        build(compose([*RUN, f"buffer={buffer}"]), Path())


def test_the_age_of_what_is_learned_from_is_logged(tmp_path):
    """Five rounds are ordered at a time, each of which is a sample; beside every new segment stands an older one."""
    words = ["loop.in_flight=5", "buffer.replay_proportion=1.0", "buffer.replay_capacity=1"]
    train(compose([*RUN, *words, "total_steps=4096"]), tmp_path)
    assert column(tmp_path, "train/staleness")[-2] == 4.0  # the last rounds are fewer than five
    assert column(tmp_path, "train/age")[-2] == 4.5  # half of the columns are an update older


def test_what_a_short_queue_drops_is_shown(tmp_path):
    words = ["buffer.capacity=3", "num_steps_sampled_before_learning_starts=512", "total_steps=2048"]
    train(compose([*RUN, *words]), tmp_path)
    assert column(tmp_path, "buffer/dropped_segments")[-1] >= 5  # of the eight segments before learning begins


def test_replayed_segments_stand_beside_the_new_ones():
    trainer = Case("impala", "cartpole", (*RUN[6:], "buffer.replay_proportion=1.0")).build()
    seen, sample = [], trainer.buffer.sample

    def watched():
        seen.append(sample())
        return seen[-1]

    trainer.buffer.sample = watched
    play(trainer, 4)
    assert [batch["valid"].shape[1] for batch in seen] == [8, 16, 16, 16]
    old = {tuple(row.tolist()) for batch in seen[:-1] for row in batch["obs"][0, :8]}
    assert all(tuple(row.tolist()) in old for row in seen[-1]["obs"][0, 8:])
    trainer.close()
