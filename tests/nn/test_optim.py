"""Adam is torch's, whatever the layout of gradients."""

from __future__ import annotations

import torch

from rlplug.nn.optim import Adam


def test_gradients_of_another_layout_meet_their_own_weights():
    draw = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(4, 3, 5, 5, generator=draw) for _ in range(2))
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    ours.grad, theirs.grad = grad.contiguous(memory_format=torch.channels_last), grad.clone()
    Adam([ours], lr=0.1).step()
    torch.optim.Adam([theirs], lr=0.1, foreach=False).step()
    torch.testing.assert_close(ours, theirs)
