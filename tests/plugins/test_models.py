"""Convolutional, recurrent and multi-input models, as a run builds them."""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch.testing import assert_close

from rlplug import nn
from rlplug.config import choose, default_node
from rlplug.context import RunContext
from rlplug.plugins.model.cnn import NatureCNN
from rlplug.testing.configs import config
from rlplug.testing.context import context
from rlplug.types import ConfigError, EnvSpec

ATARI = Box(0, 255, (4, 84, 84), np.uint8)
MINIGRID = Box(0, 255, (7, 7, 3), np.uint8)
VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
PARTS = Dict({"image": MINIGRID, "inner": Dict({"way": Discrete(4), "map": ATARI}), "speed": VECTOR})


@cache
def node_of(option):
    return default_node("model", option)


def build(option: str, space: Any, copies: int = 1, **changes: Any) -> Any:
    node = {**copy.deepcopy(node_of(option)), **changes}
    torch.manual_seed(0)
    return RunContext(spec=EnvSpec({})).build(choose("model", "model", node), space, copies)


def sample(space: Any, *lead: int) -> Any:
    if isinstance(space, Dict):
        return {key: sample(part, *lead) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return {str(i): sample(part, *lead) for i, part in enumerate(space.spaces)}
    space.seed(0)
    picks = np.stack([space.sample() for _ in range(int(np.prod(lead)))])
    return torch.from_numpy(picks).unflatten(0, lead)


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "first"),
    [(84, (32, 8, 4)), (36, (32, 8, 4)), (35, (32, 4, 2)), (16, (32, 4, 2)), (15, (16, 2, 1)), (4, (16, 2, 1))],
)
def test_cnn_takes_filters_that_fit(side, first):
    conv = build("cnn", Box(0, 255, (3, side, side), np.uint8)).net.convs[0]
    assert (conv.out_channels, conv.kernel_size[0], conv.stride[0]) == first


def test_cnn_serves_every_image():
    cfg, ctx = config("model/cnn", hidden=[1], init="default"), context()
    for side in range(4, 100):
        space = Box(0, 255, (side, side + 1, 3), np.uint8)
        assert nn.is_image(space)
        assert NatureCNN(cfg, ctx.derive(space=space)).out_dim == 1


