import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rlplug.functional.distributional import kl_divergence, project

SUPPORT = torch.tensor([-1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [(0.5, 0.5, [0.0, 0.35, 0.65]), (0.5, 0.0, [0.0, 0.5, 0.5]), (5.0, 0.5, [0.0, 0.0, 1.0])],
    ids=["within", "terminal", "beyond"],
)
def test_projection_by_hand(reward, discount, expected):
    prob = torch.tensor([0.2, 0.3, 0.5])
    assert_close(project(prob, reward + discount * SUPPORT, SUPPORT), torch.tensor(expected))


def test_an_atom_on_a_point_gives_it_all_of_its_mass_exactly():
    """Where floor and ceil of a whole number are the same, the textbook's two shares are both zero."""
    support = torch.linspace(-10.0, 10.0, 51)
    prob = torch.rand(4, 51, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert_close(project(prob, support.expand(4, -1), support), prob, rtol=0, atol=1e-6)
    ends = torch.tensor([[-10.0] * 51, [10.0] * 51])
    moved = project(prob[:2], ends, support)
    assert_close(moved[[0, 1], [0, 50]], torch.ones(2))
    assert moved.count_nonzero() == 2


@pytest.mark.parametrize(
    ("low", "high", "n"), [(0.0, 210.0, 51), (-5.0, 100.0, 51), (0.0, 500.0, 31), (-500.0, 0.0, 61)]
)
def test_no_mass_is_negative_where_the_last_place_is_rounded_up(low, high, n):
    support = torch.linspace(low, high, n)
    mass = project(torch.full((1, n), 1.0 / n), torch.full((1, n), 2.0 * high + 1.0), support)
    assert mass.min() == 0
    assert_close(mass[0, -1], torch.tensor(1.0))


def by_definition(prob, atoms, support):
    """Equation 7, point by point, in double precision."""
    step = float(support[1] - support[0])
    mass = torch.zeros(len(support), dtype=torch.float64)
    for p, z in zip(prob.double(), atoms.clamp(support[0], support[-1]).double(), strict=True):
        mass += p * (1 - (z - support.double()).abs() / step).clamp(0, 1)
    return mass


@settings(deadline=None)
@given(
    n=st.integers(2, 12),
    k=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    reward=st.integers(-3, 3) | st.floats(-3.0, 3.0),
    discount=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_projection_is_its_definition_and_loses_no_mass(n, k, seed, reward, discount):
    generator = torch.Generator().manual_seed(seed)
    support = torch.linspace(-2.0, 3.0, n)
    prob = torch.randn(2, k, generator=generator).softmax(-1)
    atoms = reward + discount * torch.randn(2, k, generator=generator)
    mass = project(prob, atoms, support)
    assert_close(mass.sum(-1), torch.ones(2))
    for i in range(2):
        assert_close(mass[i].double(), by_definition(prob[i], atoms[i], support), rtol=1e-4, atol=1e-5)


def test_projection_keeps_leading_axes():
    prob = torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    atoms = torch.linspace(-1.0, 2.0, 5).expand(3, 2, 5)
    flat = project(prob.flatten(0, 1), atoms.flatten(0, 1), SUPPORT)
    assert_close(project(prob, atoms, SUPPORT), flat.unflatten(0, (3, 2)))


def test_kl_divergence_by_hand():
    target, logits = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25]).log()
    assert_close(kl_divergence(target, logits), torch.tensor(0.34657359))  # 0.5 log 2
    assert_close(kl_divergence(logits.softmax(-1), logits), torch.tensor(0.0))


def test_kl_divergence_has_the_gradient_of_cross_entropy():
    target = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_divergence(target, logits).sum(), logits)
    assert_close(gradient, logits.softmax(-1) - target)
