"""Make environments by Gymnasium id, with errors that suggest a fix."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlplug.envs.env_list import EnvList
from rlplug.envs.fire import FireVector, fire_of
from rlplug.envs.native import NativeVector
from rlplug.envs.numbering import contains_number, numbered
from rlplug.envs.wrapping import Wrapping
from rlplug.script import attribute
from rlplug.types import ConfigError

E = TypeVar("E")

PACKAGES = {
    "ALE": ("ale_py", "rlplug[atari]"),
    "BabyAI": ("minigrid", "rlplug[minigrid]"),
    "MiniGrid": ("minigrid", "rlplug[minigrid]"),
    "dm_control": ("shimmy", "shimmy[dm-control]"),
    **dict.fromkeys(("Fetch", "Hand", "AntMaze", "PointMaze"), ("gymnasium_robotics", "rlplug[robotics]")),
}
"""Prefix of an id -> the module that registers it, and its pip name."""
VECTORS = {
    "Acrobot-v1": ("rlplug.envs.acrobot:AcrobotVector", 6),
    "CartPole-v1": ("rlplug.envs.cartpole:CartPoleVector", 1),
}
"""rlplug's own vectors, and the number of environments from which they are faster than a list."""
OWN = ("check_bounds", "env_ids", "seed_bits")
"""options of a vector, not of wrappers"""
OLD_ATARI = re.compile(r"([A-Z][A-Za-z]+?)(-ram|)(Deterministic|NoFrameskip|)-v([04])")
"""Gym's old ids of Atari games"""
STICKY, FRAMES = "repeat_action_probability", "max_num_frames_per_episode"
ATARI = {"noop_max": 30, "reward_clipping": False, "use_fire_reset": False, "episodic_life": False}
"""Options that make ALE's vector equal to ``gymnasium.wrappers.AtariPreprocessing``."""