@pytest.mark.parametrize(
    ("option", "space", "changes", "message"),
    [
        (
            "nature_cnn",
            MINIGRID,
            {},
            r"model.filters: \[\[32, 8, 4\], .* do not fit images of 7x7: .*; model=cnn chooses",
        ),
        ("cnn", MINIGRID, {"filters": [[8, 3, 1], [8, 6, 1]]}, r"5x5 pixels are left for a kernel of 6x6; model=cnn"),
        ("cnn", Box(0, 255, (3, 3, 3), np.uint8), {}, r"images of 3x3: .*; use model=mlp"),
        ("nature_cnn", VECTOR, {}, "model: .*model=mlp"),
        ("cnn", PARTS, {}, "model: .*model=multi_input"),
        ("impala_cnn", Discrete(3), {}, "model: .*model=mlp"),
        ("lstm", spaces.Text(3), {}, "no flat form"),
        ("multi_input", Dict({"text": spaces.Text(3)}), {}, "no flat form"),
    ],
)
def test_refusals_name_a_way_out(option, space, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(option, space, **changes)


def test_bytes_are_divided_by_what_is_said():
    x = sample(MINIGRID, 2)
    tens, ordinary = build("cnn", MINIGRID, pixel_max=10), build("cnn", MINIGRID)
    assert_close(tens(x, {}, None)[0], ordinary(x.float() / 10.0, {}, None)[0])


def test_copies_are_members_of_their_own():
    model = build("cnn", MINIGRID, copies=2)
    features, _ = model(sample(MINIGRID, 4, 3), {}, None)
    assert isinstance(model, nn.Ensemble)
    assert features.shape == (2, 4, 3, 256)
    assert features[0].ne(features[1]).any()


# ---- recurrent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["lstm", "gru", "attention"])
@pytest.mark.parametrize("torso", ["mlp", "cnn", "multi_input", "gru"])
def test_recurrence_over_any_torso(option, torso):
    """The torso's features go through the layer; a recurrent torso has its carry inside."""
    space = MINIGRID if torso == "cnn" else PARTS if torso == "multi_input" else VECTOR
    model = build(option, space, torso=node_of(torso), **{"dim" if option == "attention" else "hidden": 8})
    x, is_first = sample(space, 5, 3), torch.zeros(5, 3, dtype=torch.bool)
    is_first[2, 1] = True
    carry = model.initial_carry(3)
    assert set(carry) == {*model.core.states, *(["torso"] if torso == "gru" else [])}
    features, last = model(x, carry, is_first)
    inner, _ = model.torso(x, carry.get("torso", {}), is_first)
    expected, state = model.core(inner, {}, is_first)
    assert_close(features, expected)
    assert_close({key: last[key] for key in state}, state)
    assert features.shape == (5, 3, model.out_dim) == (5, 3, 8)


def test_layer_norm_leaves_the_state_alone():
    plain, normed = build("lstm", VECTOR), build("lstm", VECTOR, layer_norm=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    x = sample(VECTOR, 5, 3)
    (y, last), (z, last_normed) = plain(x, {}, None), normed(x, {}, None)
    assert_close(last, last_normed)
    assert_close(z, torch.nn.functional.layer_norm(y, (64,)))


def test_copies_have_carries_of_their_own():
    model = build("lstm", VECTOR, copies=2)
    carry = model.initial_carry(3)
    assert {key: set(inner) for key, inner in carry.items()} == {"0": {"h", "c"}, "1": {"h", "c"}}
    x, none = sample(VECTOR, 5, 3), torch.zeros(5, 3, dtype=torch.bool)
    features, last = model(x, carry, none)
    assert features.shape == (2, 5, 3, 64)
    assert_close(features, model(x, {}, None)[0])
    assert_close(features[:, -1], torch.stack([last["0"]["h"], last["1"]["h"]]))


# ---- several inputs --------------------------------------------------------------------------------------------------


def test_each_part_goes_through_its_model():
    model = build("multi_input", PARTS)
    x = sample(PARTS, 2, 3)
    assert model.images == [("image",), ("inner", "map")]
    small, large = model.image_models
    vector = torch.cat([torch.nn.functional.one_hot(x["inner"]["way"], 4).float(), x["speed"]], -1)
    parts = [small(x["image"], {}, None)[0], large(x["inner"]["map"], {}, None)[0], model.vector.net(vector)]
    features, carry = model(x, {}, None)
    assert_close(features, torch.cat(parts, -1))
    assert features.shape == (2, 3, model.out_dim) == (2, 3, 256 + 256 + 64)
    assert carry == {}


def test_joint_layers():
    model = build("multi_input", PARTS, hidden=[32, 16], layer_norm=True)
    assert model.joint.in_features == 576
    assert model(sample(PARTS, 3), {}, None)[0].shape == (3, 16)


def test_recurrence_inside_multi_input_is_refused():
    with pytest.raises(
        ConfigError, match=r"LSTM inside it has: use it as the torso, model=lstm model@model.torso=multi_input"
    ):
        build("multi_input", PARTS, vector=node_of("lstm"))


# ---- the command line ------------------------------------------------------------------------------------------------


def test_nested_models_on_the_command_line():
    words = [
        "model=lstm",
        "model@model.torso=multi_input",
        "model@model.torso.image=impala_cnn",
        "model.torso.image.hidden=[8]",
    ]
    model = context(overrides=words).build("model", PARTS)
    assert [type(m).__name__ for m in (model, model.torso, model.torso.image_models[0], model.torso.vector)] == [
        *["LSTM", "MultiInput", "ImpalaCNN", "MLP"]
    ]
    assert model.torso.image_models[0].out_dim == 8


def test_a_critic_has_nested_models_of_its_own():
    ctx = context(overrides=["model=lstm", "model@critic_model=gru", "critic_model.torso.hidden=[8]"])
    policy, critic = ctx.build("model", VECTOR), ctx.build("critic_model", VECTOR)
    assert (policy.torso.out_dim, critic.torso.out_dim) == (64, 8)
    assert type(critic).__name__ == "GRU"


def test_a_mistake_in_a_nested_model_is_shown_by_its_full_key():
    with pytest.raises(ConfigError, match=r"model\.torso\.hiddn"):
        context(overrides=["model=lstm", "+model.torso.hiddn=[8]"])
