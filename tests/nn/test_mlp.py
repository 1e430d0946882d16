from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rlplug.nn import MLP, LayerNorm, Linear


def members(ensemble):
    """The single networks that an ensemble consists of."""
    singles = []
    for i in range(ensemble.ensemble_size):
        sizes = [layer.weight.shape[2] for layer in ensemble.layers]
        single = MLP(ensemble.in_features, sizes, ensemble.activation, layer_norm=ensemble.norms is not None)
        with torch.no_grad():
            for name, p in single.named_parameters():
                mine = ensemble.get_parameter(name)[i]
                p.copy_(mine.T if name.startswith("layers") and name.endswith("weight") else mine.squeeze(0))
        singles.append(single)
    return singles


@pytest.mark.parametrize("lead", [(7,), (2, 7), (2, 2), (3, 2, 4)])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_copies_equal_separate_networks(lead, layer_norm):
    torch.manual_seed(0)
    ensemble = MLP(3, [8, 5], "tanh", layer_norm=layer_norm, ensemble_size=2)
    for p in ensemble.parameters():
        nn.init.normal_(p)
    x = torch.randn(*lead, 3)
    singles = members(ensemble)
    features = ensemble(x)
    assert features.shape == (2, *lead, ensemble.out_dim)
    assert_close(features, torch.stack([single(x) for single in singles]))
    features.square().sum().backward()
    sum(single(x).square().sum() for single in singles).backward()
    for i, single in enumerate(singles):
        assert_close(ensemble.layers[0].weight.grad[i].T, single.layers[0].weight.grad, rtol=1e-4, atol=1e-4)


def test_head_of_copies_reads_the_features_of_its_member():
    torch.manual_seed(0)
    head = Linear(4, 3, ensemble_size=2)
    for lead in [(5,), (2,), (6, 5)]:
        features = torch.randn(2, *lead, 4)
        expected = torch.stack([features[i] @ head.weight[i] + head.bias[i] for i in range(2)])
        assert_close(head(features), expected)


def test_input_without_members_goes_to_all():
    torch.manual_seed(0)
    head, x = Linear(4, 3, ensemble_size=2), torch.randn(2, 4)
    assert_close(head(x), head(torch.stack([x, x])))


def test_default_initialisation_is_that_of_torch():
    torch.manual_seed(0)
    mine = Linear(5, 7)
    torch.manual_seed(0)
    theirs = nn.Linear(5, 7)
    assert_close(dict(mine.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=0)
    ensemble_size = Linear(100, 50, ensemble_size=3)
    for p in ensemble_size.parameters():
        assert 0.09 < p.abs().max() <= 0.1
        assert p[0].ne(p[1]).all()


@pytest.mark.parametrize("ensemble_size", [1, 3])
def test_orthogonal_initialisation(ensemble_size):
    mlp = MLP(16, [8, 8], "tanh", init="orthogonal", ensemble_size=ensemble_size)
    for layer in mlp.layers:
        weights = [layer.weight] if ensemble_size == 1 else [w.T for w in layer.weight]
        for weight in weights:
            assert_close(weight @ weight.T, 2.0 * torch.eye(8), atol=1e-5, rtol=1e-5)
        assert all((a != b).any() for a, b in pairwise(weights))
        assert (layer.bias == 0).all()


@pytest.mark.parametrize(
    ("activation", "module"),
    [("tanh", nn.Tanh()), ("relu", nn.ReLU()), ("elu", nn.ELU()), ("gelu", nn.GELU()), ("silu", nn.SiLU())],
)
def test_one_network_is_what_torch_computes(activation, module):
    torch.manual_seed(0)
    mlp = MLP(3, [8, 5], activation, layer_norm=True)
    stages = []
    for layer, size in zip(mlp.layers, (8, 5), strict=True):
        linear = nn.Linear(*reversed(layer.weight.shape))
        linear.load_state_dict(layer.state_dict())
        stages += [linear, nn.LayerNorm(size), module]
    x = torch.randn(4, 6, 3)
    assert_close(mlp(x), nn.Sequential(*stages)(x))


def test_without_hidden_layers_it_is_the_identity():
    x = torch.randn(4, 3)
    assert MLP(3, []).out_dim == 3
    assert MLP(3, [])(x) is x
    assert_close(MLP(3, [], ensemble_size=2)(x), torch.stack([x, x]))


def test_layer_norm_scales_every_member_by_itself():
    norm = LayerNorm(4, ensemble_size=2)
    with torch.no_grad():
        norm.weight[1] = 3.0
        norm.bias[1] = 1.0
    x = torch.randn(2, 5, 4)
    plain = nn.functional.layer_norm(x, (4,))
    assert_close(norm(x), torch.stack([plain[0], 3.0 * plain[1] + 1.0]))
