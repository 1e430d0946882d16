"""Off-policy estimators on a chain that is solved by hand.

State 0: action 1 gives 1 and leads to state 1, action 0 ends. State 1: action 1 gives 1, both actions end. The behavior
chooses action 1 with probability 1/2, the target policy with 4/5; so ``V(1) = 0.8`` and ``V(0) = 0.8 (1 + 0.9 * 0.8)``.
"""

import pytest
import torch
from torch.testing import assert_close

from rlplug.functional.off_policy import (
    doubly_robust,
    effective_sample_size,
    importance_sampling,
    log_weights,
    mean_interval,
    regression,
    student_quantile,
    weighted_importance_sampling,
)

GAMMA, TRUTH = 0.9, 1.376
ACTIONS = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])  # as often as the behavior plays them
VALID = torch.tensor([[True] * 4, [False, False, True, True]])
REWARD = ACTIONS.double()
Q, V = torch.tensor([[0.0, 1.72], [0.0, 1.0]]).double(), torch.tensor([1.376, 0.8]).double()


def log_ratios(actions=ACTIONS, valid=VALID):
    target = torch.where(actions == 1, 0.8, 0.2).double().log()
    return log_weights(target, torch.full_like(target, 0.5).log(), valid)


def columns(*episodes):
    """Pad lists of numbers: ``[T, B]``, and which are there."""
    longest = max(map(len, episodes))
    padded = [[*episode, *[float("nan")] * (longest - len(episode))] for episode in episodes]
    x = torch.tensor(padded).double().T
    return x, ~x.isnan()


def test_weights_by_hand_and_carried_behind_the_end():
    assert_close(log_ratios().exp(), torch.tensor([[0.4, 0.4, 1.6, 1.6], [0.4, 0.4, 0.64, 2.56]]).double())


def test_importance_sampling_on_the_chain():
    weights = log_ratios()
    per_step = importance_sampling(REWARD, weights, VALID, GAMMA)
    assert_close(per_step, torch.tensor([0.0, 0.0, 1.6, 3.904]).double())
    per_episode = importance_sampling(REWARD, weights, VALID, GAMMA, per_step=False)
    assert_close(per_episode, torch.tensor([0.0, 0.0, 0.64, 4.864]).double())
    for values in (per_step, per_episode):
        assert values.mean().item() == pytest.approx(TRUTH)


def test_on_the_chain_weights_that_are_right_on_average_need_no_normalization():
    weights = log_ratios()
    assert weighted_importance_sampling(REWARD, weights, VALID, GAMMA).mean().item() == pytest.approx(TRUTH)
    per_episode = weighted_importance_sampling(REWARD, weights, VALID, GAMMA, per_step=False)
    assert per_episode.mean().item() == pytest.approx((0.64 * 1 + 2.56 * 1.9) / (0.4 + 0.4 + 0.64 + 2.56))


def test_two_episodes_by_hand():
    """Ratios 2, 0.5 with rewards 1, 1; and ratio 0.5 with reward 1."""
    ratio, valid = columns([2.0, 0.5], [0.5])
    reward = torch.where(valid, 1.0, float("nan")).double()
    weights = log_weights(ratio.log(), torch.zeros_like(ratio), valid)
    step, whole = importance_sampling, weighted_importance_sampling
    assert step(reward, weights, valid, 0.9).mean().item() == pytest.approx(1.7)
    assert step(reward, weights, valid, 0.9, per_step=False).mean().item() == pytest.approx(1.2)
    assert whole(reward, weights, valid, 0.9).mean().item() == pytest.approx(1.6)
    assert whole(reward, weights, valid, 0.9, per_step=False).mean().item() == pytest.approx(1.6)


def test_doubly_robust_of_a_bandit_by_hand():
    one = [torch.tensor([[x]]).double() for x in (1.0, 0.4, 0.3)]
    weights, valid = torch.tensor([[2.0]]).double().log(), torch.tensor([[True]])
    assert doubly_robust(*one, weights, valid, 0.9).item() == pytest.approx(1.5)
    assert doubly_robust(*one, weights, valid, 0.9, weighted=True).item() == pytest.approx(0.9)


