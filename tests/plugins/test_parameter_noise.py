"""Parameter noise beside its paper: what is perturbed, for how long, and how far."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from rlplug import testing
from rlplug.plugins.exploration.parameter_noise import ParameterNoise, policy_distance
from rlplug.testing.checks.runs import Case, differences, play

WEIGHTS = {
    "model.net.layers.0.weight": torch.zeros(400, 300),
    "model.net.layers.0.bias": torch.zeros(400),
    "critic.net.layers.0.bias": torch.zeros(2, 1, 400),
    "model.net.norms.0.weight": torch.ones(2, 1, 400),
    "log_std": torch.zeros(2),
}


class Alone:
    """A learner's collectives on one rank."""

    def reduce(self, x, op, where=None):
        return x.mean()


def make(**changes) -> ParameterNoise:
    return ParameterNoise(testing.config("exploration/parameter_noise", **changes), testing.context())


def test_weight_matrices_alone_are_perturbed_with_deviation_sigma():
    noisy = make(initial_sigma=0.3).perturb_weights(WEIGHTS)
    first, *others = WEIGHTS
    assert_close(noisy[first].std(), torch.tensor(0.3), atol=0.005, rtol=0.0)
    assert noisy[first].mean().abs() < 0.005
    assert all(noisy[name] is WEIGHTS[name] for name in others)


def test_the_noise_stays_for_resample_every_rounds():
    noise = make(resample_every=3)
    rounds = [noise.perturb_weights(WEIGHTS)["model.net.layers.0.weight"] for _ in range(7)]
    equal = [bool(torch.equal(a, b)) for a, b in pairwise(rounds)]
    assert equal == [True, True, False, True, True, False]


def test_between_two_draws_only_its_size_changes():
    noise = make(resample_every=2, initial_sigma=0.1)
    first = noise.perturb_weights(WEIGHTS)["model.net.layers.0.weight"]
    noise.sigma.fill_(0.2)
    assert_close(noise.perturb_weights(WEIGHTS)["model.net.layers.0.weight"], 2.0 * first)


@pytest.mark.parametrize(("distance", "factor"), [(0.1, 1.01), (0.3, 1 / 1.01)])
def test_sigma_grows_while_the_policies_are_too_near(distance, factor):
    noise = make(initial_sigma=1.0, delta=0.2)
    noise.adapt_noise({"action": torch.zeros(5, 2)}, {"action": torch.full((5, 2), distance)})
    noise.observe({}, Alone())  # type: ignore[arg-type]
    assert_close(noise.sigma, torch.tensor(factor))
    noise.observe({}, Alone())  # type: ignore[arg-type]  a round of random actions
    assert_close(noise.sigma, torch.tensor(factor))


def test_sigma_is_logged_as_it_was():
    noise = make(initial_sigma=0.3)
    logged = noise.update({}, Alone()).metrics["sigma"]  # type: ignore[arg-type]
    noise.sigma.fill_(0.1)
    assert_close(logged, torch.tensor(0.3))


def test_distance_of_continuous_policies():
    """Appendix C: the mean, over rows and dimensions, of squared differences."""
    plain, noisy = torch.tensor([[0.0, 0.0], [1.0, -1.0]]), torch.tensor([[0.3, 0.0], [1.0, -0.6]])
    distance, aim = policy_distance({"action": plain}, {"action": noisy}, torch.tensor(0.2))
    assert_close((distance, aim), (torch.tensor((0.09 + 0.16) / 4), torch.tensor(0.04)))


@pytest.mark.parametrize("key", ["action", "q"])
def test_what_actors_measure_has_the_mean_that_one_process_measures(key):
    """Half of the rows are far off: the deviation of all is 0.21, and the mean of the halves' deviations 0.15."""
    rows = torch.zeros(8, 2), torch.tensor([[0.0, 0.0], [0.3, -0.3]]).repeat_interleave(4, 0)
    noise, excesses = make(delta=0.2), []
    for some in (slice(0, 8), slice(0, 4), slice(4, 8)):
        noise.adapt_noise(*({"action": x[some]} | {key: x[some]} for x in rows))
        excesses.append(noise.excess.clone())
    whole, *halves = excesses
    assert_close(whole, torch.stack(halves).mean())
    assert halves[0] != halves[1]
    assert (whole > 0.0) == (key == "action")


def test_distance_of_values_is_the_divergence_of_their_softmax():
    """Appendix C: with two actions of equal value and epsilon 0.5 the aim is -log(0.5 + 0.25)."""
    lowest = torch.finfo(torch.float32).min
    plain = torch.tensor([[0.0, 0.0, lowest], [0.0, 0.0, lowest]])
    noisy = torch.tensor([[math.log(3.0), 0.0, lowest], [0.0, 0.0, lowest]])
    out = [{"action": q.argmax(-1), "q": q} for q in (plain, noisy)]
    distance, aim = policy_distance(*out, torch.tensor(0.5))
    by_hand = 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert_close((distance, aim), (torch.tensor(by_hand), torch.tensor(-math.log(0.75))))


def test_distance_of_other_discrete_actions_is_the_share_that_differs():
    out = [{"action": torch.tensor(x)} for x in ([0, 1, 2, 3], [0, 1, 2, 0])]
    assert policy_distance(*out, torch.tensor(0.1)) == (0.25, torch.tensor(0.1))


def test_sigma_comes_to_where_the_actions_differ_by_delta():
    """A linear policy of 100 inputs of size 1: noise sigma moves its action by 10 sigma."""
    noise = make(initial_sigma=1.0, delta=0.5, adaptation=1.05)
    weight, obs = {"weight": torch.zeros(1, 100)}, torch.ones(1, 100)
    for _ in range(300):
        noise.adapt_noise({"action": torch.zeros(1, 1)}, {"action": obs @ noise.perturb_weights(weight)["weight"].T})
        noise.observe({}, Alone())  # type: ignore[arg-type]
    assert 0.03 < noise.sigma < 0.12


def test_a_run_acts_with_noisy_weights_and_keeps_its_own():
    """The noise is in what acts, not in what learns: with step size 0 the policy stays as it was."""
    trainer = Case("sac", "pendulum").build("exploration=[parameter_noise]", "algo.actor_lr=0")
    before = {name: p.clone() for name, p in trainer.algorithm.model.named_parameters()}
    record = play(trainer, 3)
    after = dict(trainer.algorithm.model.named_parameters())
    trainer.close()
    extra = trainer.policy.exploration["parameter_noise"]
    assert not differences(before, {name: p.detach() for name, p in after.items()})
    assert extra.rounds > 0
    assert extra.sigma != 0.05
    assert record.losses[-1]["parameter_noise/sigma"] == extra.sigma
