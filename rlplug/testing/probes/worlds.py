"""Environments with closed-form values and optimal actions, each designed to reveal one kind of bug.

``env=gymnasium env.id=rlplug.testing.probes.worlds:Probe-v0 +env.kwargs.probe=ends +env.kwargs.action=box``

Every probe has ``Discrete`` actions, one number in [-1, 1], or both. A positive number is choice 1, any other one
choice 0, unless the probe uses the number itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

Kind = Literal["discrete", "box"]
Outcome = tuple[float, int, Literal["", "terminated", "truncated"]]
"""reward, next state, and how the episode ends, if it does"""

FORBIDDEN = 10.0
"""reward of a masked action"""


@dataclass(frozen=True)
class Probe:
    """A probe and its exact solution.

    Args:
        shows: the bug of an algorithm that fails it.
        obs: observations, one row per state.
        values: values of states under the optimal policy, which is any policy if actions do not matter.
        best: optimal choice per state; empty: actions do not matter, unless there is ``target``.
        target: optimal numbers per state, with ``box``.
        mistakes: values of states that indicate a known bug, and its description.
        kinds: kinds of actions.
        choices: number of choices with ``discrete``.
        steps: steps until an action is rewarded; 1: independent rounds.
        memory: optimal actions depend on earlier observations.
        mask: some actions are masked.
        words: overrides of its runs.
        stale: training data has actions of an old policy.
        surprises: a replay samples by priority.
        noisy: the return of a single episode says little.
        tolerance: tolerance of values.
        near: maximum distance of an action from ``target``.
    """

    name: str
    shows: str
    obs: tuple[tuple[float, ...], ...]
    values: dict[int, float] = field(default_factory=dict[int, float])
    best: dict[int, int] = field(default_factory=dict[int, int])
    target: dict[int, float] = field(default_factory=dict[int, float])
    mistakes: tuple[tuple[int, float, str], ...] = ()
    gamma: float = 0.9
    kinds: tuple[Kind, ...] = ("discrete", "box")
    choices: int = 2
    steps: int = 2
    memory: bool = False
    mask: bool = False
    stale: bool = False
    surprises: bool = False
    noisy: bool = False
    words: tuple[str, ...] = ()
    tolerance: float = 0.25
    near: float = 0.15

    def label(self, obs: np.ndarray) -> np.ndarray:
        """Return the states ``[T, B]`` of the observations ``[T, B, n]`` of episodes; row 0 is their first."""
        return np.abs(obs[..., None, :] - np.array(self.obs)).sum(-1).argmin(-1)


class World(gymnasium.Env[Any, Any]):
    """A probe as an environment. A subclass defines initial states and transitions."""

    probe: ClassVar[Probe]

    def __init__(self, action: Kind = "discrete") -> None:
        self.kind, self.state = action, 0
        self.observation_space = Box(-1.0, 1.0, (len(self.probe.obs[0]),), np.float32)
        self.action_space = Discrete(self.probe.choices) if action == "discrete" else Box(-1.0, 1.0, (1,), np.float32)

    def begin(self) -> int:
        """Return the initial state of an episode."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def move(self, action: Any) -> Outcome:
        """Return the transition of a choice, or of a number if ``probe.target`` has numbers."""
        raise NotImplementedError(f"{type(self).__name__}.move")

    def allowed(self) -> np.ndarray:
        """Return which actions are allowed in this state, ``[choices]``."""
        return np.ones(self.probe.choices, np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = self.begin()
        return self._row()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"the action {action!r} is outside of {self.action_space}")
        number = float(np.ravel(action)[0])
        choice = (
            number if self.kind == "box" and self.probe.target else int(number > 0 if self.kind == "box" else action)
        )
        reward, self.state, end = self.move(choice)
        obs, info = self._row()
        return obs, reward, end == "terminated", end == "truncated", info

    def _row(self) -> tuple[Any, dict[str, Any]]:
        info = {"action_mask": self.allowed()} if self.probe.mask else {}
        return np.array(self.probe.obs[self.state], np.float32), info


def one_hot(states: int) -> tuple[tuple[float, ...], ...]:
    """Return one-hot observations of this many states."""
    return tuple(tuple(map(float, row)) for row in np.eye(states))


