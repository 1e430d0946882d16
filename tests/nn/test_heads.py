import math
import re
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Text
from torch import distributions as ref
from torch.testing import assert_close

from rlplug.config import compose
from rlplug.nn import (
    BernoulliHead,
    BetaHead,
    Categorical,
    CategoricalHead,
    DiagGaussian,
    DiagGaussianHead,
    HybridHead,
    MultiCategoricalHead,
    TanhGaussianHead,
    as_executed,
    flatten,
    head_for,
    soft_head,
)
from rlplug.nn.adaptation import AdaptivePolicy
from rlplug.run.build import build
from rlplug.spaces import Hybrid
from rlplug.testing.context import context
from rlplug.types import ConfigError

SPACES = [
    (Discrete(3), CategoricalHead, 1),
    (MultiDiscrete([2, 5, 3]), MultiCategoricalHead, 3),
    (MultiDiscrete([4, 4]), MultiCategoricalHead, 2),
    (MultiDiscrete(np.array([[2, 3], [4, 5], [1, 2]])), MultiCategoricalHead, 6),
    (MultiBinary(4), BernoulliHead, 4),
    (MultiBinary((2, 3)), BernoulliHead, 6),
    (Box(-np.inf, np.inf, (2,), np.float32), DiagGaussianHead, 2),
    (Box(-np.inf, np.inf, (2, 3), np.float32), DiagGaussianHead, 6),
    (Box(-np.inf, np.inf, (), np.float32), DiagGaussianHead, 1),
    (Hybrid(Box(-np.inf, np.inf, (2,), np.float32), MultiDiscrete([3, 2, 4])), HybridHead, 5),
]


@pytest.mark.parametrize(("space", "kind", "size"), SPACES, ids=str)
@torch.no_grad()
def test_head_of_a_space_acts_in_it(space, kind, size):
    torch.manual_seed(0)
    head = head_for(space, 8)
    assert isinstance(head, kind)
    noise = head.noise(context(), 20)
    assert noise.shape == (20, size) == (20, head.noise_size)
    dist = head(torch.randn(20, 8))
    action = dist.sample(noise)
    assert action.dtype == (torch.float32 if isinstance(space, Box | Hybrid) else torch.int64)
    for row in [*action, *dist.mode()]:
        assert space.contains(row.numpy().astype(space.dtype))
    assert dist.logp(action).shape == dist.entropy().shape == (20,)
    assert_close(dist.kl_from(dist.params), torch.zeros(20), atol=1e-6, rtol=0.0)
    assert dist.params.shape[:-1] == (20,)


@pytest.mark.parametrize(("space", "kind", "size"), SPACES, ids=str)
def test_rows_with_a_time_axis_are_treated_alike(space, kind, size):
    torch.manual_seed(0)
    head = head_for(space, 8, gain=1.0)
    features, noise = torch.randn(4, 5, 8), head.noise(context(), 20).view(4, 5, size)
    dist, flat = head(features), head(features.flatten(0, 1))
    action = dist.sample(noise)
    assert action.shape == (4, 5, *(space.shape or ()))
    assert_close(action.flatten(0, 1), flat.sample(noise.flatten(0, 1)))
    assert_close(dist.logp(action).flatten(), flat.logp(action.flatten(0, 1)))
    assert_close(dist.entropy().flatten(), flat.entropy())
    assert_close(dist.params.flatten(0, 1), flat.params)
    other = head_for(space, 8, gain=1.0)(features)
    assert_close(other.kl_from(dist.params).flatten(), other.rebuild(other.params.flatten(0, 1)).kl_from(flat.params))
    assert (other.kl_from(dist.params) > 0).all()


def test_noise_is_uniform_or_normal_as_the_head_needs():
    uniform = CategoricalHead(2, 3).noise(context(), 1000)
    assert 0.0 <= uniform.min() < 0.1
    assert 0.9 < uniform.max() < 1.0
    normal = TanhGaussianHead(2, 1).noise(context(), 1000)
    assert normal.std().item() == pytest.approx(1.0, abs=0.1)


