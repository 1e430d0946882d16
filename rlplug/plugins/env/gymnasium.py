"""Any environment that is registered with Gymnasium."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlplug.api import Context, VecEnv
from rlplug.envs.env_list import EnvList
from rlplug.envs.making import Maker, found, has_native, make_native, module_of, render_modes
from rlplug.envs.numbering import contains_number, numbered
from rlplug.envs.simulation import copied
from rlplug.envs.subprocess import Subprocess, check_workers
from rlplug.envs.wrapping import Wrapping
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

MASK_KEY = "action_mask"
"""default key of action masks"""


@settings
class Config:
    id: str | None = option("Registered id, or module:id to import the module that registers it; null: entry_point.")
    entry_point: str | None = option(
        "module:Class of an environment that is not registered, or module:function; null: id."
    )
    kwargs: dict[str, Any] = option(
        "Arguments of the environment's constructor; {env_id} in a text is the environment's number."
    )
    backend: Literal["gymnasium", "envpool"] = option("Package that the environment comes from.")
    vectorization: Literal["auto", "native", "list", "subprocess"] = option(
        "native: the environment's own vector; list: environments in a loop, each episode with its own"
        " seed; subprocess: lists of environments in processes; auto: native if it supports the options and"
        " is faster, else list."
    )
    workers: PositiveInt | None = option("Number of processes for vectorization=subprocess; null: number of cores.")
    max_episode_steps: PositiveInt | None = option("Truncate episodes after this many steps; null: as registered.")
    mask_key: str | None = option("Key of the action mask in info or in a Dict observation; null: no mask.")
    info_keys: list[str] = option(
        "Keys of info to store with every row, for algorithms that name them in Needs.keys: numbers or"
        " arrays that every reset and step returns. With is_success, evaluations report the success rate."
    )
    check_bounds: bool = option("Report once if an observation is beyond the bounds that its space declares.")
    seed_bits: Literal[31, 32] = option("Bits of episode seeds; 31: for environments that take signed 32-bit integers.")
    timeout_s: PositiveFloat | None = option("Report a reset or step that takes longer, in seconds; null: never.")
    simulator: Literal["copy"] | None = option(
        "copy: offer a simulator that copies the environment for planning, which is slow; null: none."
    )
    restart_failed: bool = option(
        "Replace an environment that raises or returns values outside its spaces, and start a new episode."
    )
    atari: bool = option("Standard Atari preprocessing (Machado et al. 2018): 84x84 grayscale.")
    frame_skip: PositiveInt = option("Repeat every action this many times and sum the rewards.")
    sticky_actions: Annotated[float, Field(ge=0.0, lt=1.0)] | None = option(
        "Probability of repeating the previous action, at every frame with atari; null: as registered."
    )
    fire: bool = option("Take FIRE instead of the first action of every life, in Atari games that wait for it.")
    wrappers: list[str | dict[str, Any]] = option(
        "Wrappers of your own, the innermost first: module:Wrapper, or {entry_point: module:Wrapper, kwargs: {...}}."
    )
    pixels: PositiveInt | None = option(
        "Height and width of rendered images, which replace the observation; null: the environment's observation."
    )
    drop: list[str] = option("Keys to remove from a Dict observation.")
    flatten: bool = option("Flatten any observation to one vector, Discrete parts one-hot.")
    select: list[NonNegativeInt] | None = option("Elements of a vector observation to keep; null: all.")
    frame_stack: PositiveInt = option(
        "Stack this many images, oldest first, on the first axis; black before the first one."
    )


class Gymnasium(VecEnv):
    """Makes a vector of one environment for each of ``ctx.env_ids``.

    Raises:
        ConfigError: the environment does not exist, cannot be made, or does not support an option.
    """

    Config = Config
    wrapping: ClassVar[type[Wrapping]] = Wrapping

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:  # type: ignore[misc]
        check_workers(cfg)
        env: Any = cls._made(cfg, ctx)
        env.traits = replace(env.traits, timeout_s=cfg.timeout_s)
        try:
            _check_masks(cfg, "action_mask" in env.spec.extras)
        except ConfigError:
            env.close()
            raise
        return env

    @classmethod
    def _made(cls, cfg: Config, ctx: Context) -> VecEnv:
        options = {f.name: getattr(cfg, f.name) for f in fields(Wrapping)}
        own: dict[str, Any] = {"env_ids": ctx.env_ids, "check_bounds": cfg.check_bounds, "seed_bits": cfg.seed_bits}
        wrapping = cls.wrapping(**{f.name: getattr(cfg, f.name) for f in fields(cls.wrapping)})
        if ctx.render:
            return _shown(cfg, wrapping, own)
        if cfg.backend == "envpool":
            if type(wrapping) is not Wrapping:
                raise ConfigError("env.backend", "is envpool, which does not provide missions; use gymnasium")
            return _from_envpool(cfg, options | own)
        spec = found(cfg.id, cfg.entry_point)
        make = Maker(spec, cfg.kwargs, wrapping, module_of(cfg.id))
        if cfg.restart_failed:
            if cfg.vectorization == "native":
                raise ConfigError("env.restart_failed", "replaces single environments; use env.vectorization=list")
            own["remake"] = make
        if cfg.simulator == "copy":
            if cfg.vectorization not in ("auto", "list") or cfg.restart_failed:
                said = "is copy, which needs env.vectorization=list and env.restart_failed=false"
                raise ConfigError("env.simulator", said)
            if contains_number(cfg.kwargs):
                raise ConfigError("env.simulator", "is copy, but env.kwargs differ from one environment to another")
            return copied(make, len(ctx.env_ids), **own, **make.offers)
        if cfg.vectorization == "subprocess":
            return Subprocess(make, workers=cfg.workers, **own, **make.offers)
        fits = cfg.vectorization == "auto" and has_native(spec, wrapping, ctx.num_envs, cfg.kwargs)
        native = cfg.vectorization == "native" or fits
        if native and not cfg.restart_failed:
            return make_native(spec, len(ctx.env_ids), cfg.kwargs, independent=ctx.role == "job", **options, **own)
        return EnvList([numbered(make, i)() for i in ctx.env_ids], **make.offers, **own)


def _check_masks(cfg: Config, there: bool) -> None:
    if not there and cfg.mask_key not in (None, MASK_KEY):
        raise ConfigError(
            "env.mask_key",
            f"neither the observation nor info of {cfg.id or cfg.entry_point} has {cfg.mask_key!r};"
            " use null to run without masks",
        )
    repeats = {"frame_skip": cfg.frame_skip > 1, "sticky_actions": bool(cfg.sticky_actions)}
    for key in [key for key, asked in repeats.items() if asked and there]:
        raise ConfigError(
            f"env.{key}",
            f"repeats actions that the masks of {cfg.id or cfg.entry_point} may forbid by then; set env.mask_key=null",
        )


def _shown(cfg: Config, wrapping: Wrapping, own: dict[str, Any]) -> VecEnv:
    """Make single environments, which can render."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # headless rendering
    if (modes := render_modes(spec := found(cfg.id, cfg.entry_point))) and "rgb_array" not in modes:
        said = (
            f"{cfg.id or cfg.entry_point} shows no pictures of itself: it renders {', '.join(modes)}, and no rgb_array"
        )
        raise ConfigError("eval.record", f"{said}; use 0")
    try:
        make = Maker(spec, {**cfg.kwargs, "render_mode": "rgb_array"}, wrapping, module_of(cfg.id))
        if cfg.simulator:
            return copied(make, len(own["env_ids"]), **make.offers, **own)
        return EnvList([numbered(make, i)() for i in own["env_ids"]], **make.offers, **own)
    except ConfigError as error:
        raise ConfigError("eval.record", f"{cfg.id or cfg.entry_point} cannot render; use 0 ({error})") from error


