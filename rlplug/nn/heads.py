"""Policy heads: map features to a distribution over the actions of a space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from rlplug.nn.autoregressive import Autoregressive, Weights
from rlplug.nn.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    Product,
    TanhGaussian,
    masked,
)
from rlplug.nn.mlp import Linear, precise
from rlplug.nn.module import Module
from rlplug.nn.spaces import choices_of
from rlplug.spaces import Hybrid
from rlplug.types import ConfigError


class Draws(Protocol):
    """The part of ``rlplug.api.Context`` that generates noise ``[*shape]`` for a head."""

    def randn(self, *shape: int) -> Tensor: ...

    def rand(self, *shape: int) -> Tensor: ...


class Options(Protocol):
    """The part of ``rlplug.settings.PolicyOptions`` that a head reads; see ``head_for``."""

    @property
    def distribution(self) -> Literal["gaussian", "squashed_gaussian", "beta", "autoregressive"]: ...

    @property
    def free_log_std(self) -> bool: ...

    @property
    def initial_log_std(self) -> float: ...


class Head(Module):
    """Base of the heads; ``head(features, mask)`` is a ``Distribution``."""

    noise_kind: ClassVar[Literal["uniform", "normal"]]
    noise_size: int

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        """Return the distribution of ``features [..., F]``; ``mask`` is ``action_mask`` of ``rlplug.types.KEYS``."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def noise(self, ctx: Draws, n: int) -> Tensor:
        """Generate the noise of ``sample`` for ``n`` rows: ``[n, noise_size]``."""
        return (ctx.rand if self.noise_kind == "uniform" else ctx.randn)(n, self.noise_size)


class CategoricalHead(Head):
    """One of ``n`` actions. ``gain``: see ``Linear``."""

    noise_kind = "uniform"
    noise_size = 1

    def __init__(self, features: int, n: int, gain: float | None = 0.01) -> None:
        super().__init__()
        self.linear = Linear(features, n, gain=gain)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Categorical:
        """Return the distribution; ``mask [..., n]`` marks the allowed actions."""
        return Categorical(precise(self.linear, features), mask)


class _Choices(Head):
    """Base of the heads of choices among ``sizes``, laid out in ``event`` (flat if None)."""

    noise_kind = "uniform"

    def __init__(
        self, features: int, sizes: Sequence[int], event: tuple[int, ...] | None = None, gain: float | None = 0.01
    ) -> None:
        super().__init__()
        self.noise_size, self.n = len(sizes), max(sizes)
        self.event = (len(sizes),) if event is None else event
        first = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
        column = torch.arange(self.n)
        exists = column < torch.tensor(sizes)[:, None]
        self.exists: Tensor
        self.position: Tensor
        self.register_buffer("exists", exists, persistent=False)
        self.register_buffer("position", torch.where(exists, first[:, None] + column, 0), persistent=False)
        self.padded = not bool(exists.all())
        self.linear = Linear(features, exists.numel(), gain=gain)

    def allowed(self, mask: Tensor | None) -> Tensor | None:
        """Return the choices ``[..., A, n]`` that exist and that ``mask [..., sum(sizes)]`` allows; None: all."""
        if mask is not None:
            return mask[..., self.position] & self.exists
        return self.exists if self.padded else None


class MultiCategoricalHead(_Choices):
    """Independent choices."""

    def forward(self, features: Tensor, mask: Tensor | None = None) -> MultiCategorical:
        """Return the distribution; ``mask [..., sum(sizes)]`` marks the allowed choices, factor by factor."""
        logits = precise(self.linear, features).unflatten(-1, self.exists.shape)
        return MultiCategorical(logits, self.allowed(mask), self.event)


class AutoregressiveHead(_Choices):
    """Choices in order, each of which depends on those before; as many hidden units as ``features``.

    At first they are nearly independent.
    """

    def __init__(
        self, features: int, sizes: Sequence[int], event: tuple[int, ...] | None = None, gain: float | None = 0.01
    ) -> None:
        super().__init__(features, sizes, event, gain)
        self.hidden = Linear(features, features, gain=1.0)
        self.enter, self.leave = (nn.Parameter(torch.empty(len(sizes), self.n, features)) for _ in range(2))
        for weights, size in ((self.enter, 1.0), (self.leave, 1.0 if gain is None else gain)):
            for own in weights:
                nn.init.orthogonal_(own, size)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Autoregressive:
        """Return the distribution; ``mask [..., sum(sizes)]`` marks the allowed choices, whatever those before are."""
        base = masked(precise(self.linear, features).unflatten(-1, self.exists.shape), self.allowed(mask))
        return Autoregressive(base, precise(self.hidden, features), Weights(self.enter, self.leave), self.event)


