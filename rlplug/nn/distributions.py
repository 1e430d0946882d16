"""Action distributions: a few tensor operations each, and no hidden randomness.

Samples are functions of noise from the caller (see ``rlplug.nn.heads``), so that a run's generators stay
in one place. ``params`` is one flat tensor that a batch stores as ``dist``, and from which ``rebuild``
makes a distribution of the same kind. Events may have any shape; parameters are flat.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
INSIDE = 1.0 - 1e-6  # densities are those of actions clipped to at most this distance from 0
POINTS = 33  # of the quadrature of an entropy


class Distribution(Protocol):
    """Interface of distributions. ``[...]`` are leading axes, ``event`` the shape of one action."""

    @property
    def params(self) -> Tensor:
        """Return the parameters ``[..., P]``, the argument of ``rebuild``."""
        ...

    def rebuild(self, params: Tensor) -> Self:
        """Build the distribution of the same kind with these parameters."""
        ...

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]`` from noise ``[..., noise_size]``."""
        ...

    def mode(self) -> Tensor:
        """Return the most probable action, ``[..., *event]``."""
        ...

    def uniform(self) -> Distribution:
        """Return the uniform distribution over the allowed choices, or over [-1, 1]; it takes the same noise."""
        ...

    def logp(self, action: Tensor) -> Tensor:
        """Return the log-probability or log-density, ``[...]``."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy, ``[...]``."""
        ...

    def kl_from(self, params: Tensor) -> Tensor:
        """Return ``KL(old || self)`` where ``params`` are those of the old distribution, ``[...]``."""
        ...


def shaped(x: Tensor, event: tuple[int, ...]) -> Tensor:
    """Reshape ``[..., A]`` to ``[..., *event]``."""
    return x if len(event) == 1 else x.reshape(x.shape[:-1] + event)


def flattened(x: Tensor, event: tuple[int, ...]) -> Tensor:
    """Reshape ``[..., *event]`` to ``[..., A]``."""
    return x if len(event) == 1 else x.reshape(*x.shape[: x.ndim - len(event)], math.prod(event))


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``logits [..., n]`` with the lowest number where ``mask [..., n]`` is False; None: unchanged."""
    # The lowest finite number, not -inf: probability exactly 0, and 0 * log(0) stays 0 with its gradient.
    return logits if mask is None else logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def _log_softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    return masked(logits, mask).log_softmax(-1)


def is_allowed(log_probs: Tensor) -> Tensor:
    """Return the choices that exist and are not masked, ``[..., n]`` bool: the others have the lowest logit."""
    return log_probs > 0.5 * torch.finfo(log_probs.dtype).min


def inverse_cdf(logp: Tensor, u: Tensor) -> Tensor:
    """Return the index ``[..., 1]`` of the category selected by uniform noise ``u [..., 1]``.

    Noise is scaled by the rounded total, so the result is in range and never has probability 0.
    """
    cdf = logp.exp().cumsum(-1)
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True)


def _categorical_kl(old: Tensor, new: Tensor) -> Tensor:
    return (old.exp() * (old - new)).sum(-1)


class Categorical:
    """One of ``n`` actions.

    Args:
        logits: ``[..., n]``.
        mask: ``[..., n]`` bool, the allowed actions; a row that allows none is treated as one that allows all.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        self.params = _log_softmax(logits, mask)

    def rebuild(self, params: Tensor) -> Categorical:
        return Categorical(params)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[...]`` int64 from uniform noise ``[..., 1]``."""
        return inverse_cdf(self.params, noise).squeeze(-1)

    def mode(self) -> Tensor:
        return self.params.argmax(-1)

    def uniform(self) -> Categorical:
        return Categorical(torch.zeros_like(self.params), is_allowed(self.params))

    def logp(self, action: Tensor) -> Tensor:
        return self.params.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.params.exp() * self.params).sum(-1)

    def kl_from(self, params: Tensor) -> Tensor:
        return _categorical_kl(params, self.params)


class MultiCategorical:
    """Independent choices, each among at most ``n``.

    Args:
        logits: ``[..., A, n]``.
        mask: ``[..., A, n]`` bool, the allowed ones.
        event: shape of an action, ``A`` numbers in all.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None, event: tuple[int, ...]) -> None:
        self.log_probs = _log_softmax(logits, mask)
        self.event = event

    @property
    def params(self) -> Tensor:
        return self.log_probs.flatten(-2)

    @property
    def allowed(self) -> Tensor:
        """Return the choices that exist and are not masked, ``[..., A, n]`` bool."""
        return is_allowed(self.log_probs)

    def uniform(self) -> MultiCategorical:
        return MultiCategorical(torch.zeros_like(self.log_probs), self.allowed, self.event)

    def rebuild(self, params: Tensor) -> MultiCategorical:
        return MultiCategorical(params.unflatten(-1, self.log_probs.shape[-2:]), None, self.event)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]`` int64 from uniform noise ``[..., A]``."""
        return shaped(inverse_cdf(self.log_probs, noise.unsqueeze(-1)).squeeze(-1), self.event)

    def mode(self) -> Tensor:
        return shaped(self.log_probs.argmax(-1), self.event)

    def logp(self, action: Tensor) -> Tensor:
        index = flattened(action, self.event).unsqueeze(-1)
        return self.log_probs.gather(-1, index).squeeze(-1).sum(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum((-2, -1))

    def kl_from(self, params: Tensor) -> Tensor:
        return _categorical_kl(params.unflatten(-1, self.log_probs.shape[-2:]), self.log_probs).sum(-1)


class Bernoulli:
    """Independent bits.

    Args:
        logits: ``[..., A]``.
        event: shape of an action, ``A`` bits in all.
    """

    def __init__(self, logits: Tensor, event: tuple[int, ...]) -> None:
        self.params, self.event = logits, event

    def rebuild(self, params: Tensor) -> Bernoulli:
        return Bernoulli(params, self.event)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]`` int64 from uniform noise ``[..., A]``."""
        return shaped((noise < self.params.sigmoid()).long(), self.event)

    def mode(self) -> Tensor:
        return shaped((self.params > 0).long(), self.event)

    def uniform(self) -> Bernoulli:
        return Bernoulli(torch.zeros_like(self.params), self.event)

    def logp(self, action: Tensor) -> Tensor:
        return (flattened(action, self.event) * self.params - softplus(self.params)).sum(-1)

    def entropy(self) -> Tensor:
        return (softplus(self.params) - self.params * self.params.sigmoid()).sum(-1)

    def kl_from(self, params: Tensor) -> Tensor:
        return (params.sigmoid() * (params - self.params) - softplus(params) + softplus(self.params)).sum(-1)