class Absorbing(World):
    """Two absorbing states with rewards 0 and 1. Episodes are truncated after eight steps."""

    probe = Probe(
        "absorbing",
        "bootstraps from the wrong row, discounts wrongly, or treats a truncation as a termination",
        one_hot(2),
        {0: 0.0, 1: 10.0},
        mistakes=((1, 1.0, "a value of one reward: it does not bootstrap"),),
        tolerance=0.5,
    )

    def begin(self) -> int:
        self.left = 8
        return int(self.np_random.integers(2))

    def move(self, action: Any) -> Outcome:
        self.left -= 1
        return float(self.state), self.state, "" if self.left else "truncated"


class Ends(World):
    """Two states with reward 1. The first terminates; the second continues, and is truncated after two steps."""

    probe = Probe(
        "ends",
        "bootstraps after a termination, or does not bootstrap after a truncation",
        one_hot(2),
        {0: 1.0, 1: 10.0},
        mistakes=(
            (0, 10.0, "it bootstraps from the row after a termination, whose value is 0"),
            (1, 1.9, "it treats a truncation as a termination: the value of the final observation counts"),
            (1, 1.0, "it treats a truncation as a termination: the value of the final observation counts"),
        ),
        tolerance=0.5,
    )

    def begin(self) -> int:
        self.left = 2
        return int(self.np_random.integers(2))

    def move(self, action: Any) -> Outcome:
        self.left -= 1
        return 1.0, self.state, "terminated" if self.state == 0 else "" if self.left else "truncated"


class Split(World):
    """One state leads to one of two at random, with rewards 4 and 0."""

    probe = Probe(
        "split",
        "lets gradients flow into the target, or mixes up rows: successors then move towards predecessors",
        one_hot(3),
        {0: 1.8, 1: 4.0, 2: 0.0},
        mistakes=((2, 0.9, "the loss has a gradient through the target: detach it"),),
        tolerance=0.4,
    )

    def begin(self) -> int:
        return 0

    def move(self, action: Any) -> Outcome:
        if self.state == 0:
            return 0.0, 1 + int(self.np_random.integers(2)), ""
        return (4.0 if self.state == 1 else 0.0), self.state, "terminated"


class Delayed(World):
    """Choice 1 has reward 4, three steps later; choice 0 has reward 0.5 at once, and none after it."""

    probe = Probe(
        "delayed",
        "counts a step too many or too few, or uses only the immediate reward",
        one_hot(5),
        {0: 1.0, 1: 2.0, 3: 4.0},
        {0: 1},
        mistakes=(
            (0, 0.5, "it discounts the first reward too: the return is off by one step"),
            (0, 2.0, "it discounts one step too few: the return is off by one step"),
        ),
        gamma=0.5,
        steps=3,
    )

    def begin(self) -> int:
        return 0

    def move(self, action: Any) -> Outcome:
        if self.state == 0:
            return (0.0, 1, "") if action == 1 else (0.5, 2, "")
        if self.state < 3:
            return 0.0, self.state + 2, ""
        return (4.0 if self.state == 3 else 0.0), self.state, "terminated"


class Masked(World):
    """Masked actions have reward 10. Allowed actions, which differ between the states, cost at least 2."""

    probe = Probe(
        "masked",
        "takes forbidden actions, or counts them in a maximum",
        one_hot(2),
        {0: -7.8, 1: -2.0},
        {0: 0, 1: 2},
        mistakes=((0, -6.0, "the value of the next row is a maximum over forbidden actions too"),),
        kinds=("discrete",),
        choices=4,
        mask=True,
        tolerance=0.4,
    )

    def begin(self) -> int:
        return 0

    def allowed(self) -> np.ndarray:
        return np.array([1, 1, 0, 0] if self.state == 0 else [0, 1, 1, 0], np.int8)

    def move(self, action: Any) -> Outcome:
        pays = {0: -6.0, 1: -8.0} if self.state == 0 else {1: -6.0, 2: -2.0}
        return pays.get(action, FORBIDDEN), 1, "terminated" if self.state else ""


class Cued(Probe):
    """A probe whose states from 4 on are those of the query row, one per cue."""

    def label(self, obs: np.ndarray) -> np.ndarray:
        cue = np.where(obs[:1, :, 0] > 0, 0, np.where(obs[:1, :, 1] > 0, 1, 2))
        return np.where(obs[..., 2] > 0, 4 + cue, super().label(obs))