class BernoulliHead(Head):
    """Independent bits, laid out in ``event``."""

    noise_kind = "uniform"

    def __init__(self, features: int, event: tuple[int, ...], gain: float | None = 0.01) -> None:
        super().__init__()
        self.event, self.noise_size = event, math.prod(event)
        self.linear = Linear(features, self.noise_size, gain=gain)

    def forward(self, features: Tensor, mask: None = None) -> Bernoulli:
        _refuse(mask, "MultiBinary")
        return Bernoulli(precise(self.linear, features), self.event)


class DiagGaussianHead(Head):
    """Normal actions, laid out in ``event``, with a learned standard deviation, by default the same in all states.

    Args:
        initial_log_std: initial log standard deviation.
        state_dependent_std: make the standard deviation an output of the network.
        squashed: squash the actions to [-1, 1] by ``tanh``.
    """

    noise_kind = "normal"

    def __init__(
        self,
        features: int,
        event: tuple[int, ...],
        gain: float | None = 0.01,
        initial_log_std: float = 0.0,
        state_dependent_std: bool = False,
        squashed: bool = False,
    ) -> None:
        super().__init__()
        size = math.prod(event)
        self.dist: type[DiagGaussian] = TanhGaussian if squashed else DiagGaussian
        self.event, self.noise_size, self.state_dependent_std = event, size, state_dependent_std
        self.linear = Linear(features, 2 * size if state_dependent_std else size, gain=gain)
        self.log_std = nn.Parameter(torch.full((size,), initial_log_std))

    def forward(self, features: Tensor, mask: None = None) -> DiagGaussian:
        _refuse(mask, "Box")
        mean = precise(self.linear, features)
        if not self.state_dependent_std:
            return self.dist(mean, self.log_std, self.event)
        mean, change = mean.chunk(2, -1)
        return self.dist(mean, self.log_std + change, self.event)


class TanhGaussianHead(Head):
    """``size`` actions in [-1, 1] whose mean and standard deviation depend on the state, as in SAC.

    Args:
        log_std_bounds: bounds to which the log standard deviation is clamped.
    """

    noise_kind = "normal"

    def __init__(
        self, features: int, size: int, gain: float | None = None, log_std_bounds: tuple[float, float] = (-20.0, 2.0)
    ) -> None:
        super().__init__()
        self.noise_size, self.log_std_bounds = size, log_std_bounds
        self.linear = Linear(features, 2 * size, gain=gain)

    def forward(self, features: Tensor, mask: None = None) -> TanhGaussian:
        _refuse(mask, "Box")
        mean, log_std = precise(self.linear, features).chunk(2, -1)
        return TanhGaussian(mean, log_std.clamp(*self.log_std_bounds), (self.noise_size,))


class BetaHead(Head):
    """Beta-distributed actions in [-1, 1], laid out in ``event``: both parameters are ``1 + softplus`` of outputs."""

    noise_kind = "normal"

    def __init__(self, features: int, event: tuple[int, ...], gain: float | None = 0.01) -> None:
        super().__init__()
        size = math.prod(event)
        self.event, self.noise_size = event, size * Beta.NOISE
        self.linear = Linear(features, 2 * size, gain=gain)

    def forward(self, features: Tensor, mask: None = None) -> Beta:
        _refuse(mask, "Box")
        alpha, beta = (1.0 + softplus(precise(self.linear, features))).chunk(2, -1)
        return Beta(alpha, beta, self.event)


