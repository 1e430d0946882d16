"""Losses of world models against values computed by hand, and against the authors' formulas in float64."""

from __future__ import annotations

import math

import torch

from rlplug.functional import balanced_kl, lambda_returns


def test_kl_by_hand():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64, requires_grad=True)
    exact = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
    dyn, rep = balanced_kl(p, q, free_nats=0.0)
    torch.testing.assert_close(torch.stack((dyn, rep)), torch.full((2,), exact, dtype=torch.float64))
    dyn.backward()
    assert p.grad is None
    torch.testing.assert_close(q.grad, -(p / q).detach())
    q.grad = None
    rep.backward()
    assert q.grad is None
    torch.testing.assert_close(p.grad, (p.log() - q.log() + 1.0).detach())


def test_free_nats_stop_the_gradient():
    p = torch.tensor([[0.5, 0.5]], requires_grad=True)
    dyn, rep = balanced_kl(p, torch.tensor([[0.4, 0.6]], requires_grad=True))
    assert dyn.item() == rep.item() == 1.0
    rep.backward()
    assert p.grad.eq(0.0).all()


def test_lambda_returns_by_hand():
    def with_junk(*x):  # row 0 is not read
        return torch.tensor([1e6, *x], dtype=torch.float64)

    returns = lambda_returns(with_junk(1, 1, 1), with_junk(2, 3, 4), with_junk(0.99, 0.99, 0.99), 0.95)
    expected = torch.tensor([6.56648383, 5.81338, 4.96], dtype=torch.float64)
    torch.testing.assert_close(returns, expected, atol=1e-6, rtol=0.0)


def original(last, term, rew, val, boot, disc, lam):
    """As ``lambda_return`` of danijar/dreamerv3, time first."""
    rets = [boot[-1]]
    live = (1 - term.double())[1:] * disc
    cont = (1 - last.double())[1:] * lam
    state = rew[1:] + (1 - cont) * live * boot[1:]
    for t in reversed(range(len(live))):
        rets.append(state[t] + live[t] * cont[t] * rets[-1])
    return torch.stack(list(reversed(rets))[:-1])


def test_lambda_returns_equal_the_original():
    generator = torch.Generator().manual_seed(0)
    rew, boot = torch.randn(2, 12, 5, generator=generator, dtype=torch.float64)
    last = torch.rand(12, 5, generator=generator) < 0.3
    term = last & (torch.rand(12, 5, generator=generator) < 0.5)
    expected = original(last, term, rew, boot, boot, 0.997, 0.95)
    returns = lambda_returns(rew, boot, (~term).double() * 0.997, 0.95, last)
    torch.testing.assert_close(returns, expected, atol=1e-12, rtol=1e-12)
