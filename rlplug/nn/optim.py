"""Adam and what may replace it, LaProp, gradient clipping, a cheaper backward pass, and loss scaling."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.compiler import is_compiling
from torch.optim import SGD, Optimizer, RMSprop

from rlplug import host, tree
from rlplug.nn.muon import Muon
from rlplug.types import ConfigError, Tree

ROUNDING = 1e-5  # relative error of a norm in float32, with a margin
LARGEST = 2.0**24  # the largest loss scale


class Lists(NamedTuple):
    """The kernel's arguments for a group of parameters."""

    params: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    """0-d, one per parameter; the same tensor if all have made equally many steps"""

    def take(self, have: Sequence[int]) -> Lists:
        return Lists(*([values[i] for i in have] for values in self))


class Adam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, Kingma & Ba 2015 (arXiv:1412.6980), with bit-identical results.

    For networks of typical size, torch's ``step`` spends several times as long on collecting lists, dispatch and
    profiler hooks as in the kernel. Here the lists are collected once, and parameters that are updated together share
    a step count. State and ``state_dict`` are torch's own. All parameters must have one device and one dtype.

    Raises:
        ValueError: ``amsgrad`` or ``decoupled_weight_decay`` is set, which are not supported.
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, **options: Any) -> None:
        for name in ("amsgrad", "decoupled_weight_decay"):
            if options.get(name):
                raise ValueError(f"{name}: rlplug.nn.Adam has no such option; torch.optim.Adam and AdamW have")
        super().__init__(params, lr=lr, fused=True, **options)
        self._lists, self._shares = list[Lists](), True

    kernel = staticmethod(torch._fused_adam_)

    # without torch's decorator, which imports the compiler and takes seconds
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Raises ``ValueError`` if it belongs to other parameters."""
        inspect.unwrap(torch.optim.Adam.load_state_dict)(self, state_dict)
        self._lists = []
        for p, state in self.state.items():  # the kernel does not check shapes
            shapes = {"step": torch.Size(), "exp_avg": p.shape, "exp_avg_sq": p.shape}
            if state and {key: getattr(x, "shape", None) for key, x in state.items()} != shapes:
                raise ValueError("the state of an optimizer does not fit its parameters")

    def collect(self, share: bool = True) -> None:
        """Create missing state, and the kernel's lists.

        Args:
            share: share equal step counts; False before ``move``, which may skip any parameter.
        """
        self._lists, self._shares = [], share
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
            if states:
                equal = share and len({float(state["step"]) for state in states}) == 1
                for state in states:
                    state["step"] = states[0]["step"] if equal else state["step"].clone()
            first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            self._lists.append(Lists(params, first, second, steps))

    def unshare(self) -> None:
        """Create the lists for ``move``, once: compiled functions hold their tensors."""
        if self._shares or not self._lists:
            self.collect(share=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        self.apply([p.grad for group in self.param_groups for p in group["params"]])

    def apply(self, grads: Sequence[Tensor | None]) -> None:
        """Update parameters by the fused kernel.

        Args:
            grads: one per parameter, in order and of its shape ``[...]``; None: leave the parameter unchanged.
        """
        some = any(g is None for g in grads)
        if not self._lists or (some and self._shares):  # from now on, step counts differ
            self.collect(share=not some)
        for group, lists in zip(self.param_groups, self._lists, strict=True):
            own, grads = grads[: len(lists.params)], grads[len(lists.params) :]
            if some:
                lists = lists.take([i for i, g in enumerate(own) if g is not None])
            if not lists.params:
                continue
            # the kernel ignores strides: a gradient with another layout (a compiled convolution's) would be permuted
            given = [
                g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
                for p, g in zip(lists.params, (g for g in own if g is not None), strict=True)
            ]
            _count(lists.steps)
            self.kernel(
                *(lists.params, given, lists.first, lists.second, [], lists.steps),
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
        """Do the same as ``apply`` by operations that ``torch.compile`` can trace.

        Args:
            grads: as for ``apply``, ``[...]`` each.
        """
        grads = list(grads)
        for group, lists in zip(self.param_groups, self._lists, strict=True):
            own, grads = grads[: len(lists.params)], grads[len(lists.params) :]
            lists, own = lists.take([i for i, g in enumerate(own) if g is not None]), [g for g in own if g is not None]
            if not own:
                continue
            beta1, beta2 = group["betas"]
            _count(lists.steps)
            counts = torch.stack(lists.steps)
            sizes, inverses = group["lr"] / (1.0 - beta1**counts), (1.0 - beta2**counts).rsqrt()
            # materialize: the compiler would recompute them for every few elements of a parameter
            sizes, inverses = (x.as_strided(x.shape, (1,)) for x in (sizes, inverses))
            for p, g, first, second, size, inverse in zip(*lists[:1], own, *lists[1:3], sizes, inverses, strict=True):
                g = -g if group["maximize"] else g
                g = g + group["weight_decay"] * p if group["weight_decay"] else g
                first.lerp_(g, 1.0 - beta1)
                second.lerp_(g * g, 1.0 - beta2)
                p.sub_(size * first / (second.sqrt() * inverse + group["eps"]))

    step.hooked = True  # type: ignore[attr-defined]  # avoids torch's slow profiler hook


class AdamW(Adam):
    """``torch.optim.AdamW``, Loshchilov & Hutter 2019 (arXiv:1711.05101): ``Adam`` with decoupled weight decay."""

    kernel = staticmethod(torch._fused_adamw_)

    def __init__(
        self, params: Iterable[Tensor], lr: float | Tensor, weight_decay: float = 1e-2, **options: Any
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **options)


def _count(steps: list[Tensor]) -> None:
    """Add 1 to every step count, once if parameters share it."""
    if steps[0] is steps[-1]:
        steps[0].add_(1.0)
    else:
        torch._foreach_add_(steps, 1.0)


class LaProp(torch.optim.Optimizer):
    """LaProp, Ziyin et al. 2020 (arXiv:2002.04839), with adaptive gradient clipping, as DreamerV3 uses both.

    Gradients are divided by their root mean square before they are averaged, the reverse of Adam's order, so that
    a tiny ``eps`` is stable. A tensor's gradient is first scaled down to a norm of at most ``agc`` times that of the
    tensor: Brock et al. 2021 (arXiv:2102.06171).

    Args:
        params: of any shape ``[...]``.
        lr: step size, a number or 0-d.
        betas: decay of both averages: of normalized gradients, and of squares.
        eps: added to the root mean square.
        agc: largest norm of a gradient, relative to its tensor's; None: no clipping.
        warmup: steps in which the step size grows to ``lr`` in equal parts.
    """

    LEAST_NORM = 1e-3
    """lower bound on a tensor's norm in clipping, so that a tensor of zeros can change"""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        agc: float | None = 0.3,
        warmup: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "agc": agc, "warmup": warmup})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    step = torch.zeros((), device=p.device)
                    self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            steps, first, second = ([self.state[p][key] for p in params] for key in ("step", "exp_avg", "exp_avg_sq"))
            (beta1, beta2), grads = group["betas"], [p.grad for p in params if p.grad is not None]
            torch._foreach_add_(steps, 1.0)
            if group["agc"] is not None:
                sizes = torch.stack(torch._foreach_norm(params)).clamp_(min=self.LEAST_NORM).mul_(group["agc"])
                excess = (torch.stack(torch._foreach_norm(grads)) / sizes).clamp_(min=1.0)
                grads = list(torch._foreach_div(grads, list(excess.unbind())))
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
            counts = torch.stack(steps)
            scale = torch._foreach_sqrt(torch._foreach_div(second, list((1.0 - beta2**counts).unbind())))
            torch._foreach_add_(scale, group["eps"])
            torch._foreach_lerp_(first, torch._foreach_div(grads, scale), 1.0 - beta1)
            lr = group["lr"] * (counts / max(1, group["warmup"])).clamp_(max=1.0) / (1.0 - beta1**counts)
            torch._foreach_sub_(params, torch._foreach_mul(first, list(lr.unbind())))


