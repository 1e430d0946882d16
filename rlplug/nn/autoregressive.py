"""An action distribution over several choices in order, each of which depends on the choices before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplug.nn.distributions import MultiCategorical, flattened, inverse_cdf, is_allowed, shaped


class Weights(NamedTuple):
    """Weights by which a choice changes the logits of later ones."""

    enter: Tensor
    """what a choice adds to the hidden units, ``[A, n, H]``"""
    leave: Tensor
    """from the hidden units to the logits of each choice, ``[A, n, H]``"""


class Autoregressive:
    """Choices ``a_1, ..., a_A`` in order: ``p(a) = prod p_i(a_i | a_1, ..., a_{i-1})``.

    The logits of choice ``i`` are ``base_i + leave_i tanh(hidden + sum of enter_j[a_j] over j < i)``, as in NADE
    (Larochelle & Murray 2011, PMLR 15:29). ``rebuild`` keeps the weights.

    Probabilities are exact. Entropy and KL divergence of the whole would be sums over all actions. They are those of
    the conditional distributions along one action instead: the one given to ``along``, and the mode here.

    Args:
        base: ``[..., A, n]``; choices that are masked or do not exist have the lowest number.
        hidden: ``[..., H]``.
        weights: of the choices before.
        event: shape of an action, ``A`` numbers in all.
    """

    def __init__(self, base: Tensor, hidden: Tensor, weights: Weights, event: tuple[int, ...]) -> None:
        self.base, self.hidden, self.weights, self.event = base, hidden, weights, event

    @property
    def params(self) -> Tensor:
        return torch.cat((self.base.flatten(-2), self.hidden), -1)

    def rebuild(self, params: Tensor) -> Autoregressive:
        base, hidden = params.split((params.shape[-1] - self.hidden.shape[-1], self.hidden.shape[-1]), -1)
        return Autoregressive(base.unflatten(-1, self.base.shape[-2:]), hidden, self.weights, self.event)

    def along(self, action: Tensor) -> Along:
        """Return the conditional distributions along ``action [..., *event]``."""
        return Along(self, action)

    def sample(self, noise: Tensor) -> Tensor:
        """Return the action ``[..., *event]`` int64 from uniform noise ``[..., A]``."""
        return self._choose(lambda log_probs, i: inverse_cdf(log_probs, noise[..., i : i + 1]).squeeze(-1))

    def mode(self) -> Tensor:
        """Return the most probable choices one after the other, ``[..., *event]``."""
        return self._choose(lambda log_probs, i: log_probs.argmax(-1))

    def uniform(self) -> MultiCategorical:
        return MultiCategorical(torch.zeros_like(self.base), is_allowed(self.base), self.event)

    def logp(self, action: Tensor) -> Tensor:
        return MultiCategorical(self.logits(action), None, self.event).logp(action)

    def entropy(self) -> Tensor:
        """Return the sum of the conditional entropies along the mode, ``[...]``."""
        return self.along(self.mode()).entropy()

    def kl_from(self, params: Tensor) -> Tensor:
        """Return the sum of the conditional divergences along the mode of the old distribution, ``[...]``.

        ``params`` must belong to the same weights; with older weights, compare both distributions along an action.
        """
        old = self.rebuild(params)
        path = old.mode()
        return self.along(path).kl_from(old.along(path).params)

    def logits(self, action: Tensor) -> Tensor:
        """Return the logits ``[..., A, n]`` of every choice, given the choices of ``action`` before it."""
        chosen = flattened(action, self.event).unsqueeze(-1) == torch.arange(self.base.shape[-1], device=action.device)
        each = torch.einsum("...an,anh->...ah", chosen.to(self.base.dtype), self.weights.enter)
        before = torch.cat((torch.zeros_like(each[..., :1, :]), each[..., :-1, :].cumsum(-2)), -2)
        hidden = torch.tanh(self.hidden.unsqueeze(-2) + before)
        return self.base + torch.einsum("...ah,anh->...an", hidden, self.weights.leave)

    def _choose(self, pick: Callable[[Tensor, int], Tensor]) -> Tensor:
        hidden, chosen = self.hidden, list[Tensor]()
        for i, (enter, leave) in enumerate(zip(*self.weights, strict=True)):
            logits = self.base[..., i, :] + torch.tanh(hidden) @ leave.T
            chosen.append(pick(logits.log_softmax(-1), i))
            one_hot = chosen[-1].unsqueeze(-1) == torch.arange(logits.shape[-1], device=logits.device)
            hidden = hidden + one_hot.to(enter.dtype) @ enter
        return shaped(torch.stack(chosen, -1), self.event)


class Along(MultiCategorical):
    """The conditional distributions of an ``Autoregressive`` one along one action, and their sums.

    Each is exact given the choices before it, so the mean KL divergence over actions of the old policy is that of the
    whole distribution, and so is the mean entropy over actions of this policy. ``logp`` takes other actions, too.

    Args:
        joint: the whole distribution.
        action: ``[..., *event]``.
    """

    def __init__(self, joint: Autoregressive, action: Tensor) -> None:
        super().__init__(joint.logits(action), None, joint.event)
        self.joint, self.action = joint, action

    def sample(self, noise: Tensor) -> Tensor:
        return self.joint.sample(noise)

    def mode(self) -> Tensor:
        return self.joint.mode()

    def uniform(self) -> MultiCategorical:
        return self.joint.uniform()

    def logp(self, action: Tensor) -> Tensor:
        return super().logp(action) if action is self.action else self.joint.logp(action)


def along(dist: Any, action: Tensor | None) -> Any:
    """Return ``dist`` along ``action [..., *event]`` if its entropy and KL divergence depend on one.

    Args:
        dist: any distribution; one without ``along`` is returned unchanged.
        action: None: the rows have no action.
    """
    return dist.along(action) if action is not None and hasattr(dist, "along") else dist