class DiagGaussian:
    """Independent normal numbers.

    Args:
        mean: ``[..., A]``.
        log_std: broadcastable to ``mean``.
        event: shape of an action, ``A`` numbers in all.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, event: tuple[int, ...]) -> None:
        self.mean, self.log_std, self.event = mean, log_std, event

    @property
    def params(self) -> Tensor:
        return torch.cat((self.mean, self.log_std.expand_as(self.mean)), -1)

    def rebuild(self, params: Tensor) -> Self:
        mean, log_std = params.chunk(2, -1)
        return type(self)(mean, log_std, self.event)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]``, differentiable in the parameters, from normal noise ``[..., A]``."""
        return shaped(self._sample(noise), self.event)

    def mode(self) -> Tensor:
        return shaped(self.mean, self.event)

    def uniform(self) -> Uniform:
        zeros = torch.zeros_like(self.mean)
        return Uniform(zeros, zeros, self.event)

    def logp(self, action: Tensor) -> Tensor:
        return self._logp((flattened(action, self.event) - self.mean) * (-self.log_std).exp())

    def entropy(self) -> Tensor:
        return (self.log_std.expand_as(self.mean) + (0.5 + HALF_LOG_2PI)).sum(-1)

    def kl_from(self, params: Tensor) -> Tensor:
        mean, log_std = params.chunk(2, -1)
        ratio = log_std - self.log_std
        shift = (mean - self.mean) * (-self.log_std).exp()
        return (0.5 * ((2.0 * ratio).exp() + shift.square() - 1.0) - ratio).sum(-1)

    def _sample(self, noise: Tensor) -> Tensor:
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def _logp(self, z: Tensor) -> Tensor:
        """Return the log-density of the action ``mean + std * z``, ``[..., A] -> [...]``."""
        return (-0.5 * z.square() - self.log_std - HALF_LOG_2PI).sum(-1)


