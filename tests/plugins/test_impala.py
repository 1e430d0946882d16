"""IMPALA beside its paper: what its update does with segments, some of which older weights played."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.functional import gae, vtrace
from rlplug.plugins.algo.impala import IMPALA
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case, play
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError, RunError
from tests.plugins.acting import B, T, move, segment

RUN = ["algo=impala", "env=cartpole", "tuned=none", "hardware=cpu", "logger=[]", "eval.every=0", "eval.episodes=1"]
RUN += ["rollout_fragment_length=8", "train_batch_size=64", "log.every=512"]
TORSOS = [([], False), ([], True), (["model=lstm"], False), (["model=lstm"], True), (["model@critic_model=gru"], False)]
NAMES = ["mlp", "mlp shared", "lstm", "lstm shared", "memory of the critic"]
torsos = pytest.mark.parametrize(("overrides", "shared"), TORSOS, ids=NAMES)


def make(spec=None, overrides=(), **changes) -> IMPALA:
    torch.manual_seed(0)
    spec = spec or testing.spec(3, 2)
    cfg = testing.config("algo/impala", **changes)
    needs = IMPALA.needs(cfg, spec)
    if any("lstm" in word or "gru" in word for word in overrides):
        needs = IMPALA.recurrent(cfg, needs)
    return IMPALA(cfg, testing.context(spec, overrides=overrides, needs=needs, num_envs=B, rollout_length=T))


def learner_of(algorithm: IMPALA) -> RankLearner:
    return RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)


def column(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


# ---- the loss --------------------------------------------------------------------------------------------------------


@torsos
def test_the_policy_judges_as_it_acted_while_its_weights_are_the_same(overrides, shared):
    algorithm = make(overrides=overrides, vf_share_layers=shared)
    batch = segment(algorithm)
    assert_close(algorithm.logp(batch), batch["logp"])
    losses = algorithm.forward(batch, ("policy",))
    assert_close(losses.metrics["ratio"][batch["valid"]], torch.ones(int(batch["valid"].sum())))
    carry = batch.get("carry", {})
    for t in range(T + 1):  # every row by itself, from the state that was stored before it
        row = {key: batch[key][t : t + 1] for key in ("obs", "is_first")}
        _, value = algorithm.net(row, tree.map(lambda x, t=t: x[t], carry))
        assert_close(algorithm.values(batch)[t], value[0])


@torsos
def test_the_terms_are_those_of_section_4(overrides, shared):
    algorithm = make(overrides=overrides, vf_share_layers=shared, entropy_coeff=0.1, vf_loss_coeff=0.3)
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
    algorithm = make(entropy_coeff=0.0)
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
    algorithm = make(vtrace=False)
    batch = segment(algorithm)
    move(algorithm)
    losses = algorithm.forward(batch, ("policy",))
    assert (losses.metrics["ratio"] - 1.0).abs().max() > 0.01
    value, valid = algorithm.values(batch), batch["valid"]
    advantage, returns = gae(batch["reward"], value, batch["terminated"], valid, 0.99, 1.0)
    assert_close(losses.terms["policy"][valid], (-algorithm.logp(batch) * advantage)[valid])
    assert_close(losses.terms["value"][valid], 0.5 * (value - returns).square()[valid])


@pytest.mark.parametrize("overrides", [[], ["model=lstm"]])
def test_invalid_rows_change_nothing(overrides):
    algorithm, other = make(overrides=overrides), make(overrides=overrides)
    batch = segment(algorithm)
    segment(other)  # both have drawn the same noise
    changed = tree.map(torch.clone, batch)
    for key in ("reward", "logp", "action"):
        changed[key][5, 2] = changed[key][9, 3] = changed[key][-1] = 1 if key == "action" else 1e3
    for of, rows in ((algorithm, batch), (other, changed)):
        learner_of(of).minimize(of.prepare(rows), of)
    for a, b in zip(algorithm.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_update_makes_the_rewarded_action_more_likely():
    algorithm = make(lr=1e-2, gamma=0.0)
    batch = segment(algorithm)
    batch["reward"] = (batch["action"] == 1).float()
    learner = learner_of(algorithm)
    for _ in range(20):
        algorithm.update(algorithm.prepare(dict(batch)), learner)
    ones = batch | {"action": torch.ones_like(batch["action"])}
    assert algorithm.logp(ones).exp().mean() > 0.6


def test_memory_reaches_back_through_the_segment_and_no_further_than_its_episode():
    algorithm = make(overrides=["model=lstm"])
    batch = segment(algorithm)
    batch["obs"].requires_grad_()
    algorithm.forward(batch, ("policy",)).terms["value"][T - 1].sum().backward()
    reached = batch["obs"].grad.abs().sum(-1) > 0
    assert reached[:T, :2].all()
    assert reached[:T, 2].tolist() == [False] * 6 + [True] * (T - 6)  # column 2 begins anew in row 6
    assert reached[:T, 3].tolist() == [False] * 10 + [True] * (T - 10)  # and column 3 in row 10


def test_masks_are_heeded():
    action = spaces.Discrete(4)
    algorithm = make(testing.spec(3, action), entropy_coeff=0.1)
    mask = torch.ones(T + 1, B, 4, dtype=torch.bool)
    mask[..., 1] = False
    batch = segment(algorithm, mask)
    assert (batch["action"] != 1).all()
    losses = algorithm.forward(batch, ("policy",))
    sum(term[batch["valid"]].mean() for term in losses.terms.values()).backward()
    assert not algorithm.net.policy.linear.weight.grad[1].any()
    assert algorithm.net.policy.linear.weight.grad[0].any()


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def test_rmsprop_by_hand():
    """The first step: ``lr g / (sqrt((1 - decay) g^2) + epsilon)``."""
    algorithm = make(opt_type="rmsprop", lr=1e-3, epsilon=0.1, decay=0.9, grad_clip=None, entropy_coeff=0.0)
    before = [p.detach().clone() for p in algorithm.parameters()]
    learner_of(algorithm).minimize(segment(algorithm), algorithm)
    for p, old in zip(algorithm.parameters(), before, strict=True):
        assert_close(p, old - 1e-3 * p.grad / ((0.1 * p.grad.square()).sqrt() + 0.1))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_step_size_follows_its_schedule(optimizer):
    algorithm = make(opt_type=optimizer, lr=[[0, 1e-3], [100, 0.0]])
    learner, batch = learner_of(algorithm), segment(algorithm)
    algorithm.ctx.schedules.refresh(100)
    before = [p.detach().clone() for p in algorithm.parameters()]
    learner.minimize(batch, algorithm)
    assert all(torch.equal(p, old) for p, old in zip(algorithm.parameters(), before, strict=True))


def test_rmsprop_resumes_bit_for_bit():
    words = ("algo.opt_type=rmsprop", "algo.momentum=0.5", "rollout_fragment_length=8", "train_batch_size=64")
    check_resumes(Case("impala", "cartpole", words))


# ---- data ------------------------------------------------------------------------------------------------------------


def test_rows_without_the_log_probabilities_of_who_acted_are_refused():
    algorithm = make()
    batch = segment(algorithm)
    del batch["logp"]
    with pytest.raises(ConfigError, match=r"buffer: gives rows without logp.*V-trace divides by; collect them with"):
        algorithm.prepare(batch)


def test_noise_that_changes_actions_is_refused():
    """The log-probability of the action that is executed would not be known."""
    with pytest.raises(ConfigError, match=r"exploration\.epsilon_greedy: changes actions, which impala cannot learn"):
        build(compose([*RUN, "exploration=[epsilon_greedy]"]), Path())


@pytest.mark.parametrize("buffer", ["replay", "rollout", "episodes", "sequence"])
def test_another_buffer_is_refused_with_those_that_fit(buffer):
    words = "learns from segments in order; use buffer=circular or queue"
    with pytest.raises(ConfigError, match=f"buffer: {buffer} gives .*impala {words}"):
        build(compose([*RUN, f"buffer={buffer}"]), Path())


def test_a_memory_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="vf_share_layers"):
        make(overrides=["model=mlp", "model@critic_model=lstm"], vf_share_layers=True)


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


@pytest.mark.parametrize(
    "words",
    [
        ("loop.in_flight=3",),
        ("num_steps_sampled_before_learning_starts=256", "replay_ratio=0.015625"),
        ("buffer.replay_proportion=1.5", "buffer.replay_capacity=3"),
        ("buffer=circular", "buffer.num_batches=3"),
        ("model=lstm", "model.hidden=8"),
    ],
    ids=["rollouts ahead", "a queue", "replay", "a ring", "memory"],
)
def test_it_resumes_bit_for_bit(words):
    case = Case("impala", "cartpole", ("rollout_fragment_length=8", "train_batch_size=64", *words))
    check_resumes(case, updates=5)


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


def test_something_fed_back_is_refused():
    trainer = Case("impala", "cartpole", tuple(RUN[6:])).build()
    with pytest.raises(RunError, match="accepts no feedback"):
        trainer.buffer.feedback(torch.zeros(1), {"priority": torch.ones(1)})
    trainer.close()
