"""Environments of several agents from other packages: PettingZoo's, and Gymnasium-style dicts by agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rlplug.api import Context, VecEnv
from rlplug.envs.agent_list import AgentList
from rlplug.envs.agent_making import AgentsMaker, make_dicts, make_petting
from rlplug.envs.numbering import numbered
from rlplug.envs.subprocess import Subprocess, check_workers
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError


@settings
class Options:
    kwargs: dict[str, Any] = option(
        "Arguments of the environment's constructor; {env_id} in a text is the environment's number."
    )
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


def listed(cfg: Options, ctx: Context, make: Callable[..., Any]) -> VecEnv:
    """Return a vector of one environment for each of ``ctx.env_ids``.

    Args:
        make: makes an environment with the interface of ``agent_apis`` from keyword arguments; it is pickled.
    """
    check_workers(cfg)
    kwargs = cfg.kwargs | ({"render_mode": "rgb_array"} if ctx.render else {})
    maker = AgentsMaker(make, kwargs, cfg.mask_key, cfg.observation_fn, cfg.joint)
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
        env = AgentList([numbered(maker, i)() for i in ctx.env_ids], **options)
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
        return listed(cfg, ctx, partial(make_petting, cfg.id, cfg.api))


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
        return listed(cfg, ctx, partial(make_dicts, cfg.entry_point, cfg.turns))