def find(env_id: str) -> EnvSpec:
    """Return the spec registered as ``Name-v0``, ``namespace/Name-v0`` or ``module:Name-v0`` (imports the module).

    Raises:
        ConfigError: there is none; the message lists similar ids, or what to install.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, f"{env_id}: the module {module!r} cannot be imported")
    known, package = next((found for begin, found in PACKAGES.items() if name.startswith(begin)), ("", ""))
    if name not in gymnasium.registry and known:
        _import(known, f"{env_id} belongs to a package that cannot be imported: pip install {package!r}")
    if name not in gymnasium.registry and (older := OLD_ATARI.fullmatch(name)):
        _find_old_atari(name, older)
    if name in gymnasium.registry:
        spec = gymnasium.registry[name]
        return replace(spec, vector_entry_point=VECTORS[name][0]) if name in VECTORS else spec

    base = _base(name)
    versions = [registered for registered in gymnasium.registry if _base(registered) == base]
    if versions:
        raise ConfigError("env.id", f"there is no {name!r}; its versions are {', '.join(versions)}")
    lower = {_base(registered).lower(): registered for registered in gymnasium.registry}  # the newest version of each
    near = [lower[match] for match in difflib.get_close_matches(base.lower(), lower)]
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing registered has a similar name."
    raise ConfigError(
        "env.id",
        f"there is no environment {name!r}; {hint} An environment of another package is registered when that"
        f" is imported, as in env.id=package:{name}",
    )


def found(env_id: str | None, entry_point: str | None) -> EnvSpec:
    """Return the spec of a registered environment, or of one with an entry point.

    Raises:
        ConfigError: there is none, or not exactly one of the two is given.
    """
    if entry_point is None:
        if env_id is None:
            raise ConfigError("env.id", "must be given: env.id=<value>, or env.entry_point=module:Class")
        return find(env_id)
    if env_id is not None:
        raise ConfigError("env.entry_point", f"replaces env.id, which is {env_id}; use env=gymnasium, or leave one out")
    made = attribute(entry_point, "env.entry_point")
    if not callable(made):
        raise ConfigError("env.entry_point", f"{entry_point} is {type(made).__name__}, which cannot be called")
    return EnvSpec(entry_point, entry_point=entry_point)


def module_of(env_id: str | None) -> str:
    """Return the module that registers an id; empty if none is named."""
    return (env_id or "").rpartition(":")[0]


def _find_old_atari(name: str, older: re.Match[str]) -> None:
    """Import the package that registers Atari games, if an id may be one of Gym's old ones.

    Raises:
        ConfigError: it is one, and the package is not installed, or only has the game under another id.
    """
    game, ram, kind, version = older.groups()
    now, package = f"ALE/{game}-v5", PACKAGES["ALE"][1]
    with suppress(ImportError):
        importlib.import_module("ale_py")
    if name in gymnasium.registry or not (ram or kind or now in gymnasium.registry):
        return
    if now in gymnasium.registry:
        sticky = "" if version == "4" else " env.sticky_actions=0.25"
        way = f"env=atari env.id={now}{sticky}" if not ram else f"env=gymnasium env.id={now} +env.kwargs.obs_type=ram"
        raise ConfigError("env.id", f"there is no {name!r}, Gym's name of an Atari game; use {way}")
    found = [spec.removeprefix("ALE/").removesuffix("-v5") for spec in gymnasium.registry if spec.startswith("ALE/")]
    if not found:
        raise ConfigError("env.id", f"{name} belongs to a package that cannot be imported: pip install {package!r}")
    near = difflib.get_close_matches(game, found)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(found[:4])} and others"
    raise ConfigError("env.id", f"there is no Atari game {game!r}; {hint}")


@dataclass(frozen=True)
class Maker:
    """Makes a single environment, in this or another process.

    Args:
        spec: the result of ``find``.
        kwargs: arguments of the environment's constructor.
        wrapping: its wrappers.
        module: the module that registers it, if it must be imported.
    """

    spec: EnvSpec
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrapping: Wrapping = field(default_factory=Wrapping)
    module: str = ""

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """Make an environment.

        Raises:
            ConfigError: it cannot be made; the message has the reason, and what to install.
        """
        if self.module:
            importlib.import_module(self.module)
        kwargs = dict(self.kwargs)
        if self.wrapping.atari:
            _require_atari(self.spec)
            sticky = self.wrapping.sticky_actions
            kwargs = {"frameskip": 1, **({} if sticky is None else {STICKY: sticky}), **kwargs}
        if self.wrapping.pixels is not None and "rgb_array" in render_modes(self.spec):
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # headless rendering
            if not os.environ.get("DISPLAY"):
                os.environ.setdefault("MUJOCO_GL", "egl")
            kwargs.setdefault("render_mode", "rgb_array")
        # EnvList resets before it steps and checks the results: no need for Gymnasium's order and environment checkers.
        bare = replace(self.spec, order_enforce=False, disable_env_checker=True)
        # A requested limit counts steps of the wrapped environment, and replaces the registered one.
        limit = None if self.wrapping.max_episode_steps is None else -1

        def make() -> gymnasium.Env[Any, Any]:
            return self.wrapping(gymnasium.make(bare, max_episode_steps=limit, **kwargs))

        return _explain(self.spec.id, self.spec.entry_point, make)

    @property
    def offers(self) -> dict[str, Any]:
        """Return the options of an ``EnvList`` of these environments."""
        registered = self.spec.max_episode_steps
        if registered is None and self.wrapping.atari:
            registered = (self.spec.kwargs | dict(self.kwargs)).get(FRAMES)
        return {
            "max_episode_steps": self.wrapping.limit(registered),
            "frame_stack": self.wrapping.frame_stack,
            "mask_key": self.wrapping.mask_key,
            "info_keys": self.wrapping.info_keys,
        }


def make_list(
    spec: EnvSpec,
    num_envs: int,
    kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    **options: Any,
) -> EnvList:
    """Make ``num_envs`` environments in a Python loop.

    Args:
        spec: what ``find`` returned.
        kwargs: for the environment's constructor.
        max_episode_steps: None: as registered.
        options: further options of ``Wrapping`` and ``EnvList``.

    Raises:
        ConfigError: the environment cannot be made; the message has the reason, and what to install.
    """
    own = {key: options.pop(key) for key in OWN if key in options}
    make = Maker(spec, kwargs or {}, Wrapping(max_episode_steps=max_episode_steps, **options))
    return EnvList([numbered(make, i)() for i in range(num_envs)], **make.offers, **own)


def render_modes(spec: EnvSpec) -> list[str]:
    """Return an environment's declared render modes; empty if there are none, or it cannot be loaded."""
    with suppress(Exception):  # any error of its module: making the environment reports it
        return [*getattr(_creator(spec.entry_point), "metadata", {}).get("render_modes", ())]
    return []


def _creator(entry_point: Any) -> Any:
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def is_atari(spec: EnvSpec) -> bool:
    return "ale_py" in str(spec.entry_point)


def _require_atari(spec: EnvSpec) -> None:
    if not is_atari(spec):
        raise ConfigError("env.atari", f"{spec.id} is not an Atari environment; use false")


