"""The mlp component, built as a run builds it."""

import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.testing import assert_close

from rlplug.nn import Ensemble
from rlplug.plugins.model.mlp import MLP
from rlplug.testing.configs import config
from rlplug.testing.context import box, context
from rlplug.types import ConfigError

OBS_AND_ACTION = spaces.Dict({"obs": box(3), "action": box(2)})


def build(option="mlp", space=OBS_AND_ACTION, ensemble_size=1, **changes):
    return MLP(config(f"model/{option}", **changes), context().derive(space=space, ensemble_size=ensemble_size))


@pytest.mark.parametrize(("option", "sizes"), [("mlp", [64, 64]), ("mlp256", [256, 256])])
def test_sizes_come_from_yaml_and_space(option, sizes):
    model = build(option)
    assert [tuple(layer.weight.shape) for layer in model.net.layers] == [(sizes[0], 5), (sizes[1], sizes[0])]
    assert model.out_dim == sizes[-1]
    assert model.net.activation == {"mlp": "tanh", "mlp256": "relu"}[option]


def test_outside_of_any_component_it_is_refused():
    with pytest.raises(ConfigError, match="space"):
        MLP(config("model/mlp"), context())


@pytest.mark.parametrize("wrong", [{"hidden": [0]}, {"activation": "sine"}, {"init": "zeros"}, {"width": 3}])
def test_wrong_options(wrong):
    with pytest.raises(ConfigError, match=f"model.{next(iter(wrong))}"):
        config("model/mlp", **wrong)


class Recurrent(nn.Module):
    """A model with a carry, which computes no ensemble_size itself."""

    def __init__(self):
        super().__init__()
        self.out_dim, self.cell = 4, nn.GRUCell(3, 4)

    def initial_carry(self, n):
        return {"h": torch.zeros(n, 4)}

    def forward(self, x, carry, is_first):
        h = self.cell(x, carry["h"] * ~is_first[:, None])
        return h, {"h": h}


def test_an_ensemble_of_models_equals_its_members():
    torch.manual_seed(0)
    singles = [Recurrent() for _ in range(3)]
    ensemble = Ensemble(singles)
    carry, alone = ensemble.initial_carry(5), [single.initial_carry(5) for single in singles]
    assert ensemble.out_dim == 4
    for step in range(3):
        x, is_first = torch.randn(5, 3), torch.tensor([step == 1] * 2 + [False] * 3)
        features, carry = ensemble(x, carry, is_first)
        out = [single(x, state, is_first) for single, state in zip(singles, alone, strict=True)]
        alone = [state for _, state in out]
        assert_close(features, torch.stack([member for member, _ in out]))
    assert [tuple(state["h"].shape) for state in carry.values()] == [(5, 4)] * 3
    assert len(list(ensemble.parameters())) == 3 * len(list(singles[0].parameters()))


@pytest.mark.parametrize("lead", [(7,), (4, 7)])
def test_members_learn_tables_of_many_choices_of_their_own(lead):
    space = spaces.Dict({"id": spaces.Discrete(10_001), "action": box(2)})
    model = build(space=space, ensemble_size=2, hidden=[8])
    x = {"id": torch.randint(10_001, lead), "action": torch.randn(*lead, 2)}
    features, _ = model(x, {}, None)
    assert features.shape == (2, *lead, 8)
    features[1].sum().backward()
    first, second = (table.weight.grad for table in model.tables)
    assert not first.any()
    assert sorted({*x["id"].flatten().tolist()}) == second.any(-1).nonzero().flatten().tolist()
    alone = build(space=space, hidden=[8])
    alone.flatten.tables[0].load_state_dict(model.tables[1].state_dict())
    for mine, layer in zip(alone.net.layers, model.net.layers, strict=True):
        mine.load_state_dict({"weight": layer.weight[1].T, "bias": layer.bias[1, 0]})
    assert_close(alone(x, {}, None)[0], features[1])


def test_a_million_choices_take_half_of_the_weights_and_a_copy_is_one():
    model = build(space=spaces.Discrete(1_000_000))
    assert sum(p.numel() for p in model.parameters()) < 0.51 * 64_000_000
    small = build(space=spaces.Discrete(10_001), hidden=[4])
    twin, ids = deepcopy(small), torch.tensor([3])
    before = twin(ids, {}, None)[0]
    with torch.no_grad():
        small.tables[0].weight.add_(1)
    assert torch.equal(twin(ids, {}, None)[0], before)
    assert not torch.equal(small(ids, {}, None)[0], before)


@pytest.mark.parametrize(
    ("shape", "warns"), [((4, 84, 84), True), ((64, 64, 3), True), ((7, 7, 3), False), ((84,), False)]
)
def test_large_images_should_not_be_flattened(shape, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(space=spaces.Box(0, 255, shape, np.uint8))
    said = [str(one.message) for one in caught]
    assert bool(said) == warns
    assert all("model: mlp flattens images" in one and "model=cnn" in one for one in said)
