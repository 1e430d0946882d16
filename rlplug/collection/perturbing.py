"""Acting with other weights than the algorithm's own: given ones, and what exploration modules make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from rlplug.api import Algorithm, Exploration
from rlplug.collection.segment import only
from rlplug.types import Batch, Weights


@contextmanager
def acting_with(
    algorithm: Algorithm, weights: Weights, modules: Sequence[Exploration], decide: Callable[[], Batch]
) -> Iterator[None]:
    """Let ``algorithm`` act with ``weights``, as ``modules`` perturb them, for as long as the block runs.

    Args:
        decide: acts greedily on the present row, so that modules see what their noise changes.
    """
    own = only(algorithm.state_dict(keep_vars=True), set(algorithm.actor_keys()))
    before = {name: x.data for name, x in own.items()}

    def put(weights: Weights) -> None:
        for name, x in weights.items():
            own[name].data = x

    try:
        put(weights)
        if modules:
            unperturbed = decide()
            perturbed = {name: x.data for name, x in own.items() if isinstance(x, nn.Parameter)}
            for extra in modules:
                perturbed = extra.perturb_weights(perturbed)
            put(perturbed)
            noisy = decide()
            for extra in modules:
                extra.adapt_noise(unperturbed, noisy)
        yield
    finally:
        put(before)
