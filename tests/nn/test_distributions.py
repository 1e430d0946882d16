import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch import distributions as ref
from torch.testing import assert_close

from rlplug.nn import Bernoulli, Beta, Categorical, DiagGaussian, MultiCategorical, TanhGaussian

LARGEST_U = 1.0 - 2.0**-24


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(seed=0):
    """Every kind of distribution over ``[3, 5]`` rows, and its counterpart in torch."""
    logits, mean, log_std = (
        randn(3, 5, 4, seed=seed),
        randn(3, 5, 2, seed=seed + 1),
        0.5 * randn(3, 5, 2, seed=seed + 2),
    )
    normal = ref.Normal(mean, log_std.exp())
    grid = randn(3, 5, 2, 4, seed=seed + 3)
    alpha, beta = 1.0 + mean.exp(), 1.0 + log_std.exp()
    wide = ref.TransformedDistribution(ref.Beta(alpha, beta), ref.AffineTransform(-1.0, 2.0))
    return {
        "categorical": (Categorical(logits), ref.Categorical(logits=logits)),
        "multi": (MultiCategorical(grid, None, (2,)), ref.Independent(ref.Categorical(logits=grid), 1)),
        "bernoulli": (Bernoulli(logits, (4,)), ref.Independent(ref.Bernoulli(logits=logits), 1)),
        "gaussian": (DiagGaussian(mean, log_std, (2,)), ref.Independent(normal, 1)),
        "tanh": (
            TanhGaussian(mean, log_std, (2,)),
            ref.Independent(ref.TransformedDistribution(normal, ref.TanhTransform()), 1),
        ),
        "beta": (Beta(alpha, beta, (2,)), ref.Independent(wide, 1)),
    }


@pytest.mark.parametrize("kind", ["categorical", "multi", "bernoulli", "gaussian", "tanh", "beta"])
def test_logp_equals_torch(kind):
    mine, theirs = pairs()[kind]
    torch.manual_seed(0)
    action = theirs.sample()
    assert_close(mine.logp(action), theirs.log_prob(action))
    assert_close(mine.rebuild(mine.params).logp(action), theirs.log_prob(action))
    assert_close(pairs(seed=9)[kind][0].rebuild(mine.params).logp(action), theirs.log_prob(action))


@pytest.mark.parametrize("kind", ["categorical", "multi", "bernoulli", "gaussian"])
def test_entropy_equals_torch(kind):
    mine, theirs = pairs()[kind]
    assert_close(mine.entropy(), theirs.entropy())


@pytest.mark.parametrize("kind", ["categorical", "multi", "bernoulli", "gaussian", "beta"])
def test_kl_from_the_old_policy_equals_torch(kind):
    (mine, theirs), (old, old_theirs) = pairs()[kind], pairs(seed=9)[kind]
    assert_close(mine.kl_from(old.params), ref.kl_divergence(old_theirs, theirs))
    assert_close(mine.kl_from(mine.params), torch.zeros(3, 5, dtype=torch.float64))


def test_kl_of_tanh_gaussians_is_that_of_the_gaussians():
    assert_close(
        pairs()["tanh"][0].kl_from(pairs(seed=9)["tanh"][0].params),
        pairs()["gaussian"][0].kl_from(pairs(seed=9)["gaussian"][0].params),
    )


@pytest.mark.parametrize(("std", "error"), [(0.1, 1e-8), (1.0, 1e-8), (2.0, 1e-5)])
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
def test_entropy_of_a_tanh_gaussian_equals_an_integral(mean, std, error):
    u = torch.linspace(mean - 12.0 * std, mean + 12.0 * std, 200_001, dtype=torch.float64)
    loc, scale = torch.tensor([mean, std], dtype=torch.float64)
    logp = ref.Normal(loc, scale).log_prob(u)
    slope = -2.0 * torch.logaddexp(u, -u) + 2.0 * math.log(2.0)
    dist = TanhGaussian(loc[None], scale.log()[None], (1,))
    assert_close(dist.entropy(), torch.trapezoid(logp.exp() * (slope - logp), u), atol=error, rtol=0.0)


