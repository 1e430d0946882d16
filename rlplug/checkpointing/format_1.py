"""What checkpoints of format 1 lack: options and parts that came with format 2, at what they amounted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

PREPROCESS = {
    "normalize_obs": False,
    "clip_obs": 10.0,
    "scale_reward": 1.0,
    "normalize_reward": False,
    "reward_gamma": 0.99,
    "clip_reward": None,
}
RANKS = {"devices": 1, "num_nodes": 1, "microbatches": 1, "max_restarts": 0}
OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("algo", "ppo"): {"max_seq_len": 32},
    ("algo", "sac"): {"target_entropy_fraction": 0.5, "sequence_length": 32, "burn_in": 8, "stride": 16},
    ("buffer", "replay"): {"device": "cpu", "deduplicate": True, "compress": None, "compressed_share": 0.5},
    ("hardware", "cpu"): RANKS,
    ("hardware", "gpu"): RANKS,
    ("hardware", "auto"): RANKS,
    ("env", "gymnasium"): {
        "backend": "gymnasium",
        "workers": None,
        "mask_key": None,
        "check_bounds": True,
        "atari": False,
        "frame_skip": 1,
        "sticky_actions": None,
        "drop": [],
        "flatten": False,
        "select": None,
        "frame_stack": 1,
    },
}
"""(key, component) -> options that it did not have"""


def manifest(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"spec": content["spec"] | {"frame_stack": 1}}


def config(content: dict[str, Any]) -> dict[str, Any]:
    added = {"preprocess": PREPROCESS, "eval": {"record": 0} | content["eval"]}
    added |= with_options(content, OPTIONS)
    return added | {key: node for key, node in content.items() if key not in added}


def with_options(
    content: Mapping[str, Any], options: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The nodes of a configuration to which ``options``, by key and component, add something, with that."""
    return {
        key: dict(new) | node
        for (key, name), new in options.items()
        if isinstance(node := content.get(key), dict) and node.get("name") == name
    }


def weights(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"preprocess": {}}


MIGRATIONS: Mapping[str, Callable[[Any], Any]] = {"manifest": manifest, "config": config, "weights": weights}