class TanhGaussian(DiagGaussian):
    """``a = tanh(u)`` of independent normal ``u``: actions in [-1, 1]. Haarnoja et al. 2018 (arXiv:1801.01290), C.

    ``log p(a) = log N(u) - sum log(1 - tanh(u)^2)``, where the correction is computed as
    ``2 (log 2 - u - softplus(-2 u))``, without over- or underflow. KL divergences are those of ``u``:
    a bijection does not change them.
    """

    def sample(self, noise: Tensor) -> Tensor:
        return shaped(self._sample(noise).tanh(), self.event)

    def sample_and_logp(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action ``[..., *event]`` and its log-density ``[...]``, exact even if ``a`` rounds to 1."""
        u = self._sample(noise)
        return shaped(u.tanh(), self.event), self._logp(noise) - _log_tanh_slope(u).sum(-1)

    def mode(self) -> Tensor:
        """Return the median action ``[..., *event]``, that of the mean of ``u``; the density peaks elsewhere."""
        return shaped(self.mean.tanh(), self.event)

    def logp(self, action: Tensor) -> Tensor:
        """Return the log-density ``[...]`` of actions in [-1, 1], clipped to ``+- (1 - 1e-6)``."""
        u = flattened(action, self.event).clamp(-INSIDE, INSIDE).atanh()
        return self._logp((u - self.mean) * (-self.log_std).exp()) - _log_tanh_slope(u).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy ``[...]`` by a trapezoidal rule, to 1e-5 for standard deviations up to 2."""
        z = torch.linspace(-6.0, 6.0, POINTS, dtype=self.mean.dtype, device=self.mean.device)
        u = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * z
        slope = (_log_tanh_slope(u) * (-0.5 * z.square()).softmax(-1)).sum(-1)
        return super().entropy() + slope.sum(-1)


class Uniform(DiagGaussian):
    """Independent uniform numbers in [-1, 1]: ``a = 2 Phi(u) - 1`` of independent standard normal ``u``."""

    def sample(self, noise: Tensor) -> Tensor:
        return shaped((noise * math.sqrt(0.5)).erf(), self.event)

    def logp(self, action: Tensor) -> Tensor:
        """Return the log-density ``[...]`` of actions in [-1, 1]."""
        return self.mean.sum(-1) - self.mean.shape[-1] * math.log(2.0)

    def entropy(self) -> Tensor:
        """Return the entropy ``[...]``."""
        return -self.logp(self.mean)


class Beta:
    """``a = 2 x - 1`` of independent Beta-distributed ``x``: actions in [-1, 1]. Chou et al. 2017 (ICML, PMLR 70:834).

    Args:
        alpha: ``[..., A]``, at least 1, so that the density has one peak.
        beta: the same.
        event: shape of an action, ``A`` numbers in all.
    """

    ROUNDS = 6
    NOISE = 4 * ROUNDS
    """normal numbers per element of an action: in each round, two for each of two gamma variables"""

    def __init__(self, alpha: Tensor, beta: Tensor, event: tuple[int, ...]) -> None:
        self.alpha, self.beta, self.event = alpha, beta, event

    @property
    def params(self) -> Tensor:
        return torch.cat((self.alpha, self.beta), -1)

    def rebuild(self, params: Tensor) -> Beta:
        alpha, beta = params.chunk(2, -1)
        return Beta(alpha, beta, self.event)

    @torch.no_grad()
    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]``, without gradient, from normal noise ``[..., A * NOISE]``.

        ``x = g / (g + h)`` of gamma variables by the rejection method of Marsaglia & Tsang 2000
        (doi:10.1145/358407.358414), whose rounds are computed at once; the first accepted one counts. A round is
        rejected with a probability of at most 0.0484, all of them with 1.3e-8, which is less than the resolution of
        float32; in that case, the first round counts.
        """
        z, other = noise.unflatten(-1, (2, 2, self.alpha.shape[-1], self.ROUNDS)).unbind(-4)
        d = torch.stack((self.alpha, self.beta), -2).unsqueeze(-1) - 1.0 / 3.0
        v = (1.0 + z * (9.0 * d).rsqrt()).clamp(min=1e-6) ** 3
        accepted = _normal_cdf(other) < (0.5 * z.square() + d * (1.0 - v + v.log())).exp()
        first = accepted.to(torch.uint8).argmax(-1, keepdim=True)
        g, h = (d * v.gather(-1, first)).squeeze(-1).unbind(-2)
        return shaped((g - h) / (g + h), self.event)

    def sample_and_logp(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action ``[..., *event]``, differentiable in the parameters, and its log-density ``[...]``."""
        action = self.reparameterized(self.sample(noise))
        return action, self.logp(action)

    def reparameterized(self, action: Tensor) -> Tensor:
        """Return ``action [..., *event]``, a sample, with the gradient that moves it along with its quantile.

        Implicit reparameterization: ``dx / d alpha = -(dF / d alpha) / p(x)``, where ``F`` is the distribution function
        of ``x`` (Figurnov et al. 2018, arXiv:1805.08498). So the sampler itself need not be differentiable. It is
        computed as in ``torch.distributions``, with a relative error of about 1e-3.
        """
        a = flattened(action, self.event).detach().clamp(-INSIDE, INSIDE)
        up, down = 0.5 * (1.0 + a), 0.5 * (1.0 - a)
        both = torch.stack((self.alpha, self.beta), -1).detach()
        total = both.sum(-1, keepdim=True).expand_as(both)
        of_alpha, of_beta = torch._dirichlet_grad(torch.stack((up, down), -1), both, total).unbind(-1)  # type: ignore[attr-defined]
        change = of_alpha * down * (self.alpha - self.alpha.detach()) - of_beta * up * (self.beta - self.beta.detach())
        return action.detach() + shaped(2.0 * change, self.event)

    def mode(self) -> Tensor:
        peak = (self.alpha - self.beta) / (self.alpha + self.beta - 2.0).clamp(min=1e-12)
        return shaped(peak, self.event)

    def uniform(self) -> Beta:
        return Beta(torch.ones_like(self.alpha), torch.ones_like(self.beta), self.event)

    def logp(self, action: Tensor) -> Tensor:
        """Return the log-density ``[...]`` of actions in [-1, 1], clipped to ``+- (1 - 1e-6)``."""
        a = flattened(action, self.event).clamp(-INSIDE, INSIDE)
        up, down = (0.5 * (1.0 + a)).log(), (0.5 * (1.0 - a)).log()
        return ((self.alpha - 1.0) * up + (self.beta - 1.0) * down - self._log_norm()).sum(-1)

    def entropy(self) -> Tensor:
        a, b = self.alpha, self.beta
        means = (a - 1.0) * a.digamma() + (b - 1.0) * b.digamma() - (a + b - 2.0) * (a + b).digamma()
        return (self._log_norm() - means).sum(-1)

    def kl_from(self, params: Tensor) -> Tensor:
        old = self.rebuild(params)
        a, b = old.alpha, old.beta
        change_a, change_b = a - self.alpha, b - self.beta
        means = change_a * a.digamma() + change_b * b.digamma() - (change_a + change_b) * (a + b).digamma()
        return (self._log_norm() - old._log_norm() + means).sum(-1)

    def _log_norm(self) -> Tensor:
        """Return the logarithm of the integral of ``x^(alpha - 1) (1 - x)^(beta - 1)`` over ``a``, ``[..., A]``."""
        a, b = self.alpha, self.beta
        return a.lgamma() + b.lgamma() - (a + b).lgamma() + math.log(2.0)