def test_entropy_of_a_tanh_gaussian_has_a_gradient_and_sums_over_an_action():
    mean, log_std = randn(3, 5, 4).requires_grad_(), (0.3 * randn(4, seed=1)).requires_grad_()
    dist = TanhGaussian(mean, log_std, (2, 2))
    each = [TanhGaussian(mean[..., i : i + 1], log_std[i : i + 1], (1,)).entropy() for i in range(4)]
    assert_close(dist.entropy(), torch.stack(each).sum(0))
    dist.entropy().sum().backward()
    assert (mean.grad * mean < 0).all()  # widest if it is centered
    assert log_std.grad.isfinite().all()


def test_entropy_of_a_beta_equals_torch():
    mine, _ = pairs()["beta"]
    assert_close(mine.entropy(), (ref.Beta(mine.alpha, mine.beta).entropy() + math.log(2.0)).sum(-1))


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.7, 1.7), (50.0, 3.0), (1.0, 30.0), (500.0, 700.0)])
def test_samples_of_a_beta_have_its_distribution(alpha, beta):
    """The largest gap between both distribution functions is below Kolmogorov's limit for one in 10,000 seeds."""
    n, draw = 20_000, torch.Generator().manual_seed(0)
    mine = Beta(torch.full((n, 1), alpha), torch.full((n, 1), beta), (1,))
    action = mine.sample(torch.randn(n, Beta.NOISE, generator=draw))
    x = 0.5 * (1.0 + action.double())[:, 0].sort().values
    cdf = torch.from_numpy(special.betainc(alpha, beta, x.numpy()))
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = torch.maximum(steps[1:] - cdf, cdf - steps[:-1]).max()
    assert gap < 2.23 / math.sqrt(n)
    assert action.abs().max() <= 1.0


def test_samples_of_a_beta_are_independent_and_a_function_of_their_own_noise():
    noise = torch.randn(4000, 3 * Beta.NOISE, generator=torch.Generator().manual_seed(0))
    alpha, beta = torch.tensor([1.2, 3.0, 9.0]).expand(4000, 3), torch.tensor([2.0, 3.0, 1.5]).expand(4000, 3)
    action = Beta(alpha, beta, (3,)).sample(noise)
    assert (torch.corrcoef(action.T) - torch.eye(3)).abs().max() < 4.0 / math.sqrt(4000)
    assert torch.equal(Beta(alpha[7:9], beta[7:9], (3,)).sample(noise[7:9]), action[7:9])
    assert_close(action.mean(0), (alpha - beta)[0] / (alpha + beta)[0], atol=0.05, rtol=0.0)


def test_a_beta_whose_rounds_are_all_rejected_takes_the_first():
    noise = torch.full((Beta.NOISE,), 9.0)  # uniform numbers of 1, which no ratio of densities exceeds
    noise[0] = -9.0  # and a negative number for a gamma variable
    action = Beta(torch.tensor([1.5]), torch.tensor([2.0]), (1,)).sample(noise)
    assert -1.0 <= action.item() < -0.99


EXPECTED = {
    "a": lambda a: (a, torch.ones_like(a)),
    "a^2": lambda a: (a.square(), 2.0 * a),
    "sin 3a": lambda a: (torch.sin(3.0 * a), 3.0 * torch.cos(3.0 * a)),
}
"""functions of an action, and their derivatives"""


@pytest.mark.parametrize("function", EXPECTED)
@pytest.mark.parametrize(("alpha", "beta"), [(1.2, 4.0), (1.7, 1.7), (30.0, 6.0), (200.0, 300.0)])
def test_pathwise_gradients_of_a_beta_are_those_of_the_expectation(alpha, beta, function):
    """Both by the midpoint rule: E[f'(a) da/d(alpha, beta)], and central differences of E[f(a)]."""
    n = 40_000
    a = 2.0 * (torch.arange(n, dtype=torch.float64) + 0.5).unsqueeze(-1) / n - 1.0
    params = torch.tensor([alpha, beta], dtype=torch.float64)

    def density(at):
        return Beta(*at.expand(n, 2).split(1, -1), (1,)).logp(a).exp() * (2.0 / n)

    own = [x.expand(n, 1).clone().requires_grad_() for x in params]
    (Beta(*own, (1,)).reparameterized(a) * density(params).unsqueeze(-1) * EXPECTED[function](a)[1]).sum().backward()
    found = torch.stack([x.grad.sum() for x in own])
    values, expected = EXPECTED[function](a)[0].squeeze(-1), []
    for step in torch.eye(2, dtype=torch.float64) * params * 1e-4:
        difference = ((density(params + step) - density(params - step)) * values).sum()
        expected.append(difference / (2.0 * step.sum()))
    assert_close(found, torch.stack(expected), rtol=2e-3, atol=1e-6)


