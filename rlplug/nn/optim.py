"""Adam without the bookkeeping around its kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
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

    # without torch's decorator, which imports the compiler: that takes seconds
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inspect.unwrap(torch.optim.Adam.load_state_dict)(self, state_dict)
        self._lists = []

    def collect(self) -> None:
        """Make what is missing of the state, so that ``move`` finds it."""
        self._lists = []
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
            self.collect()
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

    def move(self, grads: Sequence[Tensor | None]) -> None:
        """Do the same in operations that ``torch.compile`` traces.

        Args:
            grads: one for each parameter, in their order and of its shape ``[...]``; None: it stays where it is.
        """
        grads = list(grads)
        for group, (params, first, second, steps) in zip(self.param_groups, self._lists, strict=True):
            own, grads = grads[: len(params)], grads[len(params) :]
            have = [i for i, g in enumerate(own) if g is not None]
            if not have:
                continue
            beta1, beta2 = group["betas"]
            torch._foreach_add_([steps[i] for i in have], 1.0)
            counts = torch.stack([steps[i] for i in have])
            sizes, roots = group["lr"] / (1.0 - beta1**counts), (1.0 - beta2**counts).sqrt()
            for i, size, root in zip(have, sizes, roots, strict=True):
                p, g = params[i], own[i]
                assert g is not None
                g = -g if group["maximize"] else g
                g = g + group["weight_decay"] * p if group["weight_decay"] else g
                first[i].lerp_(g, 1.0 - beta1)
                second[i].lerp_(g * g, 1.0 - beta2)
                p.sub_(size * first[i] / (second[i].sqrt() / root + group["eps"]))

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: its profiler costs more than the kernel
