"""Adapters of environments of agents from three interfaces to one: PettingZoo's parallel interface.

An object of this interface has ``possible_agents`` (all names), ``agents`` (those that act next),
``observation_space(agent)``, ``action_space(agent)``, ``reset(seed=...)``, which returns observations and infos,
``step(actions)``, which returns observations, rewards, terminations, truncations and infos, all by agent, and
optionally ``state()``. If it has ``turn``, a set of agents, the others wait: they are alive, and only one action is
allowed to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Dict, Space

from rlplug.envs.checking import MisfitError
from rlplug.types import ConfigError

ALL = "__all__"


class Turns:
    """PettingZoo's AEC interface, in which one agent acts at a time, adapted to the parallel one.

    A step executes the action of the agent whose turn it is. Rewards are those that the step added for every agent, so
    an agent also gets rewards in rows in which it waits.
    """

    def __init__(self, env: Any) -> None:
        self.env, self.turn = env, set[str]()
        self.metadata, self.render_mode = getattr(env, "metadata", {}), getattr(env, "render_mode", None)
        self.agents: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("env", "possible_agents"):
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def possible_agents(self) -> Any:
        return getattr(self.env, "possible_agents", None)

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.env.reset(seed=seed)
        self._bury()
        return {agent: self.env.observe(agent) for agent in self.agents}, self._infos()

    def step(self, actions: Mapping[str, Any]) -> Any:
        env, acting = self.env, self.env.agent_selection
        before = {agent: env._cumulative_rewards[agent] for agent in self.agents} | {acting: 0.0}
        env.step(actions[acting])
        ends = [{agent: flags.get(agent, False) for agent in before} for flags in (env.terminations, env.truncations)]
        seen = {agent: env.observe(agent) for agent in (*before, *env.agents)}
        paid = env._cumulative_rewards
        rewards = {agent: paid[agent] - sum_before for agent, sum_before in before.items() if agent in paid}
        infos = dict(env.infos)
        self._bury()
        return seen, rewards, *ends, infos | self._infos()

    def _infos(self) -> dict[str, Any]:
        return {agent: self.env.infos.get(agent, {}) for agent in self.agents}

    def _bury(self) -> None:
        """Step the agents that have ended, as the interface asks for, until another one acts."""
        env = self.env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        self.agents = [agent for agent in env.agents if not (env.terminations[agent] or env.truncations[agent])]
        self.turn = {env.agent_selection} if self.agents else set()


class Dicts:
    """Dicts by agent with ``__all__``, as RLlib's ``MultiAgentEnv`` exchanges them; no base class is needed.

    The agents in the observations act next. An agent that is missing there without an end waits, if ``waiting``;
    otherwise it is an error.

    Raises:
        ConfigError: it does not name its agents or their spaces.
    """

    def __init__(self, env: Any, waiting: bool) -> None:
        self.env, self._waiting = env, waiting
        self.metadata, self.render_mode = getattr(env, "metadata", {}), getattr(env, "render_mode", None)
        ids = [*_agents_of(env)]
        self._ids = {str(agent): agent for agent in ids}
        self._spaces = {
            str(agent): [_space_of(env, kind, agent) for kind in ("observation", "action")] for agent in ids
        }
        self.possible_agents = [*self._ids]
        self.agents: list[str] = []
        if waiting:
            self.turn: set[str] = set()
        if hasattr(env, "state"):
            self.state, self.state_space = env.state, getattr(env, "state_space", None)

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def __str__(self) -> str:
        return type(self.env).__name__

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][1]

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        answer = self.env.reset(seed=seed, options=None)
        if not isinstance(answer, tuple) or len(answer) != 2:
            return answer
        self._seen, infos = _named("observation", answer[0]), answer[1]
        self.agents = [*self._seen]
        if self._waiting:
            self.turn = {*self._seen}
        return dict(self._seen), _named("info", infos or {})

    def step(self, actions: Mapping[str, Any]) -> Any:
        acting = self.turn if self._waiting else actions
        given = {self._ids[agent]: actions[agent] for agent in self.agents if agent in acting}
        answer = self.env.step(given)
        if not isinstance(answer, tuple) or len(answer) != 5:
            return answer
        kinds = ("observation", "reward", "terminated", "truncated", "info")
        obs, rewards, *flags, infos = (_named(kind, part) for kind, part in zip(kinds, answer, strict=True))
        every = [bool(part.pop(ALL, False)) for part in flags]
        # what __all__ ends has not ended before
        ends: list[dict[str, Any]] = [{agent: part.get(agent, False) for agent in self.agents} for part in flags]
        if any(every):
            for agent in self.agents:
                if not (ends[0][agent] or ends[1][agent]):
                    ends[0][agent], ends[1][agent] = every[0], every[1] and not every[0]
        over = {agent for agent in self.agents if ends[0][agent] or ends[1][agent]}
        goes_on = [agent for agent in self.agents if agent not in over and (self._waiting or agent in obs)]
        if lost := [agent for agent in self.agents if agent not in over and agent not in goes_on]:
            said = "has no observation, but has not ended; if it waits for its turn, use env.turns=true"
            raise MisfitError(f"the agent {lost[0]} {said}")
        later = [agent for agent in obs if agent not in self.agents] if not any(every) else []
        if not any(every) and not (goes_on or later):
            raise MisfitError("no agent acts next, but '__all__' does not end the episode")
        if self._waiting:
            self.turn = {agent for agent in obs if agent not in over}
            if goes_on and not self.turn:
                raise MisfitError("no agent acts next, but '__all__' does not end the episode")
            obs = {agent: self._seen[agent] for agent in goes_on if agent not in obs} | obs
        self._seen = {**self._seen, **obs}
        rewards = dict.fromkeys(self.agents, 0.0) | rewards
        self.agents = [*goes_on, *later]
        return obs, rewards, *ends, infos


def _named(kind: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise MisfitError(f"the {kind} is of type {type(part).__name__}; it should be a dict by agent")
    return {str(agent): value for agent, value in part.items()}


def _agents_of(env: Any) -> Any:
    for name in ("possible_agents", "_agent_ids", "observation_spaces", "agents"):
        if found := getattr(env, name, None):
            return sorted(found, key=str) if isinstance(found, set | frozenset) else [*found]
    if isinstance(space := getattr(env, "observation_space", None), Dict):
        return [*space.spaces]
    raise ConfigError("env.entry_point", "the environment does not name its agents; give it possible_agents")


def _space_of(env: Any, kind: str, agent: Any) -> Space[Any]:
    for name in (f"{kind}_spaces", f"get_{kind}_space", f"{kind}_space"):
        found = getattr(env, name, None)
        found = found(agent) if callable(found) and not isinstance(found, Space) else found
        if isinstance(found, Dict | Mapping) and agent in (spaces := getattr(found, "spaces", found)):
            found = spaces[agent]
        if isinstance(found, Space):
            return found
    said = f"has no {kind}_spaces[{agent!r}]"
    raise ConfigError("env.entry_point", f"the environment {said}; give it the spaces of every agent")
