"""Small environments of agents that come, go and misbehave, with PettingZoo's parallel interface, for tests.

No base class is needed. An agent observes its number, how many steps it has lived, and the episode's number.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete


class Troupe:
    """Plays a script: the agents present in every row. One that is absent in the next row has terminated.

    Args:
        script: names of the agents of every row; "." is nobody. After the last row the episode is over.
        cut: the agents that are left in the last row are truncated, not terminated.
    """

    render_mode, metadata = None, {}

    def __init__(self, script: str = "ab ab ab", cut: bool = False, names: str = "abc"):
        self.script, self.cut, self.possible_agents = script.split(), bool(cut), [*names]
        self.agents: list[str] = []

    def observation_space(self, agent):
        return Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent):
        return Discrete(3)

    def present(self, t):
        return [] if t >= len(self.script) else [*self.script[t].replace(".", "")]

    def reset(self, seed=None, options=None):
        self.at, self.number = 0, np.random.default_rng(seed).random()
        self.age = dict.fromkeys(self.possible_agents, 0)
        self.agents = self.present(0)
        return self.observed(self.agents), {}

    def observed(self, agents):
        place = self.possible_agents.index
        return {a: np.array([place(a), self.age[a], self.number], np.float32) for a in agents}

    def step(self, actions):
        assert [*actions] == self.agents, f"{[*actions]} acted, but {self.agents} are alive"
        self.at += 1
        acted, self.agents = self.agents, self.present(self.at)
        ends = {a: a not in self.agents for a in acted}
        last = self.at == len(self.script)
        for agent in self.possible_agents:
            self.age[agent] = self.age[agent] + 1 if agent in acted else 0
        obs = self.observed(dict.fromkeys((*acted, *self.agents)))
        rewards = {a: float(actions[a] + 1) for a in acted}
        terminated = {a: end and not (last and self.cut) for a, end in ends.items()}
        truncated = {a: end and last and self.cut for a, end in ends.items()}
        return obs, rewards, terminated, truncated, {}

    def close(self):
        pass


class Scored(Troupe):
    """Reports the age of every agent, and once how many of them the last row has."""

    def step(self, actions):
        obs, *results, _ = super().step(actions)
        infos = {agent: {"metrics": {"age": self.age[agent]}} for agent in actions}
        if not self.agents:
            infos["__common__"] = {"metrics": {"left": len(actions)}}
        return obs, *results, infos


class Flagged(Troupe):
    """Its flags are 0 and 1."""

    def step(self, actions):
        obs, rewards, *flags, infos = super().step(actions)
        return obs, rewards, *({agent: int(flag) for agent, flag in part.items()} for part in flags), infos


class Miscounted(Troupe):
    def step(self, actions):
        return *super().step(actions)[:4], {"a": {"metrics": 3}}


class Endless(Troupe):
    """Never ends by itself."""

    def present(self, t):
        return ["a", "b"]


class OtherSpaces(Troupe):
    """The first agent observes less, and has continuous actions."""

    def observation_space(self, agent):
        return Box(-np.inf, np.inf, (1,) if agent == "a" else (3,), np.float32)

    def action_space(self, agent):
        return Box(-2.0, 2.0, (2,), np.float32) if agent == "a" else Discrete(3)

    def observed(self, agents):
        return {agent: obs[:1] if agent == "a" else obs for agent, obs in super().observed(agents).items()}

    def step(self, actions):
        if "a" in actions:
            assert self.action_space("a").contains(actions["a"])
        return super().step(dict.fromkeys(actions, 0))


class Vanishes(Troupe):
    """Agents disappear together, and nothing says that they have ended."""

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        return obs, rewards, dict.fromkeys(terminated, False), truncated, infos


class Lingers(Troupe):
    """Agents that have ended stay in the list."""

    def step(self, actions):
        answer = super().step(actions)
        self.agents = [*actions]
        return answer


class Stranger(Troupe):
    """Returns the observation of an agent that it did not name."""

    def observed(self, agents):
        return super().observed(agents) | {"x": np.zeros(3, np.float32)}


class Forgetful(Troupe):
    """Returns no final observation."""

    def step(self, actions):
        obs, *rest = super().step(actions)
        return {agent: one for agent, one in obs.items() if agent in self.agents}, *rest


class Unpaid(Troupe):
    """Returns no reward of the agents that end."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return obs, {agent: r for agent, r in rewards.items() if agent in self.agents}, *rest


class Haunted(Troupe):
    """Pays an agent that is not alive."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return obs, rewards | {"c": 1.0}, *rest


class Nameless(Troupe):
    """Does not say which agents may appear."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.possible_agents = None


class Relay:
    """Dicts by agent as RLlib's ``MultiAgentEnv``: numbered agents act in turn; whoever acts is in the observations."""

    def __init__(self, agents: int = 3, rounds: int = 2, ends: bool = True):
        self.possible_agents, self.rounds, self.ends = [*range(agents)], rounds, ends
        self.observation_space, self.action_space = Box(0.0, 9.0, (2,), np.float32), Discrete(4)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.seen(), {}

    def seen(self):
        return {self.at % len(self.possible_agents): np.array([self.at, 0], np.float32)}

    def step(self, action):
        (agent,) = action
        assert agent == self.at % len(self.possible_agents)
        self.at += 1
        over = self.ends and self.at == self.rounds * len(self.possible_agents)
        obs = {a: np.array([self.at, 0], np.float32) for a in self.possible_agents} if over else self.seen()
        if not self.ends and self.at > 2:
            obs = {}
        return obs, {agent: 1.0, 0: 0.5 + (agent == 0)}, {"__all__": over}, {"__all__": False}, {}


def nearest(observations):
    """Return the observations without the last number, and with how many agents there are."""
    return {a: np.append(obs[:-1], len(observations)).astype(np.float32) for a, obs in observations.items()}