def test_choices_of_different_sizes_equal_separate_ones():
    torch.manual_seed(0)
    head = MultiCategoricalHead(4, [2, 3], gain=1.0)
    features = torch.randn(6, 4)
    logits = head.linear(features)
    first, second = ref.Categorical(logits=logits[:, :2]), ref.Categorical(logits=logits[:, 3:])
    action = torch.stack([first.sample(), second.sample()], -1)
    dist = head(features)
    assert_close(dist.logp(action), first.log_prob(action[:, 0]) + second.log_prob(action[:, 1]))
    assert_close(dist.entropy(), first.entropy() + second.entropy())


HYBRID = Hybrid(Box(-1.0, 1.0, (2,), np.float32), MultiDiscrete([3, 2]))


def hybrid_head(**given):
    torch.manual_seed(0)
    return head_for(HYBRID, 4, gain=1.0, options=options(**given)).double()


def test_hybrid_actions_are_a_product_of_both():
    head, features = hybrid_head(initial_log_std=-0.5), torch.randn(6, 4, dtype=torch.float64)
    dist, logits = head(features), head.discrete.linear(features)
    numbers = ref.Independent(ref.Normal(head.continuous.linear(features), math.exp(-0.5)), 1)
    first, second = ref.Categorical(logits=logits[:, :3]), ref.Categorical(logits=logits[:, 3:5])
    x, i, j = numbers.sample(), first.sample(), second.sample()
    action = torch.cat((x, torch.stack((i, j), -1)), -1)
    assert_close(dist.logp(action), numbers.log_prob(x) + first.log_prob(i) + second.log_prob(j))
    assert_close(dist.entropy(), numbers.entropy() + first.entropy() + second.entropy())
    old = hybrid_head()(features + 0.5)
    assert_close(dist.kl_from(dist.params), torch.zeros(6, dtype=torch.float64))
    alike = dist.rebuild(old.params)
    assert_close(alike.logp(action), old.logp(action))
    means, old_logits = head.continuous.linear(features + 0.5), head.discrete.linear(features + 0.5)
    kl = ref.kl_divergence(ref.Independent(ref.Normal(means, 1.0), 1), numbers)
    kl = kl + ref.kl_divergence(ref.Categorical(logits=old_logits[:, :3]), first)
    kl = kl + ref.kl_divergence(ref.Categorical(logits=old_logits[:, 3:5]), second)
    assert_close(dist.kl_from(old.params), kl)
    assert_close(dist.mode(), torch.cat((numbers.mean, torch.stack([first.mode, second.mode], -1)), -1))


def test_samples_of_hybrid_actions_have_their_frequencies():
    head, n = hybrid_head(), 40_000
    dist = head(torch.randn(1, 4, dtype=torch.float64).expand(n, 4))
    action = dist.sample(head.noise(context(), n).double())
    std = (action[:, :2] - dist.continuous.mean).std(0)
    assert_close(std, torch.ones(2, dtype=torch.float64), atol=0.02, rtol=0.0)
    pairs = torch.bincount((action[:, 2] * 2 + action[:, 3]).long(), minlength=6) / n
    first, second = dist.discrete.log_probs[0].exp()
    expected = (first.unsqueeze(1) * second[:2]).flatten()
    assert_close(pairs.double(), expected, atol=0.01, rtol=0.0)
    split = torch.stack([action[action[:, 2] == i, 0].mean() for i in range(3)])
    assert_close(split, dist.continuous.mean[0, 0].expand(3), atol=0.05, rtol=0.0)  # they are independent


def test_the_largest_noise_chooses_what_exists():
    head = hybrid_head()
    noise = torch.full((1, head.noise_size), 40.0)
    for sign in (1.0, -1.0):
        choices = head.float()(torch.zeros(1, 4)).sample(sign * noise)[0, 2:]
        assert ((choices >= 0) & (choices < torch.tensor([3, 2]))).all()


