"""Adam without the bookkeeping around its kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Adam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, Kingma & Ba 2015 (arXiv:1412.6980), the same to the bit.

    torch's ``step`` spends several times as long on collecting lists, dispatch and profiler hooks
    as in the kernel for networks of this field's size. Here the lists are collected once. State and
    ``state_dict`` are torch's own. All parameters must lie on one device, in one dtype.
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, **options: Any) -> None:
        super().__init__(params, lr=lr, fused=True, **options)
        self._lists: list[tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._lists = []

    def _collect(self) -> None:
        for group in self.param_groups:
            params = group["params"]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), device=p.device),
                        "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                    }
            states = [self.state[p] for p in params]
            first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            self._lists.append((params, first, second, steps))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; without closure."""
        if not self._lists:
            self._collect()
        for group, lists in zip(self.param_groups, self._lists, strict=True):
            params, first, second, steps = lists
            grads: list[Any] = [p.grad for p in params]
            if any(g is None for g in grads):
                have = [i for i, g in enumerate(grads) if g is not None]
                params, grads, first, second, steps = (
                    [values[i] for i in have] for values in (params, grads, first, second, steps)
                )
            if not params:
                continue
            # the kernel walks memory: a gradient of another layout (a compiled convolution's) would meet other weights
            grads = [
                g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
                for p, g in zip(params, grads, strict=True)
            ]
            torch._foreach_add_(steps, 1.0)
            torch._fused_adam_(
                params,
                grads,
                first,
                second,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