def _from_envpool(cfg: Config, options: dict[str, Any]) -> VecEnv:
    if cfg.simulator:
        raise ConfigError("env.simulator", "copies single environments, but env.backend=envpool has none; use null")
    for key in ("info_keys", "wrappers", "pixels"):
        if options.pop(key):
            raise ConfigError(f"env.{key}", "applies to single environments, but env.backend=envpool has none")
    if cfg.kwargs.get("render_mode") is not None:
        raise ConfigError("env.kwargs.render_mode", "applies to single environments; a vector does not render")
    if contains_number(cfg.kwargs):
        raise ConfigError("env.kwargs", "contain {env_id}, which applies to single environments, not to a vector")
    from rlplug.envs.envpool import make_envpool  # imported here: the package is optional

    if cfg.id is None:
        raise ConfigError("env.id", "must name an environment of EnvPool")
    if cfg.vectorization not in ("auto", "native"):
        raise ConfigError(
            "env.vectorization",
            f"is {cfg.vectorization}, but envpool is a native vector environment; use auto or native",
        )
    if cfg.restart_failed:
        raise ConfigError("env.restart_failed", "replaces single environments, but env.backend=envpool has none")
    if options.pop("flatten"):
        raise ConfigError("env.flatten", "wraps single environments, but env.backend=envpool has none")
    return make_envpool(id=cfg.id, num_envs=len(options["env_ids"]), kwargs=cfg.kwargs, **options)
