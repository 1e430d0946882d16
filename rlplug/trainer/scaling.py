"""Loss scaling, for gradients in float16, which vanish below 6e-8 and overflow above 65504."""

from __future__ import annotations

import torch
from torch import Tensor

from rlplug.trainer.gradient_step import GradientStep, find_nonfinite
from rlplug.types import Tree

LARGEST = 2.0**24


class LossScale:
    """The factor of the loss that is differentiated: halved after an overflow, doubled after many steps without.

    Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2. One scale serves all optimizers, whose losses are
    differentiated together. All ranks see the same gradients, and so keep the same scale.

    Args:
        start: a power of two, so that gradients divided by it are exact.
        patience: steps without an overflow after which it is doubled.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.patience, self.fine = patience, 0

    def unscale_(self, grads: list[Tensor]) -> None:
        if grads:
            torch._foreach_div_(grads, self.value)

    def fits(self, step: GradientStep) -> bool:
        """Return False after an overflow. Reads the step's numbers, for which an accelerator has to wait.

        A number that is not finite for another reason (a loss term, or a gradient at scale 1) is left to others.
        """
        if find_nonfinite([step]) is None:
            self.fine += 1
            if self.fine == self.patience:
                self.value.mul_(2.0).clamp_(max=LARGEST)
                self.fine = 0
            return True
        if find_nonfinite([step._replace(norms={})]) is not None or self.value <= 1.0:
            return True
        self.value.div_(2.0)
        self.fine = 0
        return False

    def state(self) -> Tree:
        return {"value": self.value, "fine": self.fine}

    def load(self, state: Tree) -> None:
        self.value.copy_(state["value"])
        self.fine = state["fine"]