def test_a_reparameterized_sample_is_the_sample_with_the_gradient_of_torch():
    params = [(1.0 + 8.0 * torch.rand(50, 2, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    mine, noise = Beta(*params, (2,)), torch.randn(50, 2 * Beta.NOISE, dtype=torch.float64)
    action, logp = mine.sample_and_logp(noise)
    assert torch.equal(action, mine.sample(noise))
    found = torch.autograd.grad(action.square().sum(), params, retain_graph=True)
    both = torch.stack(params, -1)
    x = torch.stack((0.5 + 0.5 * action, 0.5 - 0.5 * action), -1).detach()
    scaled = torch._dirichlet_grad(x, both, both.sum(-1, keepdim=True).expand_as(both))
    of_x = torch.stack((2.0 * 2.0 * action, torch.zeros_like(action)), -1)
    expected = scaled * (of_x - (x * of_x).sum(-1, keepdim=True))  # as in the backward of Dirichlet.rsample
    for own, other in zip(found, expected.unbind(-1), strict=True):
        assert_close(own, other)
    wide = ref.TransformedDistribution(ref.Beta(*params), ref.AffineTransform(-1.0, 2.0))
    assert_close(logp, wide.log_prob(action).sum(-1))
    free = torch.autograd.grad(wide.log_prob(action).sum(), params, retain_graph=True)
    for own, other in zip(torch.autograd.grad(logp.sum(), params), free, strict=True):
        assert_close(own, other)


def test_gradients_of_extreme_samples_are_finite():
    alpha, beta = (torch.tensor([1.0, 1.0, 900.0, 900.0]), torch.tensor([1.0, 900.0, 1.0, 900.0]))
    params = [x.unsqueeze(-1).requires_grad_() for x in (alpha, beta)]
    for a in (-1.0, 0.0, 1.0):
        grads = torch.autograd.grad(Beta(*params, (1,)).reparameterized(torch.full((4, 1), a)).sum(), params)
        assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("kind", ["beta", "tanh"])
def test_densities_at_the_bounds_are_finite(kind):
    mine, _ = pairs()[kind]
    dist, ends = mine.rebuild(mine.params.float().requires_grad_()), torch.tensor([1.0, -1.0]).expand(3, 5, 2)
    logp = dist.logp(ends)
    assert logp.isfinite().all()
    assert_close(dist.logp(2.0 * ends), logp)


def test_a_beta_in_single_precision_is_close_to_torch_in_double():
    (mine, theirs), (old, old_theirs) = pairs()["beta"], pairs(seed=9)["beta"]
    single, action = mine.rebuild(mine.params.float()), mine.mode()
    assert_close(single.logp(action.float()), theirs.log_prob(action).float(), atol=1e-5, rtol=0.0)
    assert_close(single.entropy(), mine.entropy().float(), atol=1e-5, rtol=0.0)
    kl = ref.kl_divergence(old_theirs, theirs)
    assert_close(single.kl_from(old.params.float()), kl.float(), atol=1e-5, rtol=1e-5)


def test_modes():
    dists = {kind: mine for kind, (mine, _) in pairs().items()}
    assert torch.equal(dists["categorical"].mode(), dists["categorical"].params.argmax(-1))
    assert torch.equal(dists["multi"].mode(), dists["multi"].log_probs.argmax(-1))
    assert torch.equal(dists["bernoulli"].mode(), (dists["bernoulli"].params > 0).long())
    assert_close(dists["gaussian"].mode(), dists["gaussian"].mean)
    assert_close(dists["tanh"].mode(), dists["tanh"].mean.tanh())
    alpha, beta = dists["beta"].params.chunk(2, -1)
    assert_close(dists["beta"].mode(), 2.0 * (alpha - 1.0) / (alpha + beta - 2.0) - 1.0)
    assert_close(dists["beta"].uniform().mode(), torch.zeros_like(alpha))


def test_samples_have_the_right_frequencies():
    u = ((torch.arange(1000) + 0.5) / 1000)[:, None]
    p = torch.tensor([0.1, 0.0, 0.25, 0.65])
    action = Categorical(p.log().expand(1000, 4)).sample(u)
    assert action.dtype == torch.int64
    assert torch.bincount(action, minlength=4).tolist() == [100, 0, 250, 650]
    two = MultiCategorical(torch.stack([p, p.flip(0)]).log().expand(1000, 2, 4), None, (2,)).sample(u.expand(1000, 2))
    assert torch.bincount(two[:, 0], minlength=4).tolist() == [100, 0, 250, 650]
    assert torch.bincount(two[:, 1], minlength=4).tolist() == [650, 250, 0, 100]
    bits = Bernoulli(torch.tensor([0.0, math.log(3.0)]).expand(1000, 2), (2,)).sample(u.expand(1000, 2))
    assert bits.dtype == torch.int64
    assert bits.sum(0).tolist() == [500, 750]


def test_gaussian_samples_are_reparameterised():
    mean, log_std = torch.tensor([[1.0]], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    action = DiagGaussian(mean, log_std, (1,)).sample(torch.tensor([[2.0]]))
    assert action.item() == pytest.approx(1.0 + 2.0 * math.exp(0.5))
    action.sum().backward()
    assert mean.grad.item() == 1.0
    assert log_std.grad.item() == pytest.approx(2.0 * math.exp(0.5))


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-30.0, 30.0, width=32), min_size=2, max_size=6),
    allowed=st.integers(1, 2**6 - 1),
    u=st.one_of(st.sampled_from([0.0, 2.0**-24, LARGEST_U]), st.floats(0.0, LARGEST_U, width=32)),
)
def test_masked_actions_are_never_taken(logits, allowed, u):
    mask = torch.tensor([bool(allowed >> i & 1) for i in range(len(logits))])
    if not mask.any():
        mask[0] = True
    dist = Categorical(torch.tensor(logits), mask)
    assert mask[dist.sample(torch.tensor([u]))]
    assert mask[dist.mode()]
    few = ref.Categorical(logits=torch.tensor(logits)[mask])
    assert_close(dist.entropy(), few.entropy(), atol=1e-5, rtol=1e-4)
    assert_close(dist.logp(mask.nonzero()[0, 0]), few.logits[0], atol=1e-5, rtol=1e-4)
    assert_close(dist.kl_from(dist.params), torch.tensor(0.0))


def test_the_largest_noise_meets_an_allowed_action_whatever_the_probabilities_add_up_to():
    logits, mask = randn(2000, 20).float(), torch.ones(2000, 20, dtype=torch.bool)
    mask[:, -1] = False
    dist = Categorical(logits, mask)
    totals = dist.params.exp().cumsum(-1)[:, -1]
    assert totals.min() < LARGEST_U < 1.0 < totals.max()
    assert (dist.sample(torch.full((2000, 1), LARGEST_U)) < 19).all()


def test_gradients_with_masks_are_finite_and_spare_masked_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    dist = Categorical(logits, torch.tensor([[True, False, True]]))
    old = Categorical(torch.zeros(1, 3), torch.tensor([[True, False, True]]))
    (dist.logp(torch.tensor([0])) + dist.entropy() + dist.kl_from(old.params)).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0.0
    assert logits.grad[0, 0] != 0.0


def test_a_row_without_any_allowed_action_is_uniform():
    dist = Categorical(torch.tensor([[1.0, 5.0]]), torch.tensor([[False, False]]))
    assert_close(dist.params.exp(), torch.tensor([[0.5, 0.5]]))
    assert_close(dist.entropy(), torch.tensor([math.log(2.0)]))


def test_tanh_gaussian_by_hand():
    dist = TanhGaussian(torch.tensor([0.3]), torch.tensor([0.5]).log(), (1,))
    action, logp = dist.sample_and_logp(torch.tensor([(0.7 - 0.3) / 0.5]))
    assert_close(action, torch.tensor([0.604368]))
    assert_close(logp, torch.tensor(-0.091251), atol=1e-6, rtol=0.0)
    assert_close(dist.logp(action), logp)
    assert_close(dist.sample(torch.tensor([0.8])), action)
    # An environment with bounds +-2 executes 2 a: the density of that is half as high.
    assert_close(logp - math.log(2.0), torch.tensor(-0.784398), atol=1e-6, rtol=0.0)


@settings(deadline=None)
@given(mean=st.floats(-5.0, 5.0), log_std=st.floats(-3.0, 1.0), noise=st.floats(-3.0, 3.0))
def test_tanh_gaussian_logp_of_a_sample_equals_torch(mean, log_std, noise):
    mean, log_std, noise = (torch.tensor([x], dtype=torch.float64) for x in (mean, log_std, noise))
    _, logp = TanhGaussian(mean, log_std, (1,)).sample_and_logp(noise)
    u = mean + log_std.exp() * noise
    slope = 4.0 / (u.exp() + (-u).exp()) ** 2
    assert_close(logp, (ref.Normal(mean, log_std.exp()).log_prob(u) - slope.log())[0])


@pytest.mark.parametrize("mean", [-60.0, 60.0])
def test_tanh_gaussian_far_out_stays_finite(mean):
    mean = torch.tensor([[mean]], requires_grad=True)
    action, logp = TanhGaussian(mean, torch.zeros(1), (1,)).sample_and_logp(torch.zeros(1, 1))
    assert action.abs().item() == 1.0
    assert logp.item() == pytest.approx(120.0 - math.log(4.0) - 0.5 * math.log(2.0 * math.pi), rel=1e-5)
    logp.sum().backward()
    assert mean.grad.abs().item() == pytest.approx(2.0)
    assert TanhGaussian(mean, torch.zeros(1), (1,)).logp(action).isfinite().all()


def test_the_uniform_distribution_is_over_what_is_allowed():
    mask = torch.tensor([[[True, False, True], [True, True, False]], [[False, False, True], [False, False, False]]])
    dist = MultiCategorical(100.0 * randn(2, 2, 3), mask, (2,))
    everything = torch.ones(3, dtype=torch.bool)  # a row that allows nothing counts as one that allows all
    allowed = torch.stack((mask[0], torch.stack((mask[1, 0], everything))))
    assert torch.equal(dist.allowed, allowed)
    assert_close(dist.uniform().log_probs.exp(), allowed / allowed.sum(-1, keepdim=True).double())
    assert dist.uniform().event == (2,)


def test_uniform_actions_do_not_depend_on_the_parameters():
    mask = torch.tensor([True, False, True, True])
    masked = Categorical(torch.tensor([9.0, 0.0, -9.0, 3.0]), mask).uniform()
    assert_close(masked.params.exp(), mask / 3.0)
    assert_close(Bernoulli(torch.tensor([9.0, -9.0]), (2,)).uniform().params, torch.zeros(2))
    for cls in (DiagGaussian, TanhGaussian):
        dist = cls(torch.full((4000, 2), 9.0), torch.tensor([3.0, -3.0]), (2,)).uniform()
        action = dist.sample(torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)))
        counts = torch.stack([torch.histc(column, 4, -1.0, 1.0) for column in action.T])
        assert (action.abs() <= 1).all()
        assert (counts - 1000).abs().max() < 4 * math.sqrt(1000 * 0.75)
        assert_close(dist.logp(action), torch.full((4000,), math.log(0.25)))
        assert_close(dist.entropy(), torch.full((4000,), math.log(4.0)))
    flat = Beta(torch.full((40, 2), 9.0), torch.full((40, 2), 2.0), (2,)).uniform()
    assert_close(flat.logp(flat.sample(torch.randn(40, 2 * Beta.NOISE))), torch.full((40,), math.log(0.25)))
    assert_close(flat.entropy(), torch.full((40,), math.log(4.0)))
