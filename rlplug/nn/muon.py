"""Muon: matrices move by their orthogonalized momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

QUINTIC = 3.4445, -4.7750, 2.0315
"""coefficients of a Newton-Schulz step, by Jordan"""


class Muon(Optimizer):
    """Muon, Jordan et al. 2024 (kellerjordan.github.io/posts/muon): matrices move by their orthogonalized momentum.

    Matrices are weights ``[m, n]`` with more than one row and column, the members of a batch of them ``[E, m, n]``, and
    kernels of convolutions as ``[m, n * h * w]``. An update has a root mean square of about 0.2, as Adam's, so that its
    step sizes apply: Liu et al. 2025 (arXiv:2502.16982), equation 4. AdamW updates everything else.

    Args:
        params: of any shape ``[...]``.
        lr: step size, a number or 0-d.
        momentum: decay of the mean of a matrix's gradients.
        nesterov: add the gradient to the momentum once more.
        betas: AdamW's decay of the means of gradients and of their squares.
        eps: added to AdamW's root mean square.
        weight_decay: decoupled, of all parameters.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            if not 0.0 <= value < 1.0:
                raise ValueError(f"Invalid {name} value: {value}")
        for name, value in {"epsilon": eps, "weight_decay": weight_decay}.items():
            if value < 0.0:
                raise ValueError(f"Invalid {name} value: {value}")
        own = {"momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | own)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = (self._orthogonal if is_matrix(p) else self._adam)(p, p.grad, group)
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    def _orthogonal(self, p: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not (state := self.state[p]):
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        mean = state["momentum_buffer"].lerp_(grad, 1.0 - group["momentum"])
        update = grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        x = update.flatten(1) if p.ndim == 4 else update
        return 0.2 * max(x.shape[-2:]) ** 0.5 * orthogonalized(x).view_as(p)

    def _adam(self, p: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        if not (state := self.state[p]):
            state |= {"step": torch.zeros((), device=p.device)}
            state |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        (beta1, beta2), step = group["betas"], state["step"].add_(1.0)
        first = state["exp_avg"].lerp_(grad, 1.0 - beta1) / (1.0 - beta1**step)
        second = state["exp_avg_sq"].lerp_(grad.square(), 1.0 - beta2) / (1.0 - beta2**step)
        return first / (second.sqrt() + group["eps"])

    step.hooked = True  # type: ignore[attr-defined]  # avoids torch's slow profiler hook


def is_matrix(p: Tensor) -> bool:
    """Return whether ``Muon`` orthogonalizes the updates of a parameter ``[...]``."""
    return p.ndim == 4 or (p.ndim in (2, 3) and min(p.shape[-2:]) > 1)


def orthogonalized(x: Tensor, steps: int = 5) -> Tensor:
    """Return matrices ``[..., m, n]`` with the singular vectors of ``x``, and singular values of about 1 (0.7 to 1.2).

    By Newton-Schulz steps, in the precision of ``x``. Values below a hundredth of the Frobenius norm stay smaller.
    """
    a, b, c = QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