class HybridHead(Head):
    """Continuous and discrete actions, independent of each other given the features.

    Args:
        continuous: head of the continuous part, which takes normal noise.
        discrete: head of the discrete part.
    """

    noise_kind = "normal"

    def __init__(self, continuous: Head, discrete: MultiCategoricalHead) -> None:
        super().__init__()
        self.continuous, self.discrete = continuous, discrete
        self.noise_size = continuous.noise_size + discrete.noise_size

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Product:
        """Return the distribution; ``mask [..., sum(sizes)]`` marks the allowed choices, factor by factor."""
        return Product(self.continuous(features), self.discrete(features, mask), self.continuous.noise_size)


def head_for(
    space: spaces.Space[Any], features: int, *, gain: float | None = 0.01, options: Options | None = None
) -> Head:
    """Build the policy head of an action space.

    Args:
        features: size of its input.
        gain: see ``Linear``. Small, so that the first policy is nearly uniform (Andrychowicz et al. 2021).
        options: of the distribution; None: independent choices, or Gaussian numbers with a standard deviation of 1 that
            is the same in all states.

    Raises:
        ConfigError: the space is none of Discrete, MultiDiscrete, MultiBinary, Box and ``Hybrid``, or the options do
            not fit it.
    """
    kind, free, log_std = "gaussian", True, 0.0
    if options is not None:
        kind, free, log_std = options.distribution, options.free_log_std, options.initial_log_std
    if in_order := kind == "autoregressive":
        if not isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            said = f"autoregressive conditions several choices on each other, but actions are {space}"
            raise ConfigError("algo.distribution", f"{said}; leave it out")
        kind = "gaussian"
    if isinstance(space, Hybrid):  # the options are those of its continuous part
        continuous = head_for(space.continuous, features, gain=gain, options=options)
        return HybridHead(continuous, MultiCategoricalHead(features, space.discrete.nvec.tolist(), gain=gain))
    changed = "distribution" if kind != "gaussian" else "" if free else "free_log_std"
    if changed and not isinstance(space, spaces.Box):
        raise ConfigError(f"algo.{changed}", f"applies to continuous actions, but they are {space}; leave it out")
    match space:
        case spaces.MultiDiscrete() | spaces.MultiBinary() if in_order:
            return AutoregressiveHead(features, choices_of(space) or (), space.shape, gain)
        case spaces.Discrete():
            return CategoricalHead(features, int(space.n), gain)
        case spaces.MultiDiscrete():
            return MultiCategoricalHead(features, space.nvec.ravel().tolist(), space.nvec.shape, gain)
        case spaces.MultiBinary():
            return BernoulliHead(features, space.shape, gain)
        case spaces.Box():
            if kind != "gaussian" and not space.is_bounded():
                raise ConfigError(
                    "algo.distribution", f"{kind} needs bounded actions, and {space} is not; use gaussian"
                )
            if kind != "beta":
                return DiagGaussianHead(features, space.shape, gain, log_std, not free, kind == "squashed_gaussian")
            if not free:
                raise ConfigError("algo.free_log_std", "beta has no standard deviation; leave it out")
            return BetaHead(features, space.shape, gain)
    raise ConfigError(
        "env.id", f"its action space is {space}; policies support Discrete, MultiDiscrete, MultiBinary and Box"
    )


def soft_head(space: spaces.Space[Any], features: int, distribution: Literal["squashed_gaussian", "beta"]) -> Any:
    """Build the head of a policy that learns through action values, as in SAC, for flat actions.

    ``log_probs`` of discrete actions have all choices, and ``sample_and_logp`` of continuous ones has a gradient.

    Args:
        features: size of its input.
        distribution: of continuous actions in [-1, 1]; both parameters of each number are outputs.

    Raises:
        ConfigError: ``beta`` is chosen for discrete actions.
    """
    if (choices := choices_of(space)) is not None:
        if distribution == "beta":
            said = f"beta applies to continuous actions, but they are {space}"
            raise ConfigError("algo.distribution", f"{said}; use squashed_gaussian, which discrete ones ignore")
        return MultiCategoricalHead(features, choices, space.shape)
    size = math.prod(space.shape or ())
    return BetaHead(features, (size,), gain=None) if distribution == "beta" else TanhGaussianHead(features, size)


def _refuse(mask: Tensor | None, kind: str) -> None:
    if mask is not None:
        raise ConfigError("env.id", f"it masks actions of a {kind} space; masks support Discrete and MultiDiscrete")
