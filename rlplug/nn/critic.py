"""Critics: ensembles of action values ``Q(s, a)`` on top of a torso, for continuous and discrete actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call

from rlplug.nn.cnn import is_image
from rlplug.nn.mlp import Linear, precise
from rlplug.nn.module import Module
from rlplug.nn.spaces import choices_of
from rlplug.spaces import Hybrid
from rlplug.types import Batch, ConfigError


class Critic(Module):
    """Base of the critics: ``ensemble_size`` independent estimates of ``Q(s, a)``, computed in two steps.

    ``encode`` computes the part that does not depend on the action, so that the critic's loss and a policy's loss share
    it; ``forward`` computes the values of actions.

    Args:
        torso: a model (``rlplug.api.Model``) of ``ensemble_size`` members.
        ensemble_size: members of the ensemble.
    """

    head: Linear

    def __init__(self, torso: Any, ensemble_size: int) -> None:
        super().__init__()
        self.torso, self.ensemble_size = torso, ensemble_size

    def encode(self, obs: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Encode observations ``[..., *obs]``; return the code, the input of ``forward``, and the new carry."""
        return self.torso(obs, carry, is_first)

    def forward(self, code: Tensor, action: Tensor) -> Tensor:
        """Return ``Q(s, a) [ensemble_size, ...]`` of ``action [..., A]``."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def several(self, code: Tensor, action: Tensor) -> Tensor:
        """Return ``Q(s, a) [ensemble_size, n, B]`` of ``n`` continuous actions per row, ``action [n, B, A]``."""
        raise NotImplementedError(f"{type(self).__name__}.several")

    def _output(self, features: Tensor) -> Tensor:
        """Apply the output layer; a single member also has the leading axis."""
        out = precise(self.head, features)
        return out if self.ensemble_size > 1 else out.unsqueeze(0)


class InputCritic(Critic):
    """A critic that reads continuous actions with the observation at its input, as in Haarnoja et al. 2018.

    The code is the observation itself.

    Args:
        torso: reads ``{"obs": ..., "action": ...}``; not recurrent.
    """

    def __init__(self, torso: Any, ensemble_size: int = 1) -> None:
        super().__init__(torso, ensemble_size)
        self.head = Linear(torso.out_dim, 1, ensemble_size=ensemble_size)

    def encode(self, obs: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        return obs, carry

    def forward(self, code: Tensor, action: Tensor) -> Tensor:
        features, _ = self.torso({"obs": code, "action": action}, {}, None)
        return self._output(features).squeeze(-1)

    def several(self, code: Tensor, action: Tensor) -> Tensor:
        code = code.expand(len(action), *code.shape).flatten(0, 1)
        return self(code, action.flatten(0, 1)).unflatten(-1, action.shape[:2])


class FeatureCritic(Critic):
    """A critic that adds a hidden layer, of the features' size, for continuous actions and the observation's features.

    So an expensive torso, of images or histories, runs once for any number of actions. The code is its features.

    Args:
        size: length of an action.
    """

    def __init__(self, torso: Any, size: int, ensemble_size: int = 1) -> None:
        super().__init__(torso, ensemble_size)
        self.join = Linear(torso.out_dim + size, torso.out_dim, ensemble_size=ensemble_size)
        self.head = Linear(torso.out_dim, 1, ensemble_size=ensemble_size)

    def forward(self, code: Tensor, action: Tensor) -> Tensor:
        action = action.expand(*code.shape[:-1], action.shape[-1])
        return self._output(torch.relu(self.join(torch.cat((code, action), -1)))).squeeze(-1)

    def several(self, code: Tensor, action: Tensor) -> Tensor:
        return self(code.unsqueeze(-3).expand(*code.shape[:-2], len(action), *code.shape[-2:]), action)


class DiscreteCritic(Critic):
    """A critic with one output per discrete action. With several factors, ``Q`` is the sum of one output per factor.

    Args:
        choices: the number of choices of every factor; smaller factors are padded.
    """

    def __init__(self, torso: Any, choices: Sequence[int], ensemble_size: int = 1) -> None:
        super().__init__(torso, ensemble_size)
        self.shape = len(choices), max(choices)
        self.head = Linear(torso.out_dim, math.prod(self.shape), ensemble_size=ensemble_size)

    def forward(self, code: Tensor, action: Tensor | None = None) -> Tensor:
        """Return ``Q(s, a) [ensemble_size, ...]`` of ``action [..., factors]``.

        Without an action, return the outputs of all choices: ``[ensemble_size, ..., factors, n]``.
        """
        q = self._output(code).unflatten(-1, self.shape)
        if action is None:
            return q
        index = action.long().expand(len(q), *action.shape).unsqueeze(-1)
        return q.gather(-1, index).squeeze(-1).sum(-1)


def critic_for(
    build: Callable[[spaces.Space[Any], int], Any],
    obs: spaces.Space[Any],
    action: spaces.Space[Any],
    *,
    ensemble_size: int = 1,
    recurrent: bool = False,
) -> InputCritic | FeatureCritic | DiscreteCritic:
    """Build the critic that fits the spaces.

    Continuous actions are concatenated to a vector observation at the input, and otherwise (images, dicts, recurrent
    torsos) to the features.

    Args:
        build: returns the torso for an input space and ``ensemble_size``.
        obs: space of the observations.
        action: Box, Discrete, MultiDiscrete or MultiBinary; a Box is flattened, in [-1, 1].
        ensemble_size: members of the ensemble.
        recurrent: the torso may have a recurrent state.

    Raises:
        ConfigError: the action space is hybrid.
    """
    if isinstance(action, Hybrid):
        said = f"learns values of either continuous or discrete actions, but the environment's actions are {action}"
        raise ConfigError("algo", f"{said}; use algo=ppo, or with a recording algo=marwil")
    choices = choices_of(action)
    if choices is not None:
        return DiscreteCritic(build(obs, ensemble_size), choices, ensemble_size)
    size = math.prod(action.shape or ())
    if recurrent or isinstance(obs, spaces.Dict | spaces.Tuple) or is_image(obs):
        return FeatureCritic(build(obs, ensemble_size), size, ensemble_size)
    inputs = spaces.Dict({"obs": obs, "action": spaces.Box(-1.0, 1.0, (size,))})
    return InputCritic(build(inputs, ensemble_size), ensemble_size)


def frozen(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls ``module`` with its parameters held constant.

    Gradients flow only to the inputs, as in a policy's loss through a critic.
    """
    constants = {name: p.detach() for name, p in module.named_parameters()}

    def call(*inputs: Any) -> Any:
        return functional_call(module, constants, inputs)

    return call


@contextmanager
def constant(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let no gradient reach the parameters of modules inside the block; it flows through them to their inputs."""
    params = [p for module in modules for p in module.parameters() if p.requires_grad]
    for p in params:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in params:
            p.requires_grad_(True)
