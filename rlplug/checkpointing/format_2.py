"""What configurations of format 2 lack: options that came with format 3, at what they amounted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlplug.checkpointing.format_1 import with_options

ACTORS = {
    "count": 0,
    "num_cpus": 1,
    "num_gpus": 0,
    "timeout_s": 60,
    "on_failure": "recreate",
    "max_restarts": 3,
    "backoff_s": 1,
    "max_requests_in_flight": 1,
    "broadcast_interval": 1,
    "max_weight_sync_delay": None,
    "num_aggregation_workers": 0,
    "evaluation": 0,
}
RAY = {"address": None, "object_store_memory": None, "num_cpus": 1, "num_gpus": 0, "placement_strategy": "PACK"}
OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("hardware", "cpu"): {"precision": "32-true", "actors": ACTORS, "ray": RAY},
    ("hardware", "gpu"): {"actors": ACTORS, "ray": RAY},
    ("hardware", "auto"): {"actors": ACTORS, "ray": RAY},
    ("env", "gymnasium"): {"restart_failed": False},
}


def config(content: dict[str, Any]) -> dict[str, Any]:
    return content | with_options(content, OPTIONS)


MIGRATIONS: Mapping[str, Callable[[Any], Any]] = {"config": config}
