"""A network of the user's own, without a package."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlplug import tree
from rlplug.api import Context, Model
from rlplug.envs.spaces import allocate
from rlplug.nn import Flatten
from rlplug.script import make
from rlplug.settings import option, settings
from rlplug.types import Batch, ConfigError

KEY = "model.entry_point"


class Custom(Model):
    """Calls ``Net(space, **kwargs)`` on batches ``[n, ...]``, which returns features ``[n, F]``.

    It receives floats, as the feature extractors of Stable-Baselines3 do: images from 0 to 255 are divided by 255, and
    discrete parts are one-hot. A Dict observation is a dict of tensors, and so is a Tuple, with the keys 0, 1, ...

    Raises:
        ConfigError: there is no such class, it is no ``torch.nn.Module``, or does not return ``[n, F]``.
    """

    @settings
    class Config:
        entry_point: str = option("module:Class, a torch.nn.Module made from the space of its input.")
        kwargs: dict[str, Any] = option("Further arguments of its constructor.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError(
                "model", "custom is built inside another component, which gives it the space of its input"
            )
        net = make({"entry_point": cfg.entry_point, "kwargs": cfg.kwargs}, KEY, ctx.space)
        if not isinstance(net, nn.Module) or isinstance(net, Model):
            said = (
                "is a Model, which a package registers by a name" if isinstance(net, Model) else "is no torch.nn.Module"
            )
            raise ConfigError(KEY, f"{cfg.entry_point} {said}")
        self.net, self._inputs = net, _Inputs(ctx.space)
        zeros = tree.map(torch.as_tensor, allocate(ctx.space, 2))
        try:
            with torch.no_grad():
                out = self.net(self._inputs(zeros))
        except Exception as error:
            said = f"cannot be called with a batch of two observations: {type(error).__name__}: {error}"
            raise ConfigError(KEY, f"{cfg.entry_point} {said}") from error
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2 or not out.is_floating_point():
            got = [*out.shape] if isinstance(out, Tensor) else type(out).__name__
            raise ConfigError(KEY, f"{cfg.entry_point} returned {got} for two observations; return features [2, F]")
        self.out_dim = out.shape[1]

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map a tree of ``ctx.space`` with leading ``[B]`` or ``[T, B]`` to features ``[..., out_dim]``."""
        return self.net(self._inputs(x)).view(*self._inputs.lead(x), self.out_dim), carry


class _Inputs:
    """Converts a tree of ``space`` with leading axes to floats of the same structure, ``[n, ...]``."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        inside = space.spaces.items() if isinstance(space, spaces.Dict) else ()
        self.parts, self.shape = {key: _Inputs(part) for key, part in inside}, space.shape or ()
        self.flat = None if self.parts else Flatten(space)
        self.is_box = isinstance(space, spaces.Box)

    def lead(self, x: Any) -> Any:
        """Return the sizes of the leading axes."""
        if self.flat is None:
            key, part = next(iter(self.parts.items()))
            return part.lead(x[key])
        return x.shape[: x.ndim - len(self.shape)]

    def __call__(self, x: Any) -> Any:
        if self.flat is None:
            return {key: part(x[key]) for key, part in self.parts.items()}
        flat = self.flat(x)
        return flat.reshape(-1, *(self.shape if self.is_box else flat.shape[-1:]))
