"""Environments with agents: two carts, places that agents come to and leave, and scouts that a base signals to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode

from rlplug.api import Context, VecEnv
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, EnvSpec, Group, Tree


def one_hot(index: Any, size: int) -> np.ndarray:
    return np.eye(size, dtype=np.float32)[index]


class Columns(VecEnv):
    """``B`` columns that are reset by the step behind their end. A subclass plays; its arrays are its state.

    Args:
        names: of the attributes that ``state`` returns, arrays ``[B, ...]``.
    """

    autoreset = AutoresetMode.NEXT_STEP
    spec: EnvSpec
    alive: np.ndarray

    def __init__(self, ctx: Context, names: tuple[str, ...]) -> None:
        self.columns = len(ctx.env_ids)
        self.names = ("seeds", "episodes", *names)

    def reset(self, seeds, tasks: Tree = None) -> Batch:
        self.seeds, self.episodes = np.array(seeds, np.int64), np.zeros(self.columns, np.int64)
        self.begin(np.ones(self.columns, np.bool_))
        return self.row()

    def step(self, action: Any) -> Batch:
        over = ~self.going()
        result = self.play(action, ~over)
        self.episodes += over
        self.begin(over)
        row = self.row()
        return {key: leaf | result[key] if isinstance(leaf, dict) else leaf for key, leaf in (result | row).items()}

    def draw(self, column: Any) -> np.random.Generator:
        """Return what decides all about a column's episode."""
        return np.random.default_rng([self.seeds[column], self.episodes[column]])

    def begin(self, where: np.ndarray) -> None:
        """Begin an episode in the columns ``where [B]``."""
        raise NotImplementedError

    def play(self, action: Any, where: np.ndarray) -> Batch:
        """Play a step in the columns ``where [B]``; return ``reward``, ``terminated`` and ``truncated``."""
        raise NotImplementedError

    def row(self) -> Batch:
        raise NotImplementedError

    def going(self) -> np.ndarray:
        """Return in which columns somebody is alive, ``[B]``."""
        return np.asarray(self.alive.any(1))

    def state(self) -> Tree:
        return {name: getattr(self, name).copy() for name in self.names}

    def load(self, state: Tree) -> None:
        for name in self.names:
            setattr(self, name, state[name].copy())

    def close(self) -> None:
        pass


