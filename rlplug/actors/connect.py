"""Connecting the ranks of a run to one Ray cluster. Ray is imported once its environment is complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlplug.api import Plan
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from rlplug.actors.cluster import Cluster


def connect(plan: Plan, first: bool, has_actors: bool, broadcast: Callable[[Any], Any]) -> Cluster | None:
    """Connect this rank to the Ray cluster that all ranks share.

    Args:
        first: whether this is the first rank, which starts the cluster if there is none.
        has_actors: whether this rank has actors.
        broadcast: gives every rank the first rank's value.

    Returns:
        The connection; None for a rank that needs none.

    Raises:
        ConfigError: the cluster does not answer, or is too small.
    """
    assert plan.ray is not None
    cluster, invitation = None, None
    if first:
        from rlplug.actors.cluster import Cluster

        cluster = Cluster(plan.ray)
        try:
            cluster.require(plan)
        except ConfigError:
            cluster.close()
            raise
        invitation = cluster.invitation
    address, environment = broadcast(invitation)
    if not first and has_actors:
        os.environ.update(environment)
        from rlplug.actors.cluster import Cluster

        cluster = Cluster(plan.ray, address)
    return cluster
