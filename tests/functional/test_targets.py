import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rlplug.functional import polyak_


def test_polyak_by_hand():
    target, source = [torch.tensor([1.0]), torch.ones(2, 2)], [torch.tensor([3.0]), torch.full((2, 2), 3.0)]
    where = target[0].data_ptr()
    polyak_(target, source, 0.1)
    assert_close(target, [torch.tensor([1.2]), torch.full((2, 2), 1.2)])
    assert_close(source[0], torch.tensor([3.0]))
    assert target[0].data_ptr() == where


def test_polyak_moves_the_parameters_of_modules_and_leaves_no_graph():
    torch.manual_seed(0)
    target, source = nn.Linear(2, 3), nn.Linear(2, 3)
    pairs = zip(target.named_parameters(), source.parameters(), strict=True)
    expected = {name: p + 0.25 * (q - p) for (name, p), q in pairs}
    polyak_(target, source, 0.25)
    assert_close(dict(target.named_parameters()), expected)
    assert all(p.is_leaf and p.requires_grad for p in target.parameters())
    polyak_(target, source, 1.0)
    assert_close(dict(target.named_parameters()), dict(source.named_parameters()), rtol=0, atol=0)


def test_polyak_of_networks_that_differ():
    with pytest.raises(RuntimeError):
        polyak_(nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), 0.5)
