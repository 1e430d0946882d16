"""Reuse of Hydra's compositions, which the tests make by the thousand; a process that trains makes one."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from rlplug.config import composition, explain, origins
from rlplug.registry.discovery import until_refresh
from rlplug.registry.presets import presets

VALUE = re.compile(
    r"[+~]*(?!hydra\b|logger\.only=)((\w+(\.\w+)+|(num|replay|rollout|total|train)_\w+|seed)(=|$)|\w+=\{)"
)
"""overrides that set a value: no group but logger.only has a name with a dot, or is called as a setting of the run"""
composed = origins.loaded
read = FileConfigSource.load_config


def reused(overrides: Sequence[str]) -> DictConfig:
    """Compose as ``origins.loaded`` does: Hydra's composition of the choices is reused until their files change."""
    values = [word for word in overrides if VALUE.match(word)]
    with suppress(Exception):  # Hydra's own error is that of the whole
        parsed = OverridesParser.create().parse_overrides(origins.opened(values))
        if not origins.folders_of(overrides) and not any(one.is_sweep_override() for one in parsed):
            changed = tuple(file.path.stat().st_mtime_ns for files in presets().values() for file in files)
            config = pickle.loads(_chosen(tuple(word for word in overrides if word not in values), changed))
            ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
            config.hydra.overrides.task = [word for word in overrides if not word.startswith(("hydra.", "hydra/"))]
            return config
    return composed(overrides)


def reuse() -> None:
    """Let this process reuse compositions, and the contents of YAML files."""
    for module in (composition, explain, origins):
        module.loaded = reused
    FileConfigSource.load_config = reread


def reread(source: FileConfigSource, config_path: str) -> ConfigResult:
    file = Path(source.path, source._normalize_file_name(config_path))
    if not file.is_file():
        return read(source, config_path)
    status = file.stat()
    return pickle.loads(
        _content(type(source), source.provider, source.path, config_path, status.st_mtime_ns, status.st_size)
    )


@cache
def _content(kind: type[FileConfigSource], provider: str, path: str, config_path: str, *changed: int) -> bytes:
    return pickle.dumps(read(kind(provider, path), config_path))


@until_refresh
def _chosen(words: tuple[str, ...], changed: tuple[int, ...]) -> bytes:
    """Return a pickled composition of choices; ``changed`` are the times at which files of packages changed."""
    return pickle.dumps(composed(words))