class Carts(Columns):
    """Agents with a cart of CartPole each. Whose pole falls is no longer alive; all end after ``max_steps``."""

    @settings
    class Config:
        agents: PositiveInt = option("Carts.")
        max_steps: PositiveInt = option("Longest episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, ("physics", "alive", "steps"))
        self.cfg, self.cart = cfg, CartPoleEnv()
        names = tuple(f"cart{i}" for i in range(cfg.agents))
        space = Box(-np.inf, np.inf, (4,), np.float32)
        self.spec = EnvSpec({"carts": Group(space, Discrete(2), names)}, max_episode_steps=cfg.max_steps)

    def begin(self, where):
        if where.all():
            self.physics = np.zeros((self.columns, self.cfg.agents, 4))
            self.alive = np.ones((self.columns, self.cfg.agents), np.bool_)
            self.steps = np.zeros(self.columns, np.int64)
        for column in np.flatnonzero(where):
            self.physics[column] = self.draw(column).uniform(-0.05, 0.05, (self.cfg.agents, 4))
        self.alive[where], self.steps[where] = True, 0

    def play(self, action, where):
        acted = self.alive & where[:, None]
        terminated = np.zeros_like(self.alive)
        for place in zip(*acted.nonzero(), strict=True):
            self.cart.state, self.cart.steps_beyond_terminated = self.physics[place], None
            _, _, terminated[place], _, _ = self.cart.step(int(action[place]))
            self.physics[place] = self.cart.state
        self.steps += where
        truncated = acted & ~terminated & (self.steps == self.cfg.max_steps)[:, None]
        self.alive = self.alive & ~terminated & ~truncated
        return {"reward": acted.astype(np.float32), "terminated": terminated, "truncated": truncated}

    def row(self):
        return {"obs": self.physics.astype(np.float32), "alive": self.alive.copy()}


class Relay(Columns):
    """Three places for agents. Who is in the first stays; in the second, agents come and go; one comes later.

    An agent observes its place, how long it has been there, and a number of the episode.
    """

    @settings
    class Config:
        max_steps: PositiveInt = option("Longest episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, ("steps", "age", "alive", "number"))
        self.cfg = cfg
        space = Box(-np.inf, np.inf, (3,), np.float32)
        self.spec = EnvSpec({"runners": Group(space, Discrete(2), ("stays", "relays", "late"))}, {}, cfg.max_steps)

    def begin(self, where):
        if where.all():
            self.steps, self.age = np.zeros(self.columns, np.int64), np.zeros((self.columns, 3), np.int64)
            self.number, self.alive = np.zeros(self.columns), np.zeros((self.columns, 3), np.bool_)
        for column in np.flatnonzero(where):
            self.number[column] = self.draw(column).uniform()
        self.steps[where], self.age[where], self.alive[where] = 0, 0, [True, True, False]

    def play(self, action, where):
        acted = self.alive & where[:, None]
        self.steps += where
        late = where & (self.steps >= self.cfg.max_steps - (self.number > 0.5))
        steps = self.steps + (self.number > 0.3)
        present = np.stack([np.ones_like(late), steps % 5 < 3, self.steps > 3], 1) & ~late[:, None]
        terminated = acted & ~present & ~late[:, None]
        self.age = np.where(acted, self.age + 1, 0)
        self.alive = np.where(where[:, None], present, self.alive)
        return {"reward": acted.astype(np.float32), "terminated": terminated, "truncated": acted & late[:, None]}

    def row(self):
        place = np.broadcast_to(np.arange(3), self.age.shape)
        number = np.broadcast_to(self.number[:, None], self.age.shape)
        return {"obs": np.stack([place, self.age, number], -1).astype(np.float32), "alive": self.alive.copy()}


class Signals(Columns):
    """Two scouts that look for one of three places, and a base that knows it and can only signal.

    A scout that finds it is gone, and is paid; the base is paid for each of them. What the base signaled last is what
    the scouts observe. Who is left after ``max_steps`` is truncated.
    """

    @settings
    class Config:
        max_steps: PositiveInt = option("Longest episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, ("goal", "signal", "alive", "base", "steps"))
        self.cfg = cfg
        scouts = Group(Box(0.0, 1.0, (5,), np.float32), Discrete(3), ("north", "south"))
        base = Group(Box(0.0, 1.0, (3,), np.float32), Discrete(4))
        state = Box(0.0, 1.0, (7,), np.float32)
        self.spec = EnvSpec({"scouts": scouts, "base": base}, {"state": state}, cfg.max_steps)

    def begin(self, where):
        if where.all():
            self.goal, self.signal, self.steps = (np.zeros(self.columns, np.int64) for _ in range(3))
            self.alive, self.base = np.ones((self.columns, 2), np.bool_), np.ones(self.columns, np.bool_)
        for column in np.flatnonzero(where):
            self.goal[column] = self.draw(column).integers(3)
        self.alive[where], self.base[where], self.signal[where], self.steps[where] = True, True, 0, 0

    def play(self, action, where):
        acted = self.alive & where[:, None]
        found = acted & (action["scouts"] == self.goal[:, None])
        self.steps += where
        late = where & (self.steps == self.cfg.max_steps)
        alive = acted & ~found & ~late[:, None]
        done = where & ~(acted & ~found).any(1)
        self.signal = np.where(where, action["base"], self.signal)
        self.alive, self.base = np.where(where[:, None], alive, self.alive), np.where(where, ~done & ~late, self.base)
        scouts = {"reward": found.astype(np.float32), "terminated": found, "truncated": acted & ~found & late[:, None]}
        base = {"reward": found.sum(1).astype(np.float32), "terminated": done, "truncated": late & ~done}
        return {"scouts": scouts, "base": base}

    def going(self):
        return self.base | self.alive.any(1)

    def row(self):
        goal, signal = one_hot(self.goal, 3), one_hot(self.signal, 4)
        seen = np.concatenate([signal, (self.steps / self.cfg.max_steps).astype(np.float32)[:, None]], 1)
        return {
            "scouts": {"obs": np.stack([seen, seen], 1), "alive": self.alive.copy()},
            "base": {"obs": goal, "alive": self.base.copy()},
            "state": np.concatenate([goal, signal], 1),
        }


class MaskedSignals(Signals):
    """The same where scouts may not look where they looked last, and the base may signal everything."""

    def __init__(self, cfg: Signals.Config, ctx: Context) -> None:
        super().__init__(cfg, ctx)
        masks = {name: {"action_mask": MultiBinary(int(group.action.n))} for name, group in self.spec.groups.items()}  # type: ignore[attr-defined]
        groups = {name: replace(group, extras=masks[name]) for name, group in self.spec.groups.items()}
        self.spec = replace(self.spec, groups=groups)
        self.last = np.full((self.columns, 2), -1)
        self.names = (*self.names, "last")

    def begin(self, where):
        super().begin(where)
        self.last[where] = -1

    def play(self, action, where):
        forbidden = self.alive & where[:, None] & (action["scouts"] == self.last)
        if forbidden.any():
            raise ValueError("a scout looked where it had looked last")
        self.last = np.where(where[:, None], action["scouts"], self.last)
        return super().play(action, where)

    def row(self):
        row = super().row()
        row["scouts"]["action_mask"] = np.arange(3) != self.last[..., None]
        row["base"]["action_mask"] = np.ones((self.columns, 4), np.bool_)
        return row