class Product:
    """Independent continuous and discrete parts of an action: one vector, ``[..., N + C]`` float.

    Args:
        continuous: distribution of ``[..., N]``.
        discrete: distribution of ``[..., C]``.
        normal: the number of normal numbers of noise that ``continuous`` takes.
    """

    def __init__(self, continuous: Any, discrete: MultiCategorical, normal: int) -> None:
        self.continuous, self.discrete, self.normal = continuous, discrete, normal
        self.size = continuous.event[0]

    @property
    def params(self) -> Tensor:
        return torch.cat((self.continuous.params, self.discrete.params), -1)

    def rebuild(self, params: Tensor) -> Product:
        continuous, discrete = self._apart(params)
        return Product(self.continuous.rebuild(continuous), self.discrete.rebuild(discrete), self.normal)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action, whose continuous part is differentiable if ``continuous`` is, from normal noise.

        The discrete part takes uniform noise: the normal distribution function of the normal noise.
        """
        u = _normal_cdf(noise[..., self.normal :]).clamp(max=1.0 - 2.0**-24)
        return _joined(self.continuous.sample(noise[..., : self.normal]), self.discrete.sample(u))

    def mode(self) -> Tensor:
        return _joined(self.continuous.mode(), self.discrete.mode())

    def uniform(self) -> Product:
        return Product(self.continuous.uniform(), self.discrete.uniform(), self.normal)

    def logp(self, action: Tensor) -> Tensor:
        return self.continuous.logp(action[..., : self.size]) + self.discrete.logp(action[..., self.size :].long())

    def entropy(self) -> Tensor:
        return self.continuous.entropy() + self.discrete.entropy()

    def kl_from(self, params: Tensor) -> Tensor:
        continuous, discrete = self._apart(params)
        return self.continuous.kl_from(continuous) + self.discrete.kl_from(discrete)

    def _apart(self, params: Tensor) -> tuple[Tensor, Tensor]:
        size = math.prod(self.discrete.log_probs.shape[-2:])
        return params[..., :-size], params[..., -size:]


def _joined(continuous: Tensor, discrete: Tensor) -> Tensor:
    return torch.cat((continuous, discrete.to(continuous.dtype)), -1)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * (x * math.sqrt(0.5)).erf()


def _log_tanh_slope(u: Tensor) -> Tensor:
    """Return ``log(1 - tanh(u)^2)``."""
    return 2.0 * (math.log(2.0) - u - softplus(-2.0 * u))
