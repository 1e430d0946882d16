"""Initial weights of a run, from other runs, by its setting ``init_from``."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlplug import agent, script
from rlplug.api import Algorithm
from rlplug.checkpointing.format import Checkpoint, checkpoints, find, folder_of
from rlplug.config import Core
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError

KEY = "init_from"
FORM = "should be a path, {path: ..., prefix: [...]} or {policies: {policy: run}}"


def load(algorithm: Algorithm, normalizer: Any, core: Core) -> None:
    """Load the weights of ``init_from`` into a new algorithm.

    The setting is a run folder, ``<run>@<step>``, a checkpoint, or a file of ``torch.save(algorithm.state_dict())``:
    then all weights are loaded, and the moments of observations. Or it is a mapping: ``path`` is one of these,
    ``prefix`` has the beginnings of the names to load, and ``policies`` maps policies to other runs, whose policies of
    the same names they begin with.

    Raises:
        ConfigError: there are no such weights, or they do not fit.
    """
    given = {"path": core.init_from} if isinstance(core.init_from, str) else core.init_from or {}
    path, prefixes, runs = (given.get(name) for name in ("path", "prefix", "policies"))
    prefixes = [prefixes] if isinstance(prefixes, str) else prefixes
    right = given.keys() <= {"path", "prefix", "policies"} and isinstance(path, str | None)
    right &= prefixes is None or bool(path and prefixes and _texts(prefixes))
    if not right or not (runs is None or (isinstance(runs, Mapping) and _texts(runs.values()))):
        raise ConfigError(KEY, f"{core.init_from!r} {FORM}")
    if path is not None:
        _load(algorithm, normalizer, path, prefixes)
    adopt(algorithm, core, runs or {}, f"{KEY}.policies")


def _load(algorithm: nn.Module, normalizer: Any, path: str, prefixes: list[str] | None) -> None:
    """Load all weights and moments, or the weights whose names have a prefix."""
    weights, moments = _weights(path)
    own = algorithm.state_dict()
    if prefixes is None:
        if differing := sorted(own.keys() ^ weights.keys()):
            where = "only this run" if differing[0] in own else f"only {path}"
            said = f"{where} has {differing[0]}, so the networks or the algorithms differ"
            raise ConfigError(KEY, f"{said}; use those of {path}, or init_from.prefix for a part of the weights")
        chosen = weights
    else:
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in weights.keys() & own.keys()):
                heads = {_head([name]) for name in weights.keys() & own.keys()}
                said = f"no weight of both runs begins with {prefix!r}; {unknown(prefix, heads)}"
                raise ConfigError(f"{KEY}.prefix", said)
        chosen = {name: x for name, x in weights.items() if name in own and name.startswith(tuple(prefixes))}
    for name, x in chosen.items():
        if isinstance(x, Tensor) and isinstance(own[name], Tensor) and x.shape != own[name].shape:
            shapes = f"{[*x.shape]} in {path}, and {[*own[name].shape]} in this run"
            raise ConfigError(KEY, f"{name} has the shape {shapes}; init_from.prefix takes a part of the weights")
    algorithm.load_state_dict(own | chosen)
    if prefixes is None and moments is not None:
        _load_moments(normalizer, moments)


def adopt(algorithm: Algorithm, core: Core, runs: Mapping[str, str], at: str) -> None:
    """Let policies of an algorithm play with those of other runs, by policy; an empty name is the only opponent.

    Raises:
        ConfigError: there is no such run or policy, its weights do not fit, or a run normalizes observations.
    """
    for policy, path in runs.items():
        key = f"{at}.{policy}".rstrip(".")
        try:
            other = agent.load(path)
            algorithm.adopt(policy, other.algorithm)
        except RuntimeError as error:
            raise ConfigError(key, f"{path} does not fit: {str(error).splitlines()[-1].strip()}") from None
        except ConfigError as error:
            raise error if error.key else ConfigError(key, error.message) from None
        if core.preprocess.normalize_obs or other.normalize.obs:
            raise ConfigError(key, "one of the runs normalizes observations, so their policies see different numbers")


def _texts(found: Any) -> bool:
    return isinstance(found, Iterable) and all(isinstance(x, str) for x in found)


def _weights(path: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the algorithm's state, and the normalizer's if there is one."""
    file = Path(path)
    if path.startswith(script.HERE):
        return _named(script.attribute(path, KEY), path), None
    if file.is_file():
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            own = isinstance(error, OSError) and error.strerror
            raise ConfigError(KEY, f"{path} cannot be read: {own or 'it is no file of torch.save'}") from None
        return _named(found, path), None
    run, at, step = path.rpartition("@")
    try:
        if at and not file.exists() and re.fullmatch(r"[\d_]+", step):
            place = folder_of(Path(run), int(step.replace("_", "")))
            if not place.exists():
                known = ", ".join(str(int(path.name.removeprefix("step_"))) for path in checkpoints(Path(run)))
                raise ConfigError(KEY, f"{run} has no checkpoint of step {step}; it has {known or 'none'}")
            checkpoint = Checkpoint(place)
        else:
            checkpoint = find(file, ("weights",))
        whole: dict[str, Any] = checkpoint.tree("weights")
    except ConfigError as error:
        raise ConfigError(KEY, error.message) from None
    return whole["algorithm"], whole["normalizer"]


def _named(found: Any, path: str) -> dict[str, Any]:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        said = f"{path} holds {type(found).__name__}, and no weights; torch.save(algorithm.state_dict(), file)"
        raise ConfigError(KEY, f"{said} writes them")
    return dict(found)


def _load_moments(normalizer: nn.Module, given: Mapping[str, Any]) -> None:
    """Load the moments of observations and rewards; the returns of open episodes are those of this run."""
    own = normalizer.state_dict()
    fits = {name for name in own.keys() & given.keys() if name != "returns" and given[name].shape == own[name].shape}
    normalizer.load_state_dict(own | {name: given[name] for name in fits})


def _head(names: Any) -> str:
    """Return the first two parts of a name: ``net.torso``."""
    return ".".join(next(iter(names), "").split(".")[:2])
