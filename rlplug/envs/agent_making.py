"""Make environments of several agents, with errors that suggest a fix."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlplug.envs.agent_apis import Dicts, Turns
from rlplug.envs.agent_wrappers import AgentMasks, JointAgents, ObservationFunction
from rlplug.script import attribute
from rlplug.types import ConfigError

EXTRA = "rlplug[pettingzoo]"
OWN_EXTRAS = ("atari", "butterfly", "classic", "sisl")
"""sub-packages of PettingZoo with dependencies of their own"""


@dataclass(frozen=True)
class AgentsMaker:
    """Makes an environment of agents, with its wrappers, in this or another process."""

    make: Callable[..., Any]
    kwargs: Mapping[str, Any]
    mask_key: str | None
    observation_fn: str | None
    joint: Mapping[str, list[str]]

    def __call__(self) -> Any:
        env = AgentMasks(self.make(**self.kwargs), self.mask_key)
        if self.observation_fn is not None:
            env = ObservationFunction(env, function(self.observation_fn, "env.observation_fn"))
        return JointAgents(env, self.joint) if self.joint else env


def make_petting(env_id: str, api: str, **kwargs: Any) -> Any:
    """Make a PettingZoo environment, with the interface of ``agent_apis``.

    Raises:
        ConfigError: it does not exist or cannot be made.
    """
    if ":" in env_id:
        found = function(env_id, "env.id")
    else:
        module = _module(env_id)
        names = {"auto": ("parallel_env", "env"), "parallel": ("parallel_env",), "aec": ("env",)}[api]
        found = next((getattr(module, name) for name in names if callable(getattr(module, name, None))), None)
        if found is None:
            said = f"{env_id} has no {' or '.join(names)}, which makes a PettingZoo environment"
            raise ConfigError("env.id" if api == "auto" else "env.api", f"{said}; give module:function")
    env = explained("env.id", env_id, found, kwargs)
    env = Turns(env) if hasattr(env, "agent_iter") or hasattr(env, "last") else env
    if not getattr(env, "possible_agents", None):
        raise ConfigError("env.id", f"{env_id} does not name all agents that may appear, its possible_agents")
    return env


def make_dicts(entry_point: str, turns: bool, **kwargs: Any) -> Any:
    """Make an environment that exchanges dicts by agent; see ``make_petting``."""
    return Dicts(explained("env.entry_point", entry_point, function(entry_point, "env.entry_point"), kwargs), turns)


def function(path: str, key: str) -> Any:
    """Return the callable named ``module:name``. Raises ``ConfigError`` if there is none."""
    if not callable(found := attribute(path, key)):
        raise ConfigError(key, f"{path} is {type(found).__name__}, which cannot be called")
    return found


def _module(env_id: str) -> Any:
    """Import the module of a PettingZoo environment; say what to install, or which one has a similar name."""
    try:
        return importlib.import_module(env_id)
    except Exception as error:
        package, _, name = env_id.rpartition(".")
        missing = getattr(error, "name", None) or ""
        root = env_id.partition(".")[0]
        if missing == root and root in ("pettingzoo", "mpe2"):
            said = f"{env_id} belongs to a package that is not installed: pip install {EXTRA!r}"
            raise ConfigError("env.id", said) from error
        if isinstance(error, ModuleNotFoundError) and not env_id.startswith(missing):
            own = next((f"pettingzoo[{extra}]" for extra in OWN_EXTRAS if f".{extra}." in env_id), missing)
            raise ConfigError(
                "env.id", f"{env_id} needs {missing}, which is not installed: pip install {own!r}"
            ) from error
        if isinstance(error, ModuleNotFoundError):
            raise ConfigError("env.id", f"there is no module {env_id!r}{_similar(package, name)}") from error
        raise ConfigError("env.id", f"{env_id} cannot be imported ({type(error).__name__}: {error})") from error


def _similar(package: str, name: str) -> str:
    try:
        paths = importlib.import_module(package).__path__
    except Exception:
        return "; write it as in mpe2.simple_spread_v3"
    known = [module.name for module in pkgutil.iter_modules(paths) if re.search(r"_v\d+$", module.name)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
    return f"; {package} has {', '.join(near)}" if near else ""


def explained(key: str, name: str, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``make(**kwargs)``, with errors in one line."""
    try:
        return make(**kwargs)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            if unknown[1] == "render_mode":
                raise ConfigError("eval.record", f"{name} takes no render_mode; use 0") from error
            known = ", ".join(inspect.signature(make).parameters)
            raise ConfigError("env.kwargs", f"{name} takes no {unknown[1]!r}; it takes {known or 'none'}") from error
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ConfigError(key, f"{name} cannot be made: {said}") from error
