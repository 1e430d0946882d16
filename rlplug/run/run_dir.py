"""The run folder: what is known when a run starts and ends. Every file appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from rlplug import registry
from rlplug.checkpointing import format as checkpoint
from rlplug.config import Chosen, RunConfig, nested
from rlplug.plan import Plan
from rlplug.registry.installed import versions
from rlplug.types import CheckpointError, ConfigError

MANIFEST, SUMMARY, LOCK = "manifest.json", "summary.json", "run.lock"
ORIGIN = ("name", "distribution", "version")


@contextmanager
def locked(folder: Path, key: str = "") -> Iterator[None]:
    """Make the folder and be the only process that writes into it. The lock ends with the process, however that ends.

    Args:
        key: of the configuration, that says the folder.

    Raises:
        ConfigError: another process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(key, f"{folder} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(key, f"{folder} cannot be locked: {error.strerror}") from None
            file.seek(0)
            raise ConfigError("", f"{folder} is being written by {file.read() or 'another process'}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
        yield


def require_new(folder: Path) -> None:
    """Raises:
    ConfigError: the folder holds a run already.
    """
    if (folder / MANIFEST).exists():
        raise ConfigError("hydra.run.dir", f"{folder} holds a run already; choose another folder, or resume it")


def create(folder: Path, config: RunConfig, plan: Plan, identity: str, command: Sequence[str]) -> None:
    """Write ``config.yaml`` and ``manifest.json``; in this order, so that what has a manifest can be resumed.

    Raises:
        ConfigError: the folder holds a run already.
    """
    require_new(folder)
    write_config(folder, config.raw)
    write_json(
        folder / MANIFEST,
        {
            "run": identity,
            "format": checkpoint.FORMAT,
            "command": list(command),
            "versions": versions(),
            "plugins": origins(config),
            "git": _git(),
            "hardware": {
                "machine": platform.machine(),
                "cpus": os.cpu_count(),
                "accelerator": torch.cuda.get_device_name() if plan.accelerator == "cuda" else None,
                "plan": asdict(plan),
            },
            "resumed": [],
        },
    )


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    write_text(folder / "config.yaml", yaml.safe_dump(raw, sort_keys=False))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and manifest of a run, as today's format has them.

    Raises:
        CheckpointError: the folder holds no run, or one of the two cannot be read.
    """
    if not (folder / MANIFEST).exists() or not (folder / "config.yaml").exists():
        what = "holds no run" if folder.exists() else "does not exist"
        if (folder / "weights.pt").exists():
            what = "is a checkpoint; resume takes the run folder, and continues its newest one"
        raise CheckpointError(f"{folder} {what}")
    try:
        raw = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not _is_sound(raw, manifest):
            raise ValueError("something else was expected in them")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{folder}: config.yaml and manifest.json cannot be read: {reason}") from None
    if manifest["format"] > checkpoint.FORMAT:
        raise CheckpointError(f"{folder} was written by a newer rlplug, in format {manifest['format']}: upgrade rlplug")
    return checkpoint.migrated("config", raw, manifest["format"]), manifest


def _is_sound(raw: Any, manifest: Any) -> bool:
    origins = list(manifest["plugins"].values()) if isinstance(manifest["plugins"], dict) else [None]
    return (
        isinstance(raw, dict)
        and isinstance(manifest["run"], str)
        and type(manifest["format"]) is int
        and manifest["format"] > 0
        and isinstance(manifest["resumed"], list)
        and all(
            isinstance(origin, dict) and all(isinstance(origin.get(key), str) for key in ORIGIN) for origin in origins
        )
    )


def finished(folder: Path) -> str | None:
    """What a finished run came to, in words; None for one that has not finished."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if summary["status"] != "finished":
            return None
        return f"{summary['env_steps']:,} steps, evaluation {summary['eval/return_mean']:,.1f}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def note_resumed(
    folder: Path,
    config: RunConfig,
    manifest: dict[str, Any],
    env_steps: int,
    changed: Sequence[tuple[str, Any, Any]],
) -> None:
    """Write down that the run goes on, with what was changed; it has no summary until it ends again."""
    manifest["resumed"].append(
        {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "env_steps": env_steps,
            "versions": versions(),
            "changed": {key: {"from": old, "to": new} for key, old, new in changed},
        }
    )
    write_config(folder, config.raw)
    now = {"format": checkpoint.FORMAT, "plugins": origins(config)}
    write_json(folder / MANIFEST, manifest | now)
    (folder / SUMMARY).unlink(missing_ok=True)


def other_versions(manifest: Mapping[str, Any]) -> list[str]:
    """A line for every library that is not as it was when the run began."""
    then = manifest.get("versions")
    return [
        f"{name} was {then[name]} then, and is {now} now"
        for name, now in versions().items()
        if name != "rlplug" and isinstance(then, dict) and then.get(name, now) != now
    ]


def origins(config: RunConfig) -> dict[str, dict[str, str]]:
    """Kind, name, distribution and version of every component, by its key in the configuration."""
    return {part.key: _origin(part) for chosen in _selected(config) for part in nested(chosen)}


def _selected(config: RunConfig) -> Iterator[Chosen]:
    yield from (config.algo, config.env, config.buffer, config.loop, config.hardware)
    for several in (config.models, config.exploration, config.logger):
        yield from several.values()


def _origin(chosen: Chosen) -> dict[str, str]:
    plugin = registry.owner(chosen.kind, chosen.name)
    return {
        "kind": chosen.kind,
        "name": chosen.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole, or not at all."""
    checkpoint.replace(path, text.encode())


def _git() -> dict[str, Any] | None:
    """Commit of the checkout that the run was started from, and whether it had changes; None outside of one."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