def test_masks_of_hybrid_actions_are_those_of_the_discrete_part():
    head, mask = hybrid_head(), torch.tensor([[False, False, True, True, False]])
    dist = head(torch.zeros(1, 4, dtype=torch.float64), mask)
    noise = head.noise(context(), 50).double()
    for of in (dist, dist.uniform()):
        action = of.rebuild(of.params.expand(50, -1)).sample(noise)
        assert (action[:, 2:] == torch.tensor([2.0, 0.0])).all()
        assert len(action[:, 0].unique()) == 50
    assert_close(dist.entropy(), dist.continuous.entropy().expand(1))


@pytest.mark.parametrize("name", ["squashed_gaussian", "beta"])
def test_distributions_by_name_are_those_of_the_numbers(name):
    head = hybrid_head(distribution=name)
    noise = head.noise(context(), 50).double()
    dist = head(torch.randn(50, 4, dtype=torch.float64))
    for action in (dist.sample(noise), dist.mode(), dist.uniform().sample(noise)):
        assert all(HYBRID.contains(row.detach().float().numpy()) for row in action)
        assert_close(as_executed(HYBRID, action), action)


def test_hybrid_actions_as_one_flat_vector():
    action = torch.tensor([[2.0, -0.5, 1.0, 0.0]])
    assert flatten(HYBRID, as_executed(HYBRID, action)).tolist() == [[1.0, -0.5, 0.0, 1.0, 0.0, 1.0, 0.0]]


def test_policies_with_weights_of_their_own_have_hybrid_actions():
    """As MAML and MBMPO use them, under ``vmap``."""
    torch.manual_seed(0)
    torso = SimpleNamespace(out_dim=3, initial_carry=lambda n: {})
    policy = AdaptivePolicy(torso, HYBRID)
    policy.torso = lambda obs, carry, is_first: (obs, carry)
    rows = {"obs": torch.randn(2, 5, 3), "noise": torch.randn(2, 5, policy.policy.noise_size)}
    found = policy.sample(policy.initial(2), rows)
    dist, _ = policy.dist(rows, {})
    assert_close(found["action"], dist.sample(rows["noise"]))
    assert_close(found["logp"], dist.logp(found["action"]))
    again = {key: x.unsqueeze(1) for key, x in (found | {"obs": rows["obs"]}).items() if key != "logp"}
    logp, kl, entropy = (x.squeeze(1) for x in policy.evaluate(policy.initial(2), again))
    assert_close(logp, found["logp"])
    assert_close(kl, torch.zeros(2, 5), atol=1e-6, rtol=0.0)
    assert_close(entropy, dist.entropy())


def test_order_among_hybrid_actions_is_refused():
    with pytest.raises(ConfigError, match="autoregressive conditions several choices"):
        hybrid_head(distribution="autoregressive")


@pytest.mark.parametrize(
    ("continuous", "discrete", "why"),
    [
        (Box(-1, 1, (2, 1)), MultiDiscrete([2]), r"give a float32 Box \[N\]"),
        (Box(-1, 1, (2,), np.float64), MultiDiscrete([2]), r"give a float32 Box \[N\]"),
        (Box(-1, 1, (2,)), Discrete(2), "give a MultiDiscrete"),
        (Box(-1, 1, (2,)), MultiDiscrete([2], start=[1]), "that counts from 0"),
    ],
)
def test_parts_of_another_kind_are_refused(continuous, discrete, why):
    with pytest.raises(ValueError, match=why):
        Hybrid(continuous, discrete)


@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_masks_of_several_choices_stand_one_behind_the_other(lead):
    torch.manual_seed(0)
    head = MultiCategoricalHead(4, [2, 3], gain=1.0)
    features, mask = torch.randn(*lead, 4), torch.rand(*lead, 5) < 0.5
    mask[..., 1] = mask[..., 4] = True
    logits = head.linear(features)
    first = Categorical(logits[..., :2], mask[..., :2])
    second = Categorical(logits[..., 3:], mask[..., 2:])
    dist, noise = head(features, mask), torch.rand(*lead, 2)
    action = dist.sample(noise)
    assert_close(action, torch.stack([first.sample(noise[..., :1]), second.sample(noise[..., 1:])], -1))
    assert_close(dist.logp(action), first.logp(action[..., 0]) + second.logp(action[..., 1]))
    assert_close(dist.entropy(), first.entropy() + second.entropy())


