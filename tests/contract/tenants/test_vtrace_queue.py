"""V-trace on a queue: segments in order, each once, and played with weights of which the learner knows the version."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from rlplug.api import Needs
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.checks.resume import check_resumes
from rlplug.testing.checks.runs import Case, play
from rlplug.types import ConfigError
from tests.contract.tenants.learners import FILES, VTrace, vtrace
from tests.installing import install, site  # noqa: F401  fixtures

RUN = ["algo=vtrace", "env=cartpole", "hardware=cpu", "logger=[]", "eval.every=0", "eval.episodes=20", "log.every=512"]


@pytest.fixture(autouse=True)
def learners(install):  # noqa: F811
    install("rlplug-learners", "rlplug_learners", FILES)


def column(run, name):
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_targets_against_the_sum_of_equation_1():
    dice = torch.Generator().manual_seed(0)
    log_rho, reward, value = (torch.randn(6, 1, generator=dice) for _ in range(3))
    terminated, valid = torch.zeros(6, 1, dtype=torch.bool), torch.ones(6, 1, dtype=torch.bool)
    terminated[3], valid[4], valid[5] = True, False, False
    target, advantage = vtrace(log_rho, reward, value, terminated, valid, 0.9)
    rho = [min(1.0, math.exp(x)) for x in log_rho[:, 0].tolist()]
    r, v = reward[:, 0].tolist(), [*value[:4, 0].tolist(), 0.0]  # terminated: nothing behind row 3
    wanted = [
        v[s] + sum(0.9 ** (t - s) * math.prod(rho[s:t]) * rho[t] * (r[t] + 0.9 * v[t + 1] - v[t]) for t in range(s, 4))
        for s in range(4)
    ]
    torch.testing.assert_close(target[:4, 0], torch.tensor(wanted))
    behind = [*wanted[1:], 0.0]
    torch.testing.assert_close(
        advantage[:4, 0], torch.tensor([rho[s] * (r[s] + 0.9 * behind[s] - v[s]) for s in range(4)])
    )
    assert not advantage[4:].any()


@pytest.mark.parametrize("buffer", ["replay", "rollout", "episodes", "sequence"])
def test_another_buffer_is_refused_with_the_one_that_fits(buffer):
    with pytest.raises(
        ConfigError, match=f"buffer: {buffer} gives .* learns from segments in order; take buffer=queue"
    ):
        build(compose([*RUN, f"buffer={buffer}"]), Path())


def test_windows_are_data_of_other_policies(monkeypatch):
    wrong = Needs(data="windows", keys=("obs", "action", "logp"))
    monkeypatch.setattr(VTrace, "needs", classmethod(lambda cls, cfg, spec: wrong))
    with pytest.raises(ConfigError, match=r"algo: vtrace learns from windows.*off_policy=True"):
        build(compose([*RUN, "buffer=replay"]), Path())


def test_it_learns_cartpole_from_segments_that_are_four_updates_old(tmp_path):
    train(compose([*RUN, "total_steps=65536"]), tmp_path)
    score = json.loads((tmp_path / "summary.json").read_text())["eval/return_mean"]
    stale = column(tmp_path, "train/staleness")
    print(f"V-trace on a queue: return {score:.0f} after 65,536 steps, segments {stale[-1]:.1f} updates old")
    assert 3 < min(stale[3:]) <= max(stale) < 6
    assert column(tmp_path, "buffer/dropped_segments")[-1] == 0
    assert score > 200


def test_what_a_short_queue_drops_is_shown(tmp_path):
    train(compose([*RUN, "buffer.capacity=3", "total_steps=2048"]), tmp_path)
    dropped = column(tmp_path, "buffer/dropped_segments")
    print(f"a queue of 3 segments dropped {dropped[-1]:.0f} of 32")
    assert dropped[-1] >= 1


def test_it_resumes_bit_for_bit_with_segments_in_the_queue():
    case = Case("vtrace", "cartpole", ("num_steps_sampled_before_learning_starts=256",))
    trainer = case.build()
    play(trainer, 5)
    assert len(trainer.buffer._segments) >= 4, "segments wait when the checkpoint is written"
    trainer.close()
    check_resumes(case, updates=5)
