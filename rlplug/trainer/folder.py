"""The run folder: what is known when a run starts and ends. Every file appears whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rlplug import registry
from rlplug.config import Chosen, RunConfig
from rlplug.types import ConfigError

if TYPE_CHECKING:
    from rlplug.trainer.trainer import Trainer

LIBRARIES = ("rlplug", "torch", "lightning", "gymnasium", "numpy", "hydra-core", "omegaconf")


def create(trainer: Trainer, command: Sequence[str]) -> None:
    """Write ``config.yaml`` and ``manifest.json``.

    Raises:
        ConfigError: the folder cannot be made, or holds a run already.
    """
    folder = trainer.folder
    if (folder / "manifest.json").exists():
        raise ConfigError("hydra.run.dir", f"{folder} holds a run already; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("hydra.run.dir", f"{folder} cannot be made: {error.strerror}") from None
    write_text(folder / "config.yaml", yaml.safe_dump(trainer.config.raw, sort_keys=False))
    plan = trainer.plan
    write_json(
        folder / "manifest.json",
        {
            "command": list(command),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}},
            "plugins": {chosen.key: _origin(chosen) for chosen in _selected(trainer.config)},
            "git": _git(),
            "hardware": {
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "accelerator": torch.cuda.get_device_name() if plan.accelerator == "cuda" else None,
                "plan": vars(plan),
            },
        },
    )


def _selected(config: RunConfig) -> Iterator[Chosen]:
    yield from (config.algo, config.env, config.buffer, config.loop, config.hardware)
    for several in (config.models, config.exploration, config.logger):
        yield from several.values()


def _origin(chosen: Chosen) -> dict[str, str]:
    plugin = registry.owner(chosen.kind, chosen.name)
    return {"name": chosen.name, "distribution": plugin.distribution, "version": plugin.version}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write beside the final name, flush to disk, rename."""
    beside = path.with_name(path.name + ".partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _git() -> dict[str, Any] | None:
    """Commit of the checkout that the run was started from, and whether it had changes; None outside of one."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
