"""Functions that run once, on any node of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rlplug.actors.cluster import connected
from rlplug.plan import Plan, RayCluster

T = TypeVar("T")


def on_nodes(address: str, function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """Return ``function`` of every tuple of ``arguments``, called in processes with one CPU core each.

    Raises:
        ConfigError: the cluster does not answer.
    """
    import ray

    cluster = RayCluster(
        address=address, object_store_memory=None, num_cpus=1.0, num_gpus=0.0, placement_strategy="PACK"
    )
    with connected(Plan(ray=cluster)):
        task: Any = ray.remote(num_cpus=1, max_calls=1)(function)
        return ray.get([task.remote(*one) for one in zip(*arguments, strict=True)])