def why_not_native(spec: EnvSpec, wrapping: Wrapping, kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Return why the environment's own vector cannot be used, or None if it can."""
    if (kwargs or {}).get("render_mode") is not None:
        return "env.kwargs.render_mode applies to single environments, as a vector does not render"
    if contains_number(kwargs or {}):
        return "env.kwargs contain {env_id}, which applies to single environments"
    if spec.vector_entry_point is None or spec.additional_wrappers:
        return f"{spec.id} registers no vector environment"
    if type(wrapping) is not Wrapping:
        return "env.mission wraps single environments"
    if wrapping.info_keys:
        return "env.info_keys reads info of single environments"
    if wrapping.wrappers:
        return "env.wrappers wrap single environments"
    if wrapping.pixels is not None:
        return "env.pixels renders single environments"
    if is_atari(spec):
        return None if wrapping.atari else f"the vector of {spec.id} preprocesses images (env.atari=true)"
    single = {
        "frame_skip": wrapping.frame_skip > 1,
        "sticky_actions": wrapping.sticky_actions,
        "fire": wrapping.fire,
        "flatten": wrapping.flatten,
        "frame_stack": wrapping.frame_stack > 1,
    }
    if needed := [f"env.{key}" for key, asked in single.items() if asked]:
        return f"{' and '.join(needed)} wrap single environments"
    return None


def has_native(
    spec: EnvSpec,
    wrapping: Wrapping | None = None,
    num_envs: int = sys.maxsize,
    kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether the environment has its own vector that supports the options and is faster than a list."""
    _, least = VECTORS.get(spec.id, ("", 1))
    return num_envs >= least and why_not_native(spec, wrapping or Wrapping(), kwargs) is None


def make_native(
    spec: EnvSpec,
    num_envs: int,
    kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    independent: bool = False,
    **options: Any,
) -> NativeVector:
    """Make ``num_envs`` environments as the environment's own vector. Arguments and errors as for ``make_list``.

    Args:
        independent: give every column its own generator if the vector can, which it shows by ``independent = False``.
    """
    own = {key: options.pop(key) for key in OWN if key in options}
    wrapping = Wrapping(max_episode_steps=max_episode_steps, **options)
    if wrapping.atari:
        _require_atari(spec)
    if reason := why_not_native(spec, wrapping, kwargs):
        raise ConfigError("env.vectorization", f"{reason}; use auto or list")
    told = Maker(spec, kwargs or {}, wrapping).offers
    del told["info_keys"]
    if is_atari(spec):
        given = {"frameskip": wrapping.frame_skip, "stack_num": wrapping.frame_stack} | ATARI
        if wrapping.sticky_actions is not None:
            given[STICKY] = wrapping.sticky_actions
        if max_episode_steps is not None:
            given[FRAMES] = max_episode_steps * wrapping.frame_skip
    else:
        given = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}

    def make() -> Any:
        arguments: dict[str, Any] = given | dict(kwargs or {})
        return gymnasium.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **arguments)

    env = _explain(spec.id, spec.vector_entry_point, make)
    if independent and hasattr(env.unwrapped, "independent"):
        env.unwrapped.independent = True
    if wrapping.fire:
        env = FireVector(env, fire_of(gymnasium.make(spec)))
    return NativeVector(env, drop=wrapping.drop, select=wrapping.select, **told, **own)


def _base(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _import(module: str, message: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # from the module itself, or for an invalid name
        raise ConfigError("env.id", f"{message} ({error})") from error


def _explain(env_id: str, entry_point: Any, make: Callable[[], E]) -> E:
    """Call ``make()``, and convert its exceptions to errors that suggest a fix."""
    at = "env.entry_point" if env_id == entry_point else "env.id"
    try:
        return make()
    except ConfigError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        # Gymnasium names its own extras; rlplug's pin compatible versions.
        said = re.sub(r"[\"']?gymnasium\[(box2d|mujoco)\][\"']?", r"'rlplug[\1]'", str(error))
        if "ale_py" in str(entry_point):
            said = re.sub(r"[\"']?gymnasium\[\w+\][\"']?", "'rlplug[atari]'", said)
        raise ConfigError(at, f"{env_id} needs a package that is not installed: {said}") from error
    except (Exception, SystemExit) as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            known = ", ".join(
                name for name in inspect.signature(_creator(entry_point)).parameters if name != "num_envs"
            )
            key = "env.max_episode_steps" if unknown[1] == "max_episode_steps" else "env.kwargs"
            raise ConfigError(key, f"{env_id} takes no {unknown[1]!r}; it takes {known or 'none'}") from error
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        if "must inherit from the gymnasium.Env class" in said:
            said = "it is no gymnasium.Env; environments with several agents need env=multi or env=pettingzoo"
        raise ConfigError(at, f"{env_id} cannot be made: {said}") from error