def backward(loss: Tensor) -> None:
    """Add the gradients of a 0-d loss ``[]`` to ``.grad``: ``loss.backward()`` without torch's checks."""
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def clip(grads: list[Tensor], limit: float | None, by: Literal["value", "norm", "global_norm"]) -> Sequence[Tensor]:
    """Clip gradients ``[...]`` in place, faster than ``torch.nn.utils``.

    Args:
        limit: maximum of every element, of every tensor's norm, or of the global norm; None: no clipping.

    Returns:
        Norms before clipping, 0-d, one per tensor or one of all.
    """
    if is_compiling():  # the compiler cannot trace foreach_norm
        norms: Sequence[Tensor] = [torch.linalg.vector_norm(grad) for grad in grads]
    else:
        norms = torch._foreach_norm(grads) if grads else ()
    if limit is None or not grads:
        return norms
    if by == "value":
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)
        return norms
    if host.reads_freely(grads[0]):
        largest = (max if by == "norm" else math.hypot)(*(norm.item() for norm in norms), 0.0)
        if largest < (1.0 - ROUNDING) * limit:
            return norms if by == "norm" else (torch.tensor(largest),)
    size = torch.stack(norms) if by == "norm" else torch.stack(norms).norm()
    factor = (limit / (size + 1e-6)).clamp_(max=1.0)
    torch._foreach_mul_(grads, list(factor.unbind()) if by == "norm" else factor)
    return norms if by == "norm" else (size,)


