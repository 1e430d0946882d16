"""Gradients computed on the collecting actor, with the weights that played the segment; see ``api.Needs``.

Algorithm S3 of Mnih et al. 2016 (arXiv:1602.01783): each actor takes the newest weights, plays a few steps, and sends
the gradient to the learner, whose weights other actors have updated in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Losses, Trainable
from rlplug.context import RunContext
from rlplug.distributed.collectives import Collectives
from rlplug.functional.minibatches import microbatches
from rlplug.host import on_device
from rlplug.trainer.losses import NO_LOSS, Total, all_reduced, forward, total_loss
from rlplug.trainer.normalize import Normalizer
from rlplug.types import Batch, ConfigError


class SegmentGradients:
    """Computes the gradients of a segment, one per ``train_batch_size`` transitions of the run.

    Args:
        width: columns of a segment.

    Raises:
        ConfigError: ``train_batch_size`` is neither a number of columns' rollouts nor of whole segments.
    """

    def __init__(self, algorithm: Algorithm, normalizer: Normalizer, ctx: RunContext, width: int) -> None:
        self.algorithm, self.normalizer, self.device = algorithm, normalizer, ctx.device
        self.parts = tuple(algorithm.optimizers())
        ranks = 1 if ctx.num_envs % ctx.world_size else ctx.world_size  # otherwise one rank collects for all
        columns, rest = divmod(ctx.batch_size // ranks, ctx.rollout_length)
        if rest or not columns or (width % columns and columns % width):
            fitting = [n * ctx.rollout_length * ranks for n in range(1, width + 1) if width % n == 0]
            said = f"{ctx.batch_size} transitions are not whole rollouts of {ctx.rollout_length} steps that divide the"
            ways = f"{width} environments of a process; use {' or '.join(map(str, fitting))}"
            raise ConfigError("train_batch_size", f"{said} {ways}")
        self.count = max(1, width // columns)

    def __call__(self, segment: Batch) -> Batch:
        """Add ``gradients`` to a segment: sums over the valid rows of each gradient's columns, leaves ``[1, n, ...]``.

        ``parameters`` holds the gradients by name, ``terms`` and ``metrics`` the loss.
        """
        with torch.inference_mode(False), torch.enable_grad():
            sums = [self._sums(part) for part in microbatches(segment, self.count)]
        return segment | {"gradients": tree.map(lambda *parts: torch.stack(parts)[None].cpu(), *sums)}

    def _sums(self, segment: Batch) -> Batch:
        batch = self.normalizer.normalized(on_device(segment, self.device))
        with torch.no_grad():
            batch = self.algorithm.prepare(batch)
        losses = forward(self.algorithm, batch, self.parts)
        total = total_loss(losses, batch.get("valid"), batch.get("alive"), self.algorithm, mean=False)
        params = {name: p for name, p in self.algorithm.named_parameters() if p.requires_grad}
        given = torch.autograd.grad(total.loss, [*params.values()], allow_unused=True, materialize_grads=True)
        gradients = dict(zip(params, given, strict=True))
        return {"parameters": gradients, "terms": total.losses.terms, "metrics": total.losses.metrics}


def parts(batch: Batch) -> list[Batch]:
    """Split a segment into its gradients and their columns; without gradients, return it as a single part."""
    if "gradients" not in batch:
        return [batch]
    count = next(tree.leaves(batch["gradients"])).shape[1]
    return [tree.map(lambda x: x.chunk(count, 1)[i], batch) for i in range(count)]  # noqa: B023


def take_over(batch: Batch, who: Trainable, params: Sequence[Tensor], ranks: Collectives) -> Losses:
    """Set ``.grad`` of ``params`` to the mean of gradients sent with the rows; return losses as global means."""
    sums = tree.map(lambda x: x.sum((0, 1)), batch["gradients"])
    for name, p in who.named_parameters():
        p.grad = sums["parameters"].get(name)
    losses, count = Losses(sums["terms"], sums["metrics"]), batch["valid"].sum().float()
    return all_reduced([Total(losses, count, NO_LOSS)], 1, params, ranks)