class Cue(World):
    """The first row shows one of two cues, or none, up to five blank rows follow, and the last row asks for the cue.

    Some episodes end before the query, so that a recurrent state that leaks into the next episode remembers their cue:
    a first row without a cue is as blank as the others, and the number of rows since a cue is not informative.
    """

    probe = Cued(
        "cue",
        "does not remember, does not learn through time, or keeps its state into the next episode",
        ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0)),
        best={4: 0, 5: 1, 6: 2},
        target={4: -0.6, 5: 0.6, 6: 0.0},
        choices=3,
        memory=True,
        near=0.25,
    )

    def begin(self) -> int:
        self.cue, self.row = int(self.np_random.integers(3)), 0
        return self.cue

    def move(self, action: Any) -> Outcome:
        self.row += 1
        if self.state != 3:
            if self.np_random.random() < 0.25:
                return 0.0, 2, "terminated"
            asks = self.row > 5 or (self.row > 1 and self.np_random.random() < 0.5)
            return 0.0, 3 if asks else 2, ""
        if self.kind == "box":
            return -4.0 * (action - self.probe.target[4 + self.cue]) ** 2, 3, "terminated"
        return float(action == self.cue), 3, "terminated"


MEANS = ((1.0, 0.0, 0.5), (0.0, 0.5, 2.0))


class Bandit(World):
    """Two contexts, three arms, noisy rewards: the means of the best arms are 1 and 2."""

    probe = Probe(
        "bandit",
        "confuses rows or actions, or learns from noise",
        one_hot(2),
        {0: 1.0, 1: 2.0},
        {0: 0, 1: 2},
        mistakes=((0, 0.5, "it is the mean over all arms: the policy stays uniform"),),
        kinds=("discrete",),
        choices=3,
        steps=1,
        noisy=True,
        words=("env.max_episode_steps=1",),
    )

    def begin(self) -> int:
        return int(self.np_random.integers(2))

    def move(self, action: Any) -> Outcome:
        noise = 0.3 * self.np_random.normal()
        return MEANS[self.state][action] + noise, self.state, "terminated"


class Rare(World):
    """Rounds with reward 10 with probability 0.1, else 0, for any action."""

    probe = Probe(
        "rare",
        "samples by priority and ignores the importance weights",
        ((1.0,),),
        {0: 1.0},
        mistakes=((0, 2.5, "the mean of rows sampled by priority: multiply the terms by batch['weight']"),),
        steps=1,
        surprises=True,
        words=("env.max_episode_steps=1",),
        tolerance=0.6,
    )

    def begin(self) -> int:
        return 0

    def move(self, action: Any) -> Outcome:
        self.rounds = getattr(self, "rounds", int(self.np_random.integers(10))) + 1
        return (10.0 if self.rounds % 10 == 0 else 0.0), 0, "terminated"


class Stale(World):
    """Choice 1 has reward 4, choice 0 has none. Training data comes from an old, nearly uniform policy."""

    probe = Probe(
        "stale",
        "learns from another policy's data as if it were its own",
        ((1.0,),),
        {0: 4.0},
        {0: 1},
        mistakes=((0, 2.0, "the value is that of the policy that acted: importance weights are missing"),),
        kinds=("discrete",),
        stale=True,
        steps=1,
        words=("env.max_episode_steps=1",),
        tolerance=0.8,
    )

    def begin(self) -> int:
        return 0

    def move(self, action: Any) -> Outcome:
        return 4.0 * action, 0, "terminated"


class Target(World):
    """The optimal number is 0.5 in one context, and -0.3 in the other."""

    probe = Probe(
        "target",
        "follows the gradient in the wrong direction, or reads actions in the wrong units",
        one_hot(2),
        target={0: 0.5, 1: -0.3},
        kinds=("box",),
        steps=1,
        words=("env.max_episode_steps=1",),
    )

    def begin(self) -> int:
        return int(self.np_random.integers(2))

    def move(self, action: Any) -> Outcome:
        return -4.0 * (action - self.probe.target[self.state]) ** 2, self.state, "terminated"


WORLDS: dict[str, type[World]] = {
    world.probe.name: world for world in (Absorbing, Ends, Split, Delayed, Masked, Cue, Bandit, Rare, Stale, Target)
}
PROBES: dict[str, Probe] = {name: world.probe for name, world in WORLDS.items()}


def make(probe: str, action: Kind = "discrete") -> World:
    """Return a probe's environment."""
    return WORLDS[probe](action)


gymnasium.register("Probe-v0", entry_point=f"{__name__}:make")