class LossScale:
    """Dynamic loss scaling: halves the scale after an overflow, and doubles it after many steps without one.

    Gradients in float16 vanish below 6e-8 and overflow above 65504: Micikevicius et al. 2018 (arXiv:1710.03740),
    section 3.2. All optimizers share one scale, since their losses are differentiated together. All ranks see the same
    gradients, and so have the same scale.

    Args:
        start: a power of two, so that gradients divided by it are exact.
        patience: steps without an overflow after which the scale doubles.
    """

    def __init__(self, device: torch.device, start: float = 2.0**16, patience: int = 2000) -> None:
        self.value = torch.tensor(start, device=device)
        self.patience, self.fine = patience, 0

    def fits(self, numbers: Iterable[Tensor], gradients: Iterable[Tensor]) -> bool:
        """Return False after an overflow. Reads 0-d tensors, which synchronizes with an accelerator.

        Args:
            numbers: finite if the losses are. Losses that are not finite, or gradients that are not finite at scale 1,
            do not count as an overflow, and are reported elsewhere.
            gradients: norms of the gradients, 0-d.
        """
        numbers, gradients = [*numbers], [*gradients]
        every = [*numbers, *gradients]
        finite = torch.stack(every).isfinite().tolist() if every else []  # one read
        sound = all(finite[: len(numbers)])
        if all(finite):
            self.fine = (self.fine + 1) % self.patience
            if self.fine == 0:
                self.value.mul_(2.0).clamp_(max=LARGEST)
            return True
        if not sound or self.value <= 1.0:
            return True
        self.value.div_(2.0)
        self.fine = 0
        return False

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "fine": self.fine}

    def load(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        self.fine = state["fine"]


def adam_or_rmsprop(
    opt_type: str, params: Iterable[Tensor], lr: Tensor, epsilon: float, decay: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    """Return ``Adam``, which ignores ``decay`` and ``momentum``, or torch's RMSProp, by ``opt_type``.

    Args:
        params: of any shape ``[...]``.
        lr: step size, 0-d ``[]``.
    """
    if opt_type == "adam":
        return Adam(params, lr=lr, eps=epsilon)
    return torch.optim.RMSprop(params, lr, decay, epsilon, momentum=momentum)


OPTIMIZERS: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "adam": (Adam, ("betas", "eps", "weight_decay")),
    "adamw": (AdamW, ("betas", "eps", "weight_decay")),
    "rmsprop": (RMSprop, ("alpha", "centered", "eps", "momentum", "weight_decay")),
    "sgd": (SGD, ("dampening", "momentum", "nesterov", "weight_decay")),
    "muon": (Muon, ("betas", "eps", "momentum", "nesterov", "weight_decay")),
}
"""optimizers, with the options that they accept"""


def replaced(optimizer: Optimizer, name: str = "adam", options: Mapping[str, Any] | None = None) -> Optimizer:
    """Return an optimizer with the parameters and step sizes of an ``Adam``, or the ``Adam`` itself if it is chosen.

    Options that are not given are those of the ``Adam``: ``betas``, ``eps`` and a ``weight_decay`` other than 0; then
    the optimizer's defaults.

    Args:
        name: a key of ``OPTIMIZERS``.
        options: some of its options.

    Raises:
        ConfigError: the optimizer is not an ``Adam``, or it does not accept the options.
    """
    if name == "adam" and not options:
        return optimizer
    if type(optimizer) is not Adam:
        said = f"replaces Adam, but the algorithm chooses {type(optimizer).__name__} itself"
        way = "use algo.opt_type=adam" if type(optimizer) is RMSprop else "leave it out"
        raise ConfigError("optimizer" if name != "adam" else "optimizer_options", f"{said}; {way}")
    (cls, known), given = OPTIMIZERS[name], options or {}
    for key in given.keys() - set(known):
        near = difflib.get_close_matches(key, known, 1)
        said = f"is no option of {name}; " + (f"did you mean {near[0]}? There are: " if near else "there are: ")
        raise ConfigError(f"optimizer_options.{key}", said + ", ".join(known))
    kept = {key for key in ("betas", "eps", "weight_decay") if key in known and key not in given}
    groups = [
        {"params": group["params"], "lr": group["lr"]}
        | {key: group[key] for key in kept if key != "weight_decay" or group[key]}
        for group in optimizer.param_groups
    ]
    made: Any = cls
    try:
        return made(groups, lr=groups[0]["lr"], **given)
    except (TypeError, ValueError) as error:
        raise ConfigError("optimizer_options", f"{name} refuses {dict(given)}: {error}") from error


def load_checked(optimizer: Optimizer, state: Tree) -> None:
    """Load the ``state_dict`` of an optimizer.

    Raises:
        ValueError: the state of a parameter has another structure than after a step.
    """
    like = _stepped(optimizer)
    optimizer.load_state_dict(state)
    updated = {i: own for i, own in optimizer.state_dict()["state"].items() if own != {}}
    tree.check_like({i: like[i] for i in updated}, updated, "the state of an optimizer", exact=True)


def _stepped(optimizer: Optimizer) -> Tree:
    """Return the state of every parameter after a step of a copy."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(copy.deepcopy(vars(optimizer)))  # ``deepcopy`` of an optimizer loses attributes
    for p in [p for group in twin.param_groups for p in group["params"]]:
        p.grad = torch.zeros_like(p)
    twin.step()
    return twin.state_dict()["state"]
