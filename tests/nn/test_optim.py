"""Adam is torch's, whatever the layout of gradients."""

from __future__ import annotations

import re

import pytest
import torch

from rlplug.nn.muon import Muon, orthogonalized
from rlplug.nn.optim import OPTIMIZERS, Adam, AdamW, LaProp, replaced
from rlplug.types import ConfigError


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


def walk(optimizer, params, steps=5, seed=0):
    """Move by the gradients of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in params]


def params(*shapes, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def test_adamw_equals_torch():
    shapes = (4, 3), (5,)
    ours, theirs = params(*shapes), params(*shapes)
    options = {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    mine = walk(AdamW(ours, 0.01, **options), ours)
    torch.testing.assert_close(mine, walk(torch.optim.AdamW(theirs, 0.01, **options), theirs))
    assert (
        AdamW(ours, 0.01).param_groups[0]["weight_decay"] == torch.optim.AdamW(theirs).param_groups[0]["weight_decay"]
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 64)])
def test_muon_of_a_matrix_equals_torch_which_rounds_to_bfloat16(shape, nesterov):
    ours, theirs = params(shape), params(shape)
    (start,), options = params(shape), {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    (mine,) = walk(Muon(ours, 0.01, **options), ours)
    (other,) = walk(torch.optim.Muon(theirs, 0.01, adjust_lr_fn="match_rms_adamw", **options), theirs)
    assert (mine - other).norm() < 0.02 * (mine - start).norm()


def test_muon_moves_vectors_rows_and_gains_of_ensembles_as_adamw():
    shapes = (5,), (), (1, 8), (3, 1, 4)
    ours, theirs = params(*shapes), params(*shapes)
    options = {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    mine = walk(Muon(ours, 0.01, **options), ours)
    torch.testing.assert_close(mine, walk(torch.optim.AdamW(theirs, 0.01, **options), theirs))


def test_muon_of_an_ensemble_and_of_a_convolution_is_that_of_their_matrices():
    stack, kernel = params((3, 6, 4), (8, 3, 2, 2))
    members = [torch.nn.Parameter(member.clone()) for member in stack.detach()]
    flat = torch.nn.Parameter(kernel.detach().flatten(1).clone())
    stack.grad, kernel.grad = (p.detach().clone() for p in params((3, 6, 4), (8, 3, 2, 2), seed=4))
    for member, grad in zip(members, stack.grad, strict=True):
        member.grad = grad.clone()
    flat.grad = kernel.grad.flatten(1).clone()
    Muon([stack, kernel], 0.1).step()
    Muon([*members, flat], 0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([*members]).detach())
    torch.testing.assert_close(kernel.detach().flatten(1), flat.detach())


def test_orthogonalized_matrices_keep_singular_vectors_and_have_values_near_one():
    x = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ orthogonalized(x) @ v.mT
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert values.max() > 2.0
    assert 0.6 < diagonal.min() < diagonal.max() < 1.3
    torch.testing.assert_close(found, torch.diag_embed(diagonal), atol=1e-9, rtol=0.0)
    torch.testing.assert_close(orthogonalized(x.mT), orthogonalized(x).mT)
    assert torch.equal(orthogonalized(torch.zeros(3, 2)), torch.zeros(3, 2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_follows_the_step_sizes_of_adam(name):
    (p, q), lr = params((3, 3), (2,)), torch.tensor(0.25)
    adam = Adam([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=lr, eps=1e-3, betas=(0.5, 0.6))
    other = replaced(adam, name)
    assert (other is adam) == (name == "adam")
    assert type(other) is OPTIMIZERS[name][0]
    assert [group["params"] for group in other.param_groups] == [[p], [q]]
    assert other.param_groups[0]["lr"] is lr
    assert other.param_groups[1]["lr"] == 0.5
    for key, value in {"eps": 1e-3, "betas": (0.5, 0.6)}.items():
        assert all(group.get(key, value) == value for group in other.param_groups)
    start = p.detach().clone()
    walk(other, [p, q], 1)
    assert (p != start).any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_of_an_optimizer_is_taken(name):
    values = {"betas": [0.5, 0.6], "eps": 0.5, "weight_decay": 0.25, "momentum": 0.5, "alpha": 0.75, "dampening": 0.1}
    _, known = OPTIMIZERS[name]
    for key in known:
        options = {key: values.get(key, True)} | ({"momentum": 0.5} if key == "nesterov" else {})
        made = replaced(Adam(params((2, 2)), lr=0.1, weight_decay=0.125), name, options)
        assert made.param_groups[0][key] in (options[key], (0.5, 0.6))
        assert made.param_groups[0]["weight_decay"] == options.get("weight_decay", 0.125)


@pytest.mark.parametrize(
    ("optimizer", "name", "options", "said"),
    [
        (Adam, "sgd", {"momentun": 0.9}, "optimizer_options.momentun: is no option of sgd; did you mean momentum?"),
        (Adam, "adam", {"momentum": 0.9}, "optimizer_options.momentum: is no option of adam; there are: betas, eps"),
        (Adam, "muon", {"momentum": 1.5}, "optimizer_options: muon refuses {'momentum': 1.5}: Invalid momentum"),
        (Adam, "muon", {"eps": -1.0}, "optimizer_options: muon refuses {'eps': -1.0}: Invalid epsilon"),
        (Adam, "sgd", {"nesterov": True}, "optimizer_options: sgd refuses {'nesterov': True}: Nesterov momentum"),
        (Adam, "adamw", {"betas": "x"}, "optimizer_options: adamw refuses {'betas': 'x'}"),
        (LaProp, "sgd", {}, "optimizer: replaces Adam, but the algorithm chooses LaProp itself; leave it out"),
        (LaProp, "adam", {"eps": 1.0}, "optimizer_options: replaces Adam, but the algorithm chooses LaProp itself"),
        (torch.optim.RMSprop, "muon", {}, "chooses RMSprop itself; use algo.opt_type=adam"),
    ],
)
def test_what_cannot_replace_adam_is_refused(optimizer, name, options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        replaced(optimizer(params((2, 2)), lr=0.1), name, options)
