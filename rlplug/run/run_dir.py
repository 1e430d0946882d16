"""The run folder: its lock, and the files written when a run starts and ends."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, Field

from rlplug import registry
from rlplug.checkpointing import atomic
from rlplug.checkpointing.format import FORMAT, MANIFEST, Manifest, Word, read_manifest
from rlplug.checkpointing.serialize import damaged
from rlplug.config import RunConfig, migrate, nested
from rlplug.packages import versions
from rlplug.plan import Plan
from rlplug.script import described
from rlplug.tracking import checkout
from rlplug.types import CheckpointError, ConfigError, Progress

CONFIG, SUMMARY, LOCK = "config.yaml", "summary.json", "run.lock"


class _Repeating(yaml.SafeDumper):
    """Writes repeated lists in full instead of aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):
    """Rejects names that are not text, and aliases: a few lines of them can expand to more than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if odd := [name.value for name, _ in node.value if name.tag != "tag:yaml.org,2002:str"]:
            raise yaml.YAMLError(f"the name of a setting is not text: {odd[0]!r}")
        return super().construct_mapping(node, deep)


class Resumed(BaseModel):
    changed: dict[str, Any]


class RunManifest(Manifest):
    versions: dict[Word, Word]
    resumed: list[Resumed]


class Summary(BaseModel):
    status: Literal["finished"]
    env_steps: int
    updates: int
    stopped: str = ""
    score: float | None = Field(None, alias="eval/return_mean")


@contextmanager
def locked(folder: Path, key: str = "") -> Iterator[None]:
    """Create the folder of config key ``key``, and lock it against other processes until this one ends.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        file = os.fdopen(descriptor, "a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(key, f"{folder} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ConfigError("", f"{folder} is being written by {file.read() or 'another process'}") from None
        except OSError as error:
            raise ConfigError(key, f"{folder} cannot be locked: {error.strerror}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
        yield


def require_new(folder: Path) -> None:
    """Raise ``ConfigError`` if a folder already holds a run."""
    if (folder / MANIFEST).exists():
        raise ConfigError("hydra.run.dir", f"{folder} already contains a run; choose another folder, or resume it")


def create(folder: Path, config: RunConfig, plan: Plan, identity: str, command: Sequence[str]) -> None:
    """Write ``config.yaml``, then ``manifest.json``, which makes a run resumable. Raises as ``require_new``."""
    require_new(folder)
    gpu = torch.cuda.get_device_name() if plan.accelerator == "cuda" else None
    hardware = {"machine": platform.machine(), "cpus": os.cpu_count(), "accelerator": gpu, "plan": asdict(plan)}
    manifest = {"run": identity, "format": FORMAT, "command": list(command), "versions": versions()}
    manifest |= {"unit": config.loop.cls.unit, "plugins": origins(config), "git": checkout(), "hardware": hardware}
    manifest |= {"resumed": [], "script": described(config.raw)}
    write_config(folder, config.raw)
    write_json(folder / MANIFEST, manifest)


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    atomic.replace(folder / CONFIG, yaml.dump(raw, Dumper=_Repeating, sort_keys=False).encode())


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's configuration, migrated, and its manifest.

    Raises:
        ConfigError: the folder holds no run, one of the two files is damaged, or settings cannot be migrated.
    """
    if not os.path.exists(folder):  # os.path does not raise for long names
        raise CheckpointError(f"{folder} does not exist")
    if not (folder / MANIFEST).exists() or not (folder / CONFIG).exists():
        what = "contains no run"
        if (folder / "weights.pt").exists():
            what = "is a checkpoint; resume needs the run folder and continues its newest checkpoint"
        raise CheckpointError(f"{folder} {what}")
    manifest = read_manifest(folder, RunManifest)
    try:
        raw = yaml.load(atomic.read(folder / CONFIG), _Loader)
        if not isinstance(raw, dict):
            raise ValueError("it contains no settings")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise damaged(folder / CONFIG, reason) from None
    return migrate(raw), manifest


def finished(folder: Path) -> Summary | None:
    """Return the summary of a finished run; None for a run that has not finished."""
    with suppress(OSError, ValueError, RecursionError):
        return Summary.model_validate_json(atomic.read(folder / SUMMARY))
    return None


def note_resumed(
    folder: Path,
    config: RunConfig,
    manifest: dict[str, Any],
    progress: Progress,
    changed: Sequence[tuple[str, Any, Any]],
) -> None:
    """Add the steps and the ``changed`` settings of a resume to a run's ``manifest``; delete its summary."""
    resumed = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    resumed |= {"env_steps": progress.env_steps, "updates": progress.updates}
    resumed |= {"changed": {key: {"from": old, "to": new} for key, old, new in changed}}
    # in this order, so that a kill in between leaves all changes of config.yaml noted
    write_json(folder / MANIFEST, manifest | {"plugins": origins(config), "resumed": [*manifest["resumed"], resumed]})
    write_config(folder, config.raw)
    (folder / SUMMARY).unlink(missing_ok=True)


def origins(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return kind, name, distribution and version of every component, by its config key."""
    chosen = [config.algo, config.env, config.buffer, config.loop, config.hardware, *filter(None, [config.curriculum])]
    for several in (config.models, config.exploration, config.logger, config.estimator):
        chosen += several.values()
    owned = [(part, registry.owner(part.kind, part.name)) for one in chosen for part in nested(one)]
    return {
        part.key: {"kind": part.kind, "name": part.name, "distribution": by.distribution, "version": by.version}
        for part, by in owned
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    atomic.replace(path, (json.dumps(content, indent=2) + "\n").encode())
