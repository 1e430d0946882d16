"""Adam is torch's, whatever the layout of gradients."""

from __future__ import annotations

import pytest
import torch

from rlplug.nn.optim import Adam, LaProp


def test_gradients_of_another_layout_meet_their_own_weights():
    draw = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(4, 3, 5, 5, generator=draw) for _ in range(2))
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    ours.grad, theirs.grad = grad.contiguous(memory_format=torch.channels_last), grad.clone()
    Adam([ours], lr=0.1).step()
    torch.optim.Adam([theirs], lr=0.1, foreach=False).step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.9), "eps": 1e-3}], ids=str
)
def test_steps_that_can_be_traced_are_the_same(options):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(*shape, generator=draw) for shape in ((3, 5), (5,), (2,))]
    ours, traced = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    whole, moved = (Adam([{"params": p[:2]}, {"params": p[2:], "lr": 0.3}], lr=0.1, **options) for p in (ours, traced))
    moved.collect(share=False)
    for count in range(4):
        grads = [None if count == i else torch.randn(p.shape, generator=draw) for i, p in enumerate(ours)]
        for p, grad in zip(ours, grads, strict=True):
            p.grad = grad
        whole.step()
        with torch.no_grad():
            moved.move(grads)
    for p, q in zip(ours, traced, strict=True):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(whole.state[p], moved.state[q])


def test_parameters_share_a_count_of_steps_until_one_stays_behind():
    ours, theirs = ([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)] for _ in range(2))
    one, other = Adam(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1, foreach=False)
    for grads in ((1.0, 2.0), (1.0, None), (3.0, None), (1.0, 1.0)):
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad = q.grad = None if grad is None else torch.full_like(p, grad)
        one.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)
        assert one.state[p]["step"] == other.state[q]["step"]
    again = Adam(ours, lr=0.1)
    again.load_state_dict(one.state_dict())
    assert [float(again.state[p]["step"]) for p in ours] == [4.0, 2.0]


@pytest.mark.parametrize("option", ["amsgrad", "decoupled_weight_decay"])
def test_what_the_kernel_is_not_given_is_refused(option):
    with pytest.raises(ValueError, match=f"{option}: rlplug.nn.Adam has no such option"):
        Adam([torch.ones(2)], lr=0.1, **{option: True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg", torch.zeros(1)),
        ("exp_avg_sq", 5),
        ("step", torch.zeros(3)),
        ("exp_avg", None),
        ("other", torch.zeros(())),
    ],
)
def test_a_state_of_other_parameters_is_refused_since_the_kernel_compares_no_shapes(key, value):
    p = torch.nn.Parameter(torch.zeros(4, 3))
    p.grad = torch.ones_like(p)
    optimizer = Adam([p], lr=0.1)
    optimizer.step()
    state = optimizer.state_dict()
    Adam([p], lr=0.1).load_state_dict(state)
    state["state"][0] = state["state"][0] | {key: value}
    with pytest.raises(ValueError, match="the state of an optimizer does not fit its parameters"):
        Adam([p], lr=0.1).load_state_dict(state)


def test_laprop_equals_the_original():
    """As ``clip_by_agc``, ``scale_by_rms``, ``scale_by_momentum`` and a linear warm-up of danijar/dreamerv3."""
    torch.manual_seed(0)
    params = [torch.randn(3, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]
    ours = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = LaProp(ours, 1e-2, betas=(0.9, 0.99), eps=1e-20, agc=0.3, warmup=3)
    nu, mu = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for k in range(1, 6):
        for i, (p, own) in enumerate(zip(params, ours, strict=True)):
            grad = torch.randn_like(p) * (5.0 if i == 0 else 1e-5)
            own.grad = grad.clone()
            upper = 0.3 * max(1e-3, float(p.norm()))
            u = grad / max(1.0, float(grad.norm()) / upper)
            nu[i] = 0.99 * nu[i] + 0.01 * u * u
            u = u / ((nu[i] / (1 - 0.99**k)).sqrt() + 1e-20)
            mu[i] = 0.9 * mu[i] + 0.1 * u
            params[i] = p - 1e-2 * min(1.0, k / 3) * mu[i] / (1 - 0.9**k)
        optimizer.step()
    torch.testing.assert_close([p.data for p in ours], params)


def test_laprop_continues_from_its_state():
    def a_run(steps, at=None, state=None):
        p = torch.nn.Parameter(torch.ones(3) if at is None else at.clone())
        optimizer = LaProp([p, torch.nn.Parameter(torch.ones(2))], torch.tensor(1e-2), warmup=4)  # one has no gradient
        if state is not None:
            optimizer.load_state_dict(state)
        for k in steps:
            p.grad = torch.tensor([1.0, -2.0, 0.5]) * k
            optimizer.step()
        return p.data, optimizer.state_dict()

    whole, _ = a_run([1, 2, 3, 4])
    half, state = a_run([1, 2])
    assert torch.equal(a_run([3, 4], half, state)[0], whole)