def test_the_mask_of_one_choice_reaches_its_distribution():
    head = CategoricalHead(4, 3)
    mask = torch.tensor([[True, False, False], [False, False, True]])
    assert head(torch.randn(2, 4), mask).sample(torch.rand(2, 1)).tolist() == [0, 2]


@pytest.mark.parametrize(
    "head", [BernoulliHead(4, (2,)), DiagGaussianHead(4, (2,)), TanhGaussianHead(4, 2), BetaHead(4, (2,))]
)
def test_masks_of_other_spaces_are_refused(head):
    with pytest.raises(ConfigError, match="masks support Discrete"):
        head(torch.zeros(3, 4), torch.ones(3, 2, dtype=torch.bool))


def test_standard_deviation_is_one_parameter_or_an_output():
    torch.manual_seed(0)
    features = torch.randn(5, 4)
    free = DiagGaussianHead(4, (2,), initial_log_std=-1.5)
    assert_close(free(features).log_std, torch.full((2,), -1.5))
    free(features).logp(torch.zeros(5, 2)).sum().backward()
    assert (free.log_std.grad != 0).all()
    dependent = DiagGaussianHead(4, (2,), gain=1.0, initial_log_std=-1.5, state_dependent_std=True)
    log_std = dependent(features).log_std
    assert log_std.shape == (5, 2)
    assert len(log_std[:, 0].unique()) == 5
    assert dependent(torch.zeros(1, 4)).log_std.tolist() == [[-1.5, -1.5]]


def options(distribution="gaussian", free_log_std=True, initial_log_std=0.0):
    return SimpleNamespace(distribution=distribution, free_log_std=free_log_std, initial_log_std=initial_log_std)


BOXES = [Box(-1.0, 1.0, shape, np.float32) for shape in ((2,), (2, 3), ())]


@pytest.mark.parametrize("space", BOXES, ids=str)
@pytest.mark.parametrize(
    "chosen", [options("squashed_gaussian"), options("squashed_gaussian", False), options("beta")], ids=str
)
def test_heads_by_name_act_within_bounds(space, chosen):
    torch.manual_seed(0)
    head, features = head_for(space, 8, gain=3.0, options=chosen), torch.randn(4, 50, 8)
    noise = head.noise(context(), 200).view(4, 50, head.noise_size)
    dist = head(features)
    action = dist.sample(noise)
    assert action.shape == dist.mode().shape == dist.uniform().sample(noise).shape == (4, 50, *space.shape)
    for row in [*action.flatten(0, 1), *dist.mode().flatten(0, 1), *dist.uniform().sample(noise).flatten(0, 1)]:
        assert space.contains(row.detach().numpy())
    other = head_for(space, 8, gain=3.0, options=chosen)(features)
    assert_close(other.rebuild(other.params).logp(action), other.logp(action))
    assert (other.kl_from(dist.params) > 0).all()
    (dist.logp(action.detach()).mean() + dist.entropy().mean() + dist.kl_from(other.params).mean()).backward()
    assert all(p.grad.isfinite().all() and (p.grad != 0).any() for p in head.linear.parameters())


def test_standard_deviation_by_name():
    state = head_for(BOXES[0], 4, gain=1.0, options=options("squashed_gaussian", False, -1.5))
    assert state(torch.zeros(1, 4)).log_std.tolist() == [[-1.5, -1.5]]
    assert len(state(torch.randn(5, 4)).log_std[:, 0].unique()) == 5
    free = head_for(BOXES[0], 4, options=options("gaussian", True, -1.5))
    assert type(free(torch.zeros(1, 4))) is DiagGaussian
    assert free(torch.zeros(1, 4)).log_std.tolist() == [-1.5, -1.5]


def test_the_first_beta_policy_is_nearly_the_same_in_all_states():
    alpha, beta = head_for(BOXES[0], 64, options=options("beta"))(torch.randn(100, 64)).params.chunk(2, -1)
    for shape in (alpha, beta):
        assert_close(shape, torch.full((100, 2), 1.0 + math.log(2.0)), atol=0.05, rtol=0.0)


