"""Independent learners, Tan 1993 (doi:10.1016/B978-1-55860-307-3.50049-6): every agent, or every group of agents, has a
policy of its own, which learns from its own observations and rewards. The other agents are part of its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from rlplug.agents import Agent, Policies, Policy, agents_of, spec_of
from rlplug.settings import AlgoNode, AlgoNodes, option, settings
from rlplug.types import ConfigError, EnvSpec


class Independent(Policies):
    traceable = True

    @settings
    class Config:
        algo: AlgoNode = option("Algorithm of the policies without one of their own.")
        one_per: Literal["agent", "group"] = option("Without policy_of: a policy for each agent, or each group.")
        policies: AlgoNodes = option("Policies with an algo or models of their own, by name; null: none.")
        policy_of: dict[str, str] | None = option(
            "Policy of each agent, group or pattern; null: policies are named like the agents or groups they play."
        )
        train: list[str] | None = option("Policies that learn; null: all.")

    @classmethod
    def policies(cls, cfg: Config, spec: EnvSpec) -> dict[str, Policy]:
        players = dict[str, list[Agent]]()
        for agent, name in assigned(cfg, spec):
            players.setdefault(name, []).append(agent)
        own: Mapping[str, Mapping[str, Any]] = cfg.policies or {}
        agents = ", ".join(agent.name for agent in agents_of(spec))
        for name in own:
            if name not in players:
                said = f"plays no agent; the agents are {agents}"
                raise ConfigError(f"algo.policies.{name}", f"{said}: name it in algo.policy_of, or leave it out")
        for name in cfg.train or ():
            if name not in players:
                raise ConfigError("algo.train", f"there is no policy {name!r}; the policies are {', '.join(players)}")
        if cfg.train == []:
            raise ConfigError("algo.train", "no policy learns; name at least one, or use null for all")
        found = dict[str, Policy]()
        for name, its in players.items():
            nodes = own.get(name, {})
            algo = nodes.get("algo", cfg.algo)
            alone = spec_of(spec, its, f"algo.policies.{name}" if name in own else "algo.policy_of")
            models = {slot: node for slot, node in nodes.items() if slot != "algo"}
            found[name] = Policy(algo, its, alone, models, cfg.train is None or name in cfg.train)
        return found

    @classmethod
    def sharing(cls, cfg: Config) -> list[Any]:
        own = cfg.policies or {}
        named = set(own) if cfg.policy_of is None else set(cfg.policy_of.values())
        algos = [nodes.get("algo", cfg.algo) for nodes in own.values() if "model" not in nodes]
        return algos if own and named <= set(own) else [cfg.algo, *algos]


def assigned(cfg: Any, spec: EnvSpec) -> Iterator[tuple[Agent, str]]:
    """Yield every agent with the name of its policy.

    An agent's name takes precedence over its group's name, and both over patterns, of which the first match counts.

    Raises:
        ConfigError: an agent has no policy, or a key of ``policy_of`` matches none.
    """
    agents, rules, own = agents_of(spec), cfg.policy_of, cfg.policies or {}
    names = [agent.name for agent in agents]
    for key in rules or ():
        if not any(fnmatchcase(name, key) for agent in agents for name in titles(agent)):
            known = ", ".join(dict.fromkeys([*names, *spec.groups]))
            raise ConfigError("algo.policy_of", f"{key!r} is no agent or group of the environment; there are: {known}")
    for agent in agents:
        if rules is None:  # policies are named like agents or groups
            unique = agent.name if names.count(agent.name) == 1 else titles(agent)[-1]
            given = [name for name in (unique, agent.group) if name in own]
            yield agent, (given or [agent.group if cfg.one_per == "group" else unique])[0]
            continue
        keys = [key for key in titles(agent) if key in rules]
        keys += [key for key in rules if any(fnmatchcase(name, key) for name in titles(agent))]
        if not keys:
            said = f"names no policy for {agent.name} of the group {agent.group}"
            raise ConfigError("algo.policy_of", f"{said}; add it, or the pattern *")
        yield agent, rules[keys[0]]


def titles(agent: Agent) -> tuple[str, str, str]:
    """Return the names by which ``policy_of`` may call an agent."""
    return agent.name, agent.group, f"{agent.group}/{agent.name}"
