"""Collection by Ray: the only part of rlplug that knows it, which is loaded where a run has actors and has to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplug.api import Plan
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from rlplug.actors.cluster import Cluster

AUTHENTICATION = "RAY_AUTH_MODE"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # those of segments that nobody waits for any more
}

# Ray reads these when it is loaded
os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
if (Path.home() / ".ray" / "auth_token").exists():  # as Ray decides where it finds a cluster by itself
    os.environ.setdefault(AUTHENTICATION, "token")


def join(plan: Plan, first: bool, plays: bool, broadcast: Callable[[Any], Any]) -> Cluster | None:
    """This rank's connection to the Ray that all ranks share.

    Args:
        first: whether this is the first rank, which starts it where there is none.
        plays: whether this rank has actors.
        broadcast: gives every rank what the first one has.

    Raises:
        ConfigError: it cannot be joined, or is too small.
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
    if not first and plays:
        os.environ.update(environment)
        from rlplug.actors.cluster import Cluster

        cluster = Cluster(plan.ray, address)
    return cluster
