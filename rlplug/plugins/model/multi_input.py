"""A model for composite observations: one model per image, and one for everything else."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlplug import nn
from rlplug.api import Context, Model
from rlplug.nn import Activation, Init, is_image
from rlplug.nn.spaces import part_at, parts_of
from rlplug.settings import ModelNode, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError


class MultiInput(Model):
    """Encodes Dict and Tuple spaces, also nested; a single space is one part.

    An image is a Box with 3 axes whose sides have at least 4 pixels. Each image has its own model; all other parts form
    one Dict for the model ``vector``. The features of all models are concatenated.
    """

    traceable = True
    batched: ClassVar[bool] = False

    @settings
    class Config:
        image: ModelNode = option("Model of each image.")
        vector: ModelNode = option("Model of everything else together.")
        hidden: list[PositiveInt] = option("Sizes of fully connected layers on top of all features; []: none.")
        activation: Activation = option("Nonlinearity after these layers.")
        layer_norm: bool = option("Layer normalization before their activations.")
        init: Init = option("Of these layers: orthogonal (gain sqrt 2, zero bias) or default (torch's uniform).")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        if ctx.space is None:
            raise ConfigError("model", "models are built inside another component, which gives them their input")
        parts = dict(parts_of(ctx.space))
        self.images = [path for path, space in parts.items() if is_image(space)]
        self.others = {"/".join(path): path for path in parts if path not in self.images}
        self.image_models = torch.nn.ModuleList(ctx.build(cfg.image, parts[path]) for path in self.images)
        self.vector: Model | None = None
        if self.others:
            space = spaces.Dict({name: parts[path] for name, path in self.others.items()})
            self.vector = ctx.build(cfg.vector, space)
        models: list[Any] = [*self.image_models, *([] if self.vector is None else [self.vector])]
        for model in models:
            if model.recurrent:
                raise ConfigError(
                    "model",
                    f"multi_input has no recurrent state, but {type(model).__name__} inside it has: "
                    "use it as the torso, model=lstm model@model.torso=multi_input",
                )
        self.joint = nn.MLP(
            sum(model.out_dim for model in models),
            cfg.hidden,
            cfg.activation,
            init=cfg.init,
            layer_norm=cfg.layer_norm,
        )
        self.out_dim = self.joint.out_dim

    def forward(self, x: Any, carry: Batch, is_first: Tensor | None) -> tuple[Tensor, Batch]:
        """Map a tree of ``ctx.space`` with leading ``[B]`` or ``[T, B]`` to features ``[..., out_dim]``."""
        features = [
            model(part_at(x, path), {}, is_first)[0] for path, model in zip(self.images, self.image_models, strict=True)
        ]
        if self.vector is not None:
            others = {name: part_at(x, path) for name, path in self.others.items()}
            features.append(self.vector(others, {}, is_first)[0])
        return self.joint(torch.cat(features, -1)), carry
