"""Wrappers of environments of agents, which have the interface of ``agent_apis``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from rlplug.envs.checking import MisfitError, began
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.extras import space_of
from rlplug.envs.wrapping import view
from rlplug.types import ConfigError

Observations = dict[str, Any]


class AgentsWrapper:
    """Passes everything on. A subclass changes ``seen``, which has the observations and infos of a row."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Observations, Mapping[str, Any]]:
        obs, infos = began(self.env.reset(seed=seed))
        return self.seen(obs, infos)

    def step(self, actions: Mapping[str, Any]) -> Any:
        obs, *results, infos = self.env.step(actions)
        obs, infos = self.seen(obs, infos)
        return obs, *results, infos

    def seen(self, obs: Observations, infos: Mapping[str, Any]) -> tuple[Observations, Mapping[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__}.seen")


class AgentMasks(AgentsWrapper):
    """Reduces infos to ``action_mask``, where an agent has a mask, and ``metrics``, which do not change.

    A Dict observation loses the mask; if only ``observation`` is left, this becomes the observation. While an agent
    waits for its turn, its mask allows the first action only.

    Args:
        key: key of the masks in a Dict observation or in infos; None: every action is allowed in every turn.
    """

    def __init__(self, env: Any, key: str | None) -> None:
        super().__init__(env)
        self._key, self._views, self._spaces = key, dict[str, Any](), dict[str, Space[Any]]()
        self.masked = {*env.possible_agents} if hasattr(env, "turn") else set[str]()
        for agent in env.possible_agents or ():
            space = env.observation_space(agent)
            if isinstance(space, Dict) and (key or "action_mask") in space.spaces:
                self.masked |= {agent} if key else set()
                space, self._views[agent] = view(space, [key or "action_mask"], None)
                if [*space.spaces] == ["observation"]:  # type: ignore[attr-defined]
                    space, self._views[agent] = space["observation"], _observation  # type: ignore[index]
            self._spaces[agent] = space
        if hasattr(env, "turn"):
            self._waits = {agent: _first_only(agent, env.action_space(agent)) for agent in env.possible_agents}

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent]

    def seen(self, obs: Observations, infos: Mapping[str, Any]) -> tuple[Observations, Mapping[str, Any]]:
        turn, masks = getattr(self.env, "turn", None), dict[str, Any]()
        for agent, own in obs.items():
            if turn is not None and agent in self.env.agents and agent not in turn:
                masks[agent] = {"action_mask": self._waits[agent]}
            elif self._key is None:
                masks[agent] = {} if turn is None else {"action_mask": np.ones_like(self._waits[agent])}
            else:
                part = own if isinstance(own, Mapping) and self._key in own else infos.get(agent) or {}
                masks[agent] = {"action_mask": part[self._key]} if self._key in part else {}
        for agent, info in infos.items():
            if info and METRICS in info:
                masks[agent] = masks.get(agent, {}) | {METRICS: info[METRICS]}
        return {agent: self._views.get(agent, _same)(own) for agent, own in obs.items()}, masks


def _observation(obs: Any) -> Any:
    if not isinstance(obs, Mapping) or "observation" not in obs:
        raise MisfitError("an observation lacks 'observation', which its space has")
    return obs["observation"]


def _same(obs: Any) -> Any:
    return obs


def _first_only(agent: str, space: Space[Any]) -> np.ndarray:
    """Return the mask of an agent that waits: it allows the first action, of a MultiDiscrete the first of each."""
    if not isinstance(space, Discrete | MultiDiscrete):
        said = f"{agent} waits for its turn, which needs masks, but its actions are {space}"
        raise ConfigError("env", f"{said}; use an environment in which all agents act at once")
    sizes = [int(space.n)] if isinstance(space, Discrete) else [int(n) for n in space.nvec.ravel()]
    return np.concatenate([np.arange(size) == 0 for size in sizes])


class ObservationFunction(AgentsWrapper):
    """Replaces the observations, a dict by agent, by those that ``function(observations)`` returns.

    Their spaces are unbounded, with the shapes and types of the function's result for sampled observations.

    Raises:
        ConfigError: the function does not return a number, an array or a dict of them for every agent.
    """

    def __init__(self, env: Any, function: Callable[[Observations], Observations]) -> None:
        super().__init__(env)
        self._function = function
        found: Any = function({agent: env.observation_space(agent).sample() for agent in env.possible_agents})
        self._spaces: dict[str, Space[Any]] = {}
        for agent in env.possible_agents:
            space = _space_of(found[agent]) if isinstance(found, Mapping) and agent in found else None
            if space is None:
                said = f"returns no array for the agent {agent}"
                raise ConfigError("env.observation_fn", f"{said}; return a dict of arrays by agent")
            self._spaces[agent] = space

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent]

    def seen(self, obs: Observations, infos: Mapping[str, Any]) -> tuple[Observations, Mapping[str, Any]]:
        found = self._function(obs)
        if missing := [agent for agent in obs if agent not in found]:
            raise MisfitError(f"env.observation_fn returns no observation of {', '.join(missing)}")
        return {agent: found[agent] for agent in obs}, infos