WIDE = Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "chosen", "said"),
    [
        (Discrete(3), options("beta"), "algo.distribution: applies to continuous actions, but they are Discrete(3)"),
        (MultiBinary(2), options("squashed_gaussian"), "algo.distribution: applies to continuous actions"),
        (Discrete(3), options(free_log_std=False), "algo.free_log_std: applies to continuous actions"),
        (WIDE, options("beta"), "algo.distribution: beta needs bounded actions"),
        (WIDE, options("squashed_gaussian"), "algo.distribution: squashed_gaussian needs bounded actions"),
        (BOXES[0], options("beta", False), "algo.free_log_std: beta has no standard deviation"),
        (
            Discrete(3),
            options("autoregressive"),
            "algo.distribution: autoregressive conditions several choices on each",
        ),
        (BOXES[0], options("autoregressive"), "actions are Box(-1.0, 1.0, (2,), float32); leave it out"),
        (MultiDiscrete([2, 3]), options("autoregressive", False), "algo.free_log_std: applies to continuous actions"),
    ],
)
def test_options_that_do_not_fit_the_actions_are_refused(space, chosen, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        head_for(space, 4, options=chosen)


def test_a_policy_of_action_values_has_a_gradient_of_its_samples():
    torch.manual_seed(0)
    head = soft_head(Box(-1.0, 1.0, (2, 3), np.float32), 8, "beta")
    action, logp = head(torch.randn(20, 8)).sample_and_logp(head.noise(context(), 20))
    assert (action.shape, logp.shape) == ((20, 6), (20,))
    (action.square().sum() - logp.sum()).backward()
    assert all((p.grad != 0).any() and p.grad.isfinite().all() for p in head.parameters())
    assert isinstance(soft_head(HYBRID.discrete, 8, "squashed_gaussian"), MultiCategoricalHead)
    with pytest.raises(ConfigError, match=r"algo\.distribution: beta applies to continuous actions"):
        soft_head(HYBRID.discrete, 8, "beta")


def test_log_std_of_the_tanh_head_is_bounded():
    head = TanhGaussianHead(1, 1, gain=1.0, log_std_bounds=(-3.0, 1.0))
    log_std = head(torch.tensor([[-100.0], [100.0], [0.0]])).log_std.flatten()
    assert sorted(log_std.tolist()) == [-3.0, 0.0, 1.0]


def test_the_first_policy_is_nearly_uniform():
    torch.manual_seed(0)
    probabilities = head_for(Discrete(3), 64)(torch.randn(100, 64)).params.exp()
    assert_close(probabilities, torch.full((100, 3), 1 / 3), atol=0.02, rtol=0.0)


def test_unsupported_action_space():
    with pytest.raises(ConfigError, match="policies support Discrete"):
        head_for(Text(5), 4)


@pytest.mark.parametrize(("space", "kind", "noise"), SPACES)
def test_what_a_policy_says_is_precise_under_autocast(space, kind, noise):
    """Ratios are differences of log-probabilities, which 8 bits do not hold."""
    head, features = head_for(space, 6, gain=1.0), torch.randn(5, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        said = head(features).params
    assert_close(said, head(features.float()).params, rtol=0, atol=0)


@pytest.mark.parametrize("words", [["algo=ppo"], ["algo=dqn", "algo.dueling=true"], ["algo=dqn", "algo.noisy=true"]])
def test_values_are_precise_under_autocast(words, tmp_path):
    with closing(build(compose([*words, "env=cartpole", "logger.only=[]"]), tmp_path)) as trainer:
        rows = {"obs": torch.randn(5, 4), "is_first": torch.zeros(5, dtype=torch.bool)}
        algo = trainer.algorithm
        with torch.autocast("cpu", torch.bfloat16):
            said = algo.net.values(rows, {}) if words == ["algo=ppo"] else algo.online(rows, {}, True)[0]
    assert said.dtype == torch.float32