@pytest.mark.parametrize("weighted", [False, True])
def test_with_the_true_values_every_episode_says_the_truth(weighted):
    states = torch.tensor([[0] * 4, [1] * 4])
    q, value = Q[states, ACTIONS], V[states]
    out = doubly_robust(REWARD, q, value, log_ratios(), VALID, GAMMA, weighted=weighted)
    assert_close(out, torch.full((4,), TRUTH).double())


def test_a_wrong_model_is_corrected():
    states = torch.tensor([[0] * 4, [1] * 4])
    q = torch.tensor([[3.0, -1.0], [0.5, 0.25]]).double()
    value = 0.2 * q[:, 0] + 0.8 * q[:, 1]
    out = doubly_robust(REWARD, q[states, ACTIONS], value[states], log_ratios(), VALID, GAMMA)
    assert out.mean().item() == pytest.approx(TRUTH)
    assert out.std() > 1


@pytest.mark.parametrize("per_step", [False, True])
def test_numbers_of_a_weighted_estimate_are_its_linearization(per_step):
    """The mean is the estimate, and what an episode adds is how the estimate moves with its weight."""
    valid, reward = VALID[:, 1:], REWARD[:, 1:]

    def values(weights):
        return weighted_importance_sampling(reward, weights, valid, GAMMA, per_step=per_step)

    weights, eps = log_ratios()[:, 1:], 1e-6
    estimate = values(weights).mean()
    for i in range(3):
        more = weights.clone()
        more[:, i] += eps
        slope = (values(more).mean() - estimate) / eps
        assert slope.item() == pytest.approx((values(weights)[i] - estimate).item() / 3, abs=1e-5)


def test_an_action_that_the_target_never_takes_counts_for_nothing():
    weights = log_weights(torch.tensor([[-3e38, 0.0]]).double(), torch.zeros(1, 2).double(), torch.ones(1, 2).bool())
    one = torch.ones(1, 2).double(), weights, torch.ones(1, 2).bool(), 1.0
    assert importance_sampling(*one).tolist() == [0.0, 1.0]
    assert weighted_importance_sampling(*one).mean().item() == 1.0


def test_a_ratio_of_weights_that_are_all_0_is_undefined():
    weights, one = torch.full((1, 2), -3e38).double(), torch.ones(1, 2).double()
    assert importance_sampling(one, weights, one.bool(), 1.0).tolist() == [0.0, 0.0]
    assert weighted_importance_sampling(one, weights, one.bool(), 1.0).isnan().all()
    assert effective_sample_size(weights[0]).item() == 0.0


def test_targets_and_weights_of_a_regression_by_hand():
    """Two episodes with ratios (2, 0.5) and (0.5), and rewards 1: the first target has the ratio of the second step."""
    ratio, valid = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[True, True], [True, False]])
    target, weight = regression(valid.double(), ratio.log().cumsum(0), valid, 0.9)
    assert_close(target, torch.tensor([[1.0 + 0.9 * 0.5, 1.0], [1.0, 0.0]]).double())
    plain = torch.tensor([[2.0, 0.5], [0.9 * 2.0 * 0.5, 0.0]]).double()
    assert_close(weight, plain / (plain.sum() / 3))


def test_effective_sample_size():
    assert effective_sample_size(torch.zeros(5)).item() == pytest.approx(5)
    assert effective_sample_size(torch.tensor([3.0, 1.0]).log()).item() == pytest.approx(16 / 10)


def test_interval_of_five_numbers():
    mean, low, high = mean_interval(torch.arange(1.0, 6.0), 0.95)
    half = 2.776445 * 2.5**0.5 / 5**0.5
    assert (mean.item(), low.item(), high.item()) == pytest.approx((3, 3 - half, 3 + half), rel=1e-3)


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.95, 4, 2.13185),
        (0.975, 9, 2.26216),
        (0.995, 30, 2.75),
        (0.975, 10**6, 1.95996),
        (0.025, 9, -2.26216),
    ],
)
def test_quantiles_of_student(p, df, expected):
    assert student_quantile(p, df) == pytest.approx(expected, rel=5e-3)
