"""Environments with several agents, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, MultiBinary, Space, Tuple

from rlplug import tree
from rlplug.envs.agent_groups import grouped
from rlplug.envs.checking import MisfitError, flag, number, writer
from rlplug.envs.env_list import render_first, rows_of
from rlplug.envs.episode_metrics import KEY as METRICS
from rlplug.envs.extras import space_of
from rlplug.envs.masks import Masks, find_masks, late
from rlplug.envs.seeded import SeededList, first_of
from rlplug.envs.spaces import execute, inside_action, inside_obs
from rlplug.types import Batch, ConfigError, EnvSpec, EnvTraits, Group

MASK = "action_mask"
RESULT = ("reward", "terminated", "truncated")


@dataclass
class _Place:
    """An agent's place in the rows of its group."""

    group: str
    column: int
    masks: Masks | None
    rows: Batch
    write: Callable[[Any, Any], None]


class AgentList(SeededList):
    """``B`` environments with the same possible agents as one ``VecEnv``; see ``SeededList``.

    Args:
        envs: environments with the interface of ``agent_apis``; masks are in their infos, under ``action_mask``.
        max_episode_steps: steps after which all agents are truncated; None: as the environment does.
        groups: by group, patterns of its agents' names; empty: agents with equal spaces form a group.
        global_state: rows have the extra ``state`` if the environment has a method of that name.
        check_bounds, env_ids, seed_bits, remake: as for ``EnvList``.

    Raises:
        ConfigError: the agents, their spaces or masks are not supported, or ``groups`` does not fit them.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        max_episode_steps: int | None = None,
        *,
        groups: Mapping[str, Sequence[str]] | None = None,
        global_state: bool = True,
        check_bounds: bool = True,
        env_ids: Sequence[int] | None = None,
        seed_bits: int = 32,
        remake: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(envs, env_ids, seed_bits, remake)
        self._limit, env = max_episode_steps, self.envs[0]
        spaces = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}
        _, infos = self._reset(0, 0)
        masked = {agent for agent in spaces if MASK in infos.get(agent, {})} | getattr(env, "masked", set[str]())
        if unmasked := [agent for agent in getattr(env, "turn", ()) if MASK not in infos.get(agent, {})]:
            said = f"{unmasked[0]} of {env} has no action_mask in its observation or info"
            raise ConfigError("env.mask_key", f"{said}; use null if every action is allowed in every turn")
        groups = grouped(spaces, groups or {})
        self._masks: dict[str, Masks | None] = {}
        native = {name: Group(*spaces[agents[0]], agents) for name, agents in groups.items()}
        for name, group in native.items():
            if isinstance(group.action, Dict | Tuple):
                raise ConfigError("env.id", f"the actions of {name} are a Dict or Tuple, which agents cannot have")
            found = {MASK: None} if masked & {*group.agents} else {}
            self._masks[name] = find_masks(group.action, MASK, found)
        extras: dict[str, dict[str, Space[Any]]] = {
            name: {} if masks is None else {MASK: MultiBinary(masks.size)} for name, masks in self._masks.items()
        }
        nested = len(native) > 1
        inside = {
            name: Group(
                inside_obs(group.obs), inside_action(group.action), group.agents, extras[name] if nested else {}
            )
            for name, group in native.items()
        }
        column = {} if nested else next(iter(extras.values()))
        if global_state and (state := _state_space(env)) is not None:
            column = column | {"state": state}
        self.spec = EnvSpec(inside, column, max_episode_steps, native_spaces=native)
        self._execute = {name: execute(group.action) for name, group in native.items()}
        self.traits = EnvTraits(
            check_bounds=check_bounds,
            render=partial(render_first, self.envs) if env.render_mode == "rgb_array" else None,
            render_fps=env.metadata.get("render_fps", 30),
            metrics=self._metrics.drain,
        )
        self._alive: list[list[str]] = [[] for _ in self.envs]
        self._lengths = [0] * self.num_envs
        self.place(rows_of(self.spec, self.num_envs))

    def place(self, rows: Batch) -> None:
        """Write into these arrays, shaped like those of ``rows_of``, from the next ``reset`` on."""
        self._rows, self._first = rows, first_of(self.spec, rows)
        self._parts = {name: rows[name] if self.spec.nested else rows for name in self.spec.groups}
        writers = {name: writer(group.obs, self._parts[name]["obs"]) for name, group in self.spec.native_spaces.items()}
        self._places = {
            agent: _Place(name, j, self._masks[name], self._parts[name], writers[name])
            for name, group in self.spec.groups.items()
            for j, agent in enumerate(group.agents)
        }
        if "state" in self.spec.extras:
            self._write_state = writer(self.spec.extras["state"], rows["state"])

    def step(self, action: Any) -> Batch:
        """Step every column; one in which no agent is alive starts its next episode instead.

        Raises:
            RunError: an environment raises, returns values outside its spaces, or loses an agent without its end.
        """
        self._rows["restarted"][:] = False
        given = self._by_group(tree.map(np.array, action))
        outside = {name: run(given[name]) for name, run in self._execute.items()}
        for i in range(self.num_envs):
            if self._final[i]:
                self._begin(i, self._episodes[i] + 1)
                continue
            self._log(i, tree.take(given, i))
            try:
                self._advance(i, tree.take(outside, i))
                self._failures[i] = 0
            except (Exception, SystemExit) as error:
                self._replace(i, self._failure(i, "step", error), error)
                self._rows["restarted"][i] = True
        return {key: rows for key, rows in self._rows.items() if key != "restarted" or self._remake is not None}

    def _advance(self, i: int, action: Mapping[str, np.ndarray]) -> None:
        """Step column ``i`` with the actions ``[N, ...]`` of every group."""
        places, acted, env = self._places, self._alive[i], self.envs[i]
        given = {agent: action[places[agent].group][places[agent].column] for agent in acted}
        obs, rewards, terminations, truncations, infos = self._steps[i](given)
        for info in infos.values():
            if METRICS in info:
                self._metrics.add(i, info[METRICS])
        self._lengths[i] += 1
        late, remain = self._lengths[i] == self._limit, {*env.agents}
        self._check(obs, rewards, remain, acted)
        for part in self._parts.values():
            for key in RESULT:
                part[key][i] = 0
        for agent in acted:
            rows, at = places[agent].rows, (i, places[agent].column)
            end, cut = (
                flag(*_of(agent, part, name))
                for part, name in ((terminations, "terminated"), (truncations, "truncated"))
            )
            if (end or cut) == (agent in remain):
                how = "has ended, but is still among the agents" if end or cut else "is gone, but has not ended"
                raise MisfitError(f"the agent {agent} {how}")
            rows["reward"][at] = number(_of(agent, rewards, "reward")[1])
            rows["terminated"][at], rows["truncated"][at] = end, cut or (late and not end)
        self._alive[i] = [] if late else [*env.agents]
        self._final[i] = not self._alive[i]
        if self._final[i]:
            self._metrics.end(i)
        self._write(i, obs, infos, acted)

    def _write(self, i: int, obs: Mapping[str, Any], infos: Mapping[str, Any], acted: Sequence[str] = ()) -> None:
        """Write the observations, masks and state of a row, final observations of agents that ``acted`` included."""
        alive = {*self._alive[i]}
        for agent in dict.fromkeys((*acted, *self._alive[i])):
            place = self._places[agent]
            rows, at = place.rows, (i, place.column)
            rows["alive"][at] = agent in alive
            if agent in obs:
                try:
                    place.write(at, obs[agent])
                except MisfitError as error:
                    raise MisfitError(f"the agent {agent}: {error}") from error
            elif agent in alive or rows["truncated"][at]:
                raise MisfitError(
                    f"the agent {agent} {'acts next' if agent in alive else 'is truncated'}, but has no observation"
                )
            if place.masks is not None:
                rows[MASK][at] = self._mask(agent, infos, agent in alive)
            elif MASK in infos.get(agent, {}):
                raise late(MASK)
        if "state" in self.spec.extras:
            self._write_state(i, self.envs[i].state())

    def _mask(self, agent: str, infos: Mapping[str, Any], alive: bool) -> np.ndarray:
        masks = self._places[agent].masks
        assert masks is not None
        try:
            return masks.read(infos.get(agent, {}) if alive else {}, final=not alive, terminated=False)
        except MisfitError as error:
            raise MisfitError(f"the agent {agent}: {error}") from error

    def _check(self, obs: Any, rewards: Any, remain: set[str], acted: Sequence[str]) -> None:
        """Check that only known agents appear, and that only those that acted get rewards."""
        for part, said in ((obs, "an observation"), (rewards, "a reward")):
            if not isinstance(part, Mapping):
                raise MisfitError(f"it returns {said} of type {type(part).__name__}; return a dict by agent")
        if unknown := sorted(str(agent) for agent in {*obs, *rewards, *remain} if agent not in self._places):
            raise MisfitError(f"it has the agent {unknown[0]}, which is not among its possible_agents")
        for agent, reward in rewards.items():
            if agent not in acted and np.any(reward):
                raise MisfitError(f"the agent {agent} is paid {reward}, but did not act")

    def _first_row(self, i: int, episode: int) -> None:
        obs, infos = self._reset(i, episode)
        try:
            agents = [*self.envs[i].agents]
            self._check(obs, {}, {*agents}, ())
            if not agents:
                raise MisfitError("no agent is alive after reset()")
            for part in self._parts.values():
                for leaf in tree.leaves({key: part[key] for key in ("obs", "alive", *RESULT)}):
                    leaf[i] = 0
                if MASK in part:
                    part[MASK][i] = True
            self._alive[i], self._lengths[i], self._final[i] = agents, 0, False
            self._metrics.begin(i)
            self._write(i, obs, infos)
        except MisfitError as error:
            raise self._failure(i, "reset", error) from error

    def _joined(self, log: Sequence[Any]) -> Any:
        joined: dict[str, np.ndarray] = {}
        for name, group in self.spec.groups.items():
            shape = len(log), len(group.agents), *(group.action.shape or ())
            joined[name] = np.array([action[name] for action in log], group.action.dtype).reshape(shape)
        return joined if self.spec.nested else next(iter(joined.values()))

    def _replay(self, i: int, actions: Any) -> None:
        given = self._by_group(actions)
        outside = {name: run(given[name]) for name, run in self._execute.items()}
        for t in range(len(next(iter(given.values())))):
            self._log(i, tree.take(given, t))
            try:
                self._advance(i, tree.take(outside, t))
            except (Exception, SystemExit) as error:
                raise self._failure(i, "step", error) from error

    def _by_group(self, action: Any) -> dict[str, np.ndarray]:
        return action if self.spec.nested else {next(iter(self.spec.groups)): action}


def _of(agent: str, part: Any, name: str) -> tuple[str, Any]:
    """Return ``name`` and the agent's value in a dict by agent."""
    if not isinstance(part, Mapping) or agent not in part:
        raise MisfitError(f"the agent {agent} acted, but has no {name}")
    return name, part[agent]


def _state_space(env: Any) -> Space[Any] | None:
    """Return the space of the environment's global state after a reset, or None if it has none."""
    if not callable(getattr(getattr(env, "unwrapped", env), "state", None)):  # PettingZoo's wrappers always have one
        return None
    try:
        state = env.state()
    except NotImplementedError:
        return None
    space = getattr(env, "state_space", None)
    space = space if isinstance(space, Space) else space_of(state)
    if space is None:
        raise ConfigError("env.global_state", f"state() of {env} returns {tree.what(state)}; use false")
    return inside_obs(space)