def _space_of(value: Any) -> Space[Any] | None:
    if not isinstance(value, Mapping):
        return space_of(value)
    spaces = {str(key): _space_of(part) for key, part in value.items()}
    return None if None in spaces.values() else Dict(spaces)  # type: ignore[arg-type]


class JointAgents(AgentsWrapper):
    """Makes one agent of several: its observation is a Dict of theirs, its reward the sum, its action all of theirs.

    The members have Discrete actions, which become a MultiDiscrete, or Box actions, which are concatenated. The joint
    agent has ended when its first member has.

    Args:
        joint: by name of a joint agent, patterns of its members' names.

    Raises:
        ConfigError: the members' actions cannot be joined, they have masks or take turns, or a pattern has no match.
    """

    def __init__(self, env: Any, joint: Mapping[str, Sequence[str]]) -> None:
        super().__init__(env)
        self._members = {
            name: [a for a in env.possible_agents if any(fnmatchcase(a, pattern) for pattern in patterns)]
            for name, patterns in joint.items()
        }
        self._joint_of = {agent: name for name, members in self._members.items() for agent in members}
        if hasattr(env, "turn") or getattr(env, "masked", None):
            raise ConfigError("env.joint", "joins agents that act at once and have no masks, but these have masks")
        for name, members in self._members.items():
            if shared := [agent for agent in members if self._joint_of[agent] != name]:
                said = f"has {shared[0]}, which is in the joint agent {self._joint_of[shared[0]]} too"
                raise ConfigError(f"env.joint.{name}", said)
            if name in env.possible_agents and name not in members:
                raise ConfigError(f"env.joint.{name}", "is the name of an agent that is no member; rename it")
            kinds = {type(env.action_space(agent)) for agent in members}
            if len(members) < 2 or kinds not in ({Discrete}, {Box}):
                said = f"joins two or more agents with Discrete or with Box actions, but these are {members or 'none'}"
                raise ConfigError(f"env.joint.{name}", f"{said}, of {', '.join(env.possible_agents)}")
        alone = [agent for agent in env.possible_agents if agent not in self._joint_of]
        self.possible_agents = [*self._members, *alone]
        self.agents: list[Any] = []

    def observation_space(self, agent: str) -> Space[Any]:
        members = self._members.get(agent)
        if members is None:
            return self.env.observation_space(agent)
        return Dict({member: self.env.observation_space(member) for member in members})

    def action_space(self, agent: str) -> Space[Any]:
        spaces = [self.env.action_space(member) for member in self._members.get(agent, [agent])]
        if agent not in self._members:
            return spaces[0]
        if isinstance(spaces[0], Discrete):
            return MultiDiscrete([space.n for space in spaces], start=[space.start for space in spaces])
        low, high = (np.concatenate([getattr(space, bound).ravel() for space in spaces]) for bound in ("low", "high"))
        return Box(low, high, dtype=spaces[0].dtype.type)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Observations, dict[str, Any]]:
        obs, infos = began(self.env.reset(seed=seed))
        return self._row(obs), dict(infos)

    def step(self, actions: Mapping[str, Any]) -> Any:
        given: dict[str, Any] = {}
        for agent, action in actions.items():
            given |= self._split(agent, action)
        obs, rewards, terminations, truncations, infos = self.env.step(given)
        flags = [self._merged(part, given, any) for part in (terminations, truncations)]
        row = self._row(obs)
        return row, self._merged(rewards, given, lambda own: float(np.sum(own))), *flags, infos

    def _split(self, agent: str, action: Any) -> dict[str, Any]:
        if (members := self._members.get(agent)) is None:
            return {agent: action}
        if isinstance(self.env.action_space(members[0]), Discrete):
            return dict(zip(members, action, strict=True))
        shapes = [self.env.action_space(member).shape for member in members]
        cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return {m: x.reshape(s) for m, x, s in zip(members, np.split(action, cuts), shapes, strict=True)}

    def _row(self, obs: Observations) -> Observations:
        self.agents = [*dict.fromkeys(self._joint_of.get(agent, agent) for agent in self.env.agents)]
        for name, members in self._members.items():
            if name in self.agents and (gone := [m for m in members if m not in self.env.agents]):
                raise MisfitError(f"{', '.join(gone)} of the joint agent {name} is not alive, but others of it are")
        found = {agent: one for agent, one in obs.items() if agent not in self._joint_of}
        for name, members in self._members.items():
            if all(member in obs for member in members):
                found[name] = {member: obs[member] for member in members}
        return found

    def _merged(
        self, part: Mapping[str, Any], acted: Mapping[str, Any], merge: Callable[[list[Any]], Any]
    ) -> dict[str, Any]:
        """Return a value for every joint agent, from those of its members."""
        found = {agent: x for agent, x in part.items() if agent not in self._joint_of}
        for name, members in self._members.items():
            if any(member in acted for member in members):
                found[name] = merge([part[member] for member in members])
        return found
