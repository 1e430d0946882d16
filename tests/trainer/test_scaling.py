"""``16-mixed``: losses are scaled, gradients are what they were, and steps that overflow are left out."""

import pytest
import torch
from torch import nn

from rlplug.api import Losses, Optim, Plan, Trainable
from rlplug.config import compose
from rlplug.distributed.fabric import fabric_of, one_rank
from rlplug.nn.optim import LARGEST, LossScale
from rlplug.run.build import build
from rlplug.testing.rank_pool import ranks
from rlplug.types import RunError
from tests.trainer.test_learner import CASES, close, learner_of, three_steps

PPO = ["algo=ppo", "total_steps=1024", "algo.normalize_advantage=false"]
SAC = ["algo=sac", "env=pendulum", "total_steps=120", "num_steps_sampled_before_learning_starts=100"]
QUIET = ["logger=[]", "eval.every=0", "eval.episodes=1"]


def run(trainer):
    """To the end, without what is said about it."""
    trainer.loop.run(trainer)
    trainer.reports.finish(trainer)


def moved(folder, words, **plan):
    """How far the weights of a run go."""
    plan = Plan(**plan)
    trainer = build(compose([*words, *QUIET]), folder, fabric_of(plan), plan)
    before = nn.utils.parameters_to_vector(trainer.algorithm.parameters()).detach().clone()
    if trainer.learner.steps.scale is not None:
        trainer.learner.steps.scale.value.fill_(1024.0)  # nothing overflows
    run(trainer)
    trainer.close()
    return nn.utils.parameters_to_vector(trainer.algorithm.parameters()).detach() - before


@pytest.mark.parametrize(
    "words", [PPO, pytest.param([*PPO, "compile=max"], marks=pytest.mark.slow), SAC], ids=["ppo", "compiled", "sac"]
)
def test_half_precision_moves_the_weights_as_float32_does(tmp_path, words):
    whole, half = (moved(tmp_path / name, words, precision=name) for name in ("32-true", "16-mixed"))
    assert 0 < (half - whole).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize("case", CASES)
def test_a_scale_changes_nothing_that_is_learnt(case):
    plain = three_steps(one_rank(), case)
    for scaled in (three_steps(one_rank(), case, scaled=True), three_steps(one_rank(), case, 4, scaled=True)):
        close(plain, scaled)
    for rank in ranks(2)(three_steps, case, 1, True):
        close(plain, rank)


class Steep(Trainable):
    """Its gradient is ``slope``, and its loss zero."""

    def __init__(self, slope=1.0):
        super().__init__()
        self.x, self.slope = nn.Parameter(torch.zeros(1)), slope

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD([self.x], lr=1.0))}

    def forward(self, batch, parts):
        return Losses({"x": ((self.x - self.x.detach()) * self.slope).sum()}, feedback={"priority": torch.ones(1)})


def scaled(who, **options):
    return learner_of(who, scale_losses=True, **options)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_steps_that_overflow_are_left_out_until_the_scale_fits(on_nan):
    who = Steep(slope=2.0**100)
    learner = scaled(who, on_nan=on_nan)
    learner.steps.scale.value.fill_(2.0**30)
    for steps in range(3):  # 2^130, 2^129 and 2^128 are more than float32 holds
        assert not learner.minimize({}, who).feedback
        assert who.x == 0
        assert learner.steps.scale.value == 2.0 ** (29 - steps)
    assert learner.minimize({}, who).feedback
    assert who.x == -(2.0**100)
    learner.check_finite()
    assert learner.steps.skipped == 0


def test_a_loss_that_is_no_number_is_said():
    who = Steep(slope=float("inf"))
    learner = scaled(who)
    learner.minimize({}, who)
    with pytest.raises(RunError, match=r"^Steep: the loss term 'x' is NaN at update 1"):
        learner.check_finite()
    assert learner.steps.scale.value == 2.0**16


class Cusp(Steep):
    def forward(self, batch, parts):
        return Losses({"x": (self.x - self.x.detach()).sqrt().sum()})


def test_a_gradient_that_is_infinite_at_scale_1_is_said():
    who = Cusp()
    learner = scaled(who)
    for _ in range(16):
        learner.minimize({}, who)
        learner.check_finite()
    learner.minimize({}, who)
    with pytest.raises(RunError, match=r"^Cusp: the gradient of part 'all' is infinite at update 1"):
        learner.check_finite()


def test_the_scale_grows_while_nothing_overflows():
    who = Steep()
    learner = scaled(who)
    learner.steps.scale = LossScale(torch.device("cpu"), LARGEST / 2, patience=3)
    seen = []
    for _ in range(7):
        learner.minimize({}, who)
        seen.append(learner.steps.scale.value.item() / LARGEST)
    assert seen == [0.5, 0.5, 1, 1, 1, 1, 1]


def test_a_resumed_run_goes_on_with_its_scale():
    who, again = Steep(slope=2.0**120), Steep()
    first, second = scaled(who), scaled(again)
    for _ in range(12):
        first.minimize({}, who)
    assert first.steps.scale.state() == {"value": 2.0**7, "fine": 3}
    second.load(first.state())
    assert second.steps.scale.state() == first.steps.scale.state()
    first.minimize({}, who)
    assert second.steps.scale.fine == 3
