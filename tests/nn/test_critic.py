"""Critics by hand: where the action joins, what the members are, and which critic serves which spaces."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.testing import assert_close

from rlplug.nn import MLP, DiscreteCritic, FeatureCritic, InputCritic, choices_of, critic_for, flat_size, frozen

IMAGE = spaces.Box(0, 255, (3, 12, 12), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (3,))
BOX = spaces.Box(-2.0, 2.0, (2,))


class Torso(nn.Module):
    """An MLP with the interface of a model; it reads dicts of vectors too, as one vector."""

    def __init__(self, space: spaces.Space, ensemble_size: int) -> None:
        super().__init__()
        self.space, self.ensemble_size, self.out_dim = space, ensemble_size, 4
        self.mlp = MLP(flat_size(space), [4], "tanh", ensemble_size=ensemble_size)

    def forward(self, x, carry, is_first):
        x = torch.cat([x[key] for key in self.space.spaces], -1) if isinstance(x, dict) else x
        return self.mlp(x), carry


def critic_of(action, ensemble_size=1, **more):
    torch.manual_seed(0)
    return critic_for(Torso, VECTOR, action, ensemble_size=ensemble_size, **more)


def code_of(critic, obs):
    return critic.encode(obs, {}, None)[0]


@pytest.mark.parametrize(
    ("obs", "action", "recurrent", "kind"),
    [
        (VECTOR, BOX, False, InputCritic),
        (spaces.Discrete(4), BOX, False, InputCritic),
        (VECTOR, BOX, True, FeatureCritic),
        (IMAGE, BOX, False, FeatureCritic),
        (spaces.Dict({"a": VECTOR}), BOX, False, FeatureCritic),
        (spaces.Tuple([VECTOR]), BOX, False, FeatureCritic),
        (VECTOR, spaces.Discrete(4), False, DiscreteCritic),
        (VECTOR, spaces.MultiDiscrete([3, 2]), True, DiscreteCritic),
        (IMAGE, spaces.MultiBinary(3), False, DiscreteCritic),
    ],
    ids=str,
)
def test_the_critic_of_the_spaces(obs, action, recurrent, kind):
    critic = critic_for(Torso, obs, action, ensemble_size=2, recurrent=recurrent)
    assert isinstance(critic, kind)
    assert critic.ensemble_size == critic.torso.ensemble_size == 2
    if kind is InputCritic:
        assert critic.torso.space["obs"] == obs
        assert critic.torso.space["action"] == spaces.Box(-1.0, 1.0, (2,))
    else:
        assert critic.torso.space == obs


def test_actions_that_join_at_the_input():
    critic, obs, action = critic_of(BOX), torch.randn(5, 3), torch.randn(5, 2)
    assert code_of(critic, obs) is obs
    inputs = {"obs": obs, "action": action}
    both = torch.cat([inputs[key] for key in critic.torso.space.spaces], -1)
    assert_close(critic(obs, action), critic.head(critic.torso.mlp(both)).view(1, 5))


def test_actions_that_join_the_features():
    critic, obs, action = critic_of(BOX, recurrent=True), torch.randn(5, 3), torch.randn(5, 2)
    features = critic.torso.mlp(obs)
    assert_close(code_of(critic, obs), features)
    expected = critic.head(critic.join(torch.cat((features, action), -1)).relu())
    assert_close(critic(features, action), expected.view(1, 5))


@pytest.mark.parametrize("action", [spaces.Discrete(4), spaces.MultiDiscrete([3, 2])], ids=str)
def test_discrete_actions_are_outputs_of_which_a_factor_gives_one(action):
    critic, obs, choices = critic_of(action, ensemble_size=2), torch.randn(5, 3), choices_of(action)
    code = code_of(critic, obs)
    every = critic(code)
    assert every.shape == (2, 5, len(choices), max(choices))
    for joint in product(*map(range, choices)):
        expected = sum(every[:, :, factor, choice] for factor, choice in enumerate(joint))
        assert_close(critic(code, torch.tensor(joint).expand(5, -1)), expected)


@pytest.mark.parametrize("kind", ["input", "features", "discrete"])
@pytest.mark.parametrize("lead", [(5,), (4, 5)])
def test_members_are_independent_and_any_rows_are_served(kind, lead):
    action = spaces.MultiDiscrete([3, 2]) if kind == "discrete" else BOX
    critic = critic_of(action, ensemble_size=2, recurrent=kind == "features")
    obs = torch.randn(*lead, 3)
    taken = torch.randint(2, (*lead, 2)) if kind == "discrete" else torch.randn(*lead, 2)
    q = critic(code_of(critic, obs), taken)
    assert q.shape == (2, *lead)
    assert_close(q.flatten(1), critic(code_of(critic, obs.view(-1, 3)), taken.view(-1, 2)))
    grads = torch.autograd.grad(q[0].sum(), critic.parameters())
    assert all(grad[0].any() and not grad[1].any() for grad in grads)


def test_a_frozen_module_passes_gradients_to_its_inputs_alone():
    critic, obs = critic_of(BOX, ensemble_size=2), torch.randn(5, 3)
    action = torch.randn(5, 2, requires_grad=True)
    q = frozen(critic)(obs, action)
    assert torch.equal(q, critic(obs, action))
    q.sum().backward()
    assert action.grad.any(-1).all()
    assert all(p.grad is None and p.requires_grad for p in critic.parameters())
