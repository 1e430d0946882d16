"""The run folder: what is known when a run starts and ends. Every file is written completely or not at all."""

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
from rlplug.checkpointing import atomic
from rlplug.checkpointing.format import FORMAT, require_format
from rlplug.config import Chosen, RunConfig, migrate, nested
from rlplug.plan import Plan
from rlplug.registry.installed import versions
from rlplug.types import CheckpointError, ConfigError

CONFIG, MANIFEST, SUMMARY, LOCK = "config.yaml", "manifest.json", "summary.json", "run.lock"
ORIGIN = ("kind", "name", "distribution", "version")


@contextmanager
def locked(folder: Path, key: str = "") -> Iterator[None]:
    """Make the folder and let no other process write into it. The lock ends with the process, however that ends.

    Args:
        key: the config key that chose the folder, for error messages.

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
    """Refuse a folder that holds a run already.

    Raises:
        ConfigError: it does.
    """
    if (folder / MANIFEST).exists():
        raise ConfigError("hydra.run.dir", f"{folder} holds a run already; choose another folder, or resume it")


def create(folder: Path, config: RunConfig, plan: Plan, identity: str, command: Sequence[str]) -> None:
    """Write ``config.yaml`` and then ``manifest.json``, so that every folder with a manifest can be resumed.

    Args:
        identity: of the run, repeated in its checkpoints.
        command: the command line that started it.

    Raises:
        ConfigError: the folder holds a run already.
    """
    require_new(folder)
    write_config(folder, config.raw)
    write_json(
        folder / MANIFEST,
        {
            "run": identity,
            "format": FORMAT,
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
    """Write ``config.yaml``."""
    write_text(folder / CONFIG, yaml.safe_dump(raw, sort_keys=False))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's configuration, migrated, and its manifest.

    Raises:
        CheckpointError: the folder holds no run, or one of the two files cannot be read or is of another format.
        ConfigError: a component cannot migrate its settings.
    """
    if not (folder / MANIFEST).exists() or not (folder / CONFIG).exists():
        what = "holds no run" if folder.exists() else "does not exist"
        if (folder / "weights.pt").exists():
            what = "is a checkpoint; resume takes the run folder, and continues its newest one"
        raise CheckpointError(f"{folder} {what}")
    try:
        raw = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        require_format(folder, manifest["format"])
        if not _is_sound(raw, manifest):
            raise ValueError("they lack something, or have a value of the wrong type")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{folder}: config.yaml and manifest.json cannot be read: {reason}") from None
    return migrate(raw), manifest


def _is_sound(raw: Any, manifest: Any) -> bool:
    return (
        isinstance(raw, dict)
        and isinstance(manifest["run"], str)
        and isinstance(manifest["resumed"], list)
        and isinstance(manifest["plugins"], dict)
        and all(isinstance(origin[key], str) for origin in manifest["plugins"].values() for key in ORIGIN)
    )


def finished(folder: Path) -> str | None:
    """Return steps and evaluation of a finished run, in words; None for a run that has not finished."""
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
    """Write down that the run continues, and delete its summary.

    Args:
        manifest: of the run, as ``read`` returns it.
        env_steps: environment steps that it continues from.
        changed: (key, old value, new value) of what the command line changed.
    """
    manifest["resumed"].append(
        {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "env_steps": env_steps,
            "versions": versions(),
            "changed": {key: {"from": old, "to": new} for key, old, new in changed},
        }
    )
    write_config(folder, config.raw)
    write_json(folder / MANIFEST, manifest | {"plugins": origins(config)})
    (folder / SUMMARY).unlink(missing_ok=True)


def other_versions(manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each library whose version has changed since the run began."""
    then = manifest.get("versions")
    return [
        f"{name} was {then[name]} then, and is {now} now"
        for name, now in versions().items()
        if name != "rlplug" and isinstance(then, dict) and then.get(name, now) != now
    ]


def origins(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return kind, name, distribution and version of every component, by its config key."""
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
    """Write a JSON file, completely or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all.

    Raises:
        OSError: the disk refused; the old file is unchanged.
    """
    atomic.replace(path, text.encode())


def _git() -> dict[str, Any] | None:
    """Return the commit of the working directory's checkout, and whether it has changes; None outside of one."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
