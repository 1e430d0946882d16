"""Environments of several agents from other packages: PettingZoo's, and Gymnasium-style dicts by agent."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rlplug.api import Context, VecEnv
from rlplug.envs.agent_apis import Dicts, Turns
from rlplug.envs.agent_list import AgentList
from rlplug.envs.agent_wrappers import AgentMasks, JointAgents, ObservationFunction
from rlplug.envs.subprocess import Subprocess
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

EXTRA = "rlplug[pettingzoo]"
OWN_EXTRAS = ("atari", "butterfly", "classic", "sisl")
"""sub-packages of PettingZoo with dependencies of their own"""


@settings
class Options:
    kwargs: dict[str, Any] = option("Arguments of the environment's constructor.")
    groups: dict[str, list[str]] = option(
        "By group, patterns of its agents' names, such as {hunters: [hunter_*]}; {}: agents with equal spaces form one."
    )
    joint: dict[str, list[str]] = option("By name of a joint agent, patterns of the agents that it consists of.")
    observation_fn: str | None = option(
        "module:function that changes the observations, a dict by agent, into another one; null: they stay."
    )
    mask_key: str | None = option(
        "Key of the action mask in a Dict observation or info; null: every action is allowed in every turn."
    )
    global_state: bool = option("Rows have the extra state, if the environment has a method of that name.")
    max_episode_steps: PositiveInt | None = option("Truncate episodes after this many steps; null: never.")
    check_bounds: bool = option("Report once if an observation is beyond the bounds that its space declares.")
    seed_bits: Literal[31, 32] = option("Bits of episode seeds; 31: for environments that take signed 32-bit integers.")
    timeout_s: PositiveFloat | None = option("Report a reset or step that takes longer, in seconds; null: never.")
    restart_failed: bool = option(
        "Replace an environment that raises or returns values outside its spaces, and start a new episode."
    )
    vectorization: Literal["list", "subprocess"] = option(
        "list: environments in a loop; subprocess: lists of environments in processes."
    )
    workers: PositiveInt | None = option("Number of processes for vectorization=subprocess; null: number of cores.")


@dataclass(frozen=True)
class Maker:
    """Makes an environment of agents, with its wrappers, in this or another process."""

    make: Callable[..., Any]
    kwargs: Mapping[str, Any]
    mask_key: str | None
    observation_fn: str | None
    joint: Mapping[str, list[str]]

    def __call__(self) -> Any:
        env = AgentMasks(self.make(**self.kwargs), self.mask_key)
        if self.observation_fn is not None:
            function = attribute(self.observation_fn, "env.observation_fn")
            env = ObservationFunction(env, function)
        return JointAgents(env, self.joint) if self.joint else env


def listed(cfg: Options, ctx: Context, make: Callable[..., Any]) -> VecEnv:
    """Return a vector of one environment for each of ``ctx.env_ids``.

    Args:
        make: makes an environment with the interface of ``agent_apis`` from keyword arguments; it is pickled.
    """
    kwargs = cfg.kwargs | ({"render_mode": "rgb_array"} if ctx.render else {})
    maker = Maker(make, kwargs, cfg.mask_key, cfg.observation_fn, cfg.joint)
    options: dict[str, Any] = {
        "max_episode_steps": cfg.max_episode_steps,
        "groups": cfg.groups,
        "global_state": cfg.global_state,
        "check_bounds": cfg.check_bounds,
        "seed_bits": cfg.seed_bits,
        "remake": maker if cfg.restart_failed else None,
        "env_ids": ctx.env_ids,
    }
    if ctx.render:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # headless rendering
    if cfg.vectorization == "subprocess" and not ctx.render:
        env: Any = Subprocess(maker, workers=cfg.workers, listed=AgentList, **options)
    else:
        env = AgentList([maker() for _ in ctx.env_ids], **options)
    if ctx.render and env.traits.render is None:
        env.close()
        raise ConfigError("eval.record", "the environment takes no render_mode=rgb_array; use 0")
    env.traits = replace(env.traits, timeout_s=cfg.timeout_s)
    return env


class PettingZoo(VecEnv):
    """Makes a vector of PettingZoo environments, of the parallel or the AEC interface.

    Raises:
        ConfigError: the environment does not exist or cannot be made, or an option does not fit it.
    """

    @settings
    class Config(Options):
        id: str = option("Module of the environment, such as mpe2.simple_spread_v3, or module:function that makes it.")
        api: Literal["auto", "parallel", "aec"] = option("auto: parallel if the environment has it.")

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:  # type: ignore[misc]
        return listed(cfg, ctx, partial(_petting, cfg.id, cfg.api))


class Multi(VecEnv):
    """Makes a vector of environments that exchange dicts by agent, with ``__all__``, as RLlib's ``MultiAgentEnv``.

    Raises:
        ConfigError: the environment does not exist or cannot be made, or an option does not fit it.
    """

    @settings
    class Config(Options):
        entry_point: str = option("module:class of the environment, or module:function that makes it.")
        turns: bool = option("Agents without an observation wait: they stay alive, and only one action is allowed.")

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:  # type: ignore[misc]
        return listed(cfg, ctx, partial(_dicts, cfg.entry_point, cfg.turns))


def _petting(env_id: str, api: str, **kwargs: Any) -> Any:
    if ":" in env_id:
        found = attribute(env_id, "env.id")
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


def _dicts(entry_point: str, turns: bool, **kwargs: Any) -> Any:
    return Dicts(explained("env.entry_point", entry_point, attribute(entry_point, "env.entry_point"), kwargs), turns)


def attribute(path: str, key: str) -> Any:
    """Return the object named ``module:name``.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(key, f"is {path!r}; write module:name")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # from the module itself, or for an invalid name
        raise ConfigError(key, f"{path}: the module {module!r} cannot be imported ({error})") from error
    for part in name.split("."):
        if (found := getattr(found, part, None)) is None:
            raise ConfigError(key, f"the module {module!r} has no {name!r}")
    if not callable(found):
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
