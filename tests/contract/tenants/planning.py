"""A lookahead of one step: every action is tried on a simulator, and the one that leaves the pole best is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete
from torch import Tensor

from rlplug.api import Algorithm, Context, Losses, Needs, VecEnv
from rlplug.envs.making import find, make_list
from rlplug.settings import UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Mode


class CartPoleModel:
    """The dynamics of CartPole, Barto, Sutton & Anderson 1983, as Gymnasium integrates them (Euler, 0.02 s)."""

    def step(self, env_state: Tensor, action: Tensor) -> Batch:
        x, speed, angle, turn = env_state.unbind(-1)
        force = 20.0 * action - 10.0
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turn.square() * sin) / 1.1
        turned = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        pushed = push - 0.05 * turned * cos / 1.1
        state = torch.stack([x + 0.02 * speed, speed + 0.02 * pushed, angle + 0.02 * turn, turn + 0.02 * turned], -1)
        over = (state[..., 0].abs() > 2.4) | (state[..., 2].abs() > 12 * torch.pi / 180)
        row = {"env_state": state, "obs": state, "terminated": over, "truncated": torch.zeros_like(over)}
        return row | {"reward": self.reward(row)}

    def reward(self, batch: Batch) -> Tensor:
        return torch.ones_like(batch["obs"][..., 0])


MADE: list[int] = []  # how many environments each vector had


class Modeled(VecEnv):
    """CartPole with a simulator; ``model=false`` takes it away."""

    @settings
    class Config:
        model: bool = option("Offer a simulator.")

    def __new__(cls, cfg: Config, ctx: Context) -> VecEnv:
        MADE.append(len(ctx.env_ids))
        env: Any = make_list(find("CartPole-v1"), len(ctx.env_ids))
        env.traits = replace(env.traits, simulator=CartPoleModel if cfg.model else None)
        return env


class Lookahead(Algorithm):
    """Knows the model, and learns nothing."""

    @settings
    class Config:
        turn: UnitFloat = option("Weight of the angular velocity beside the angle.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx, self.model = cfg, ctx, ctx.simulator()
        self.actions = spaces.flatdim(ctx.spec.single_agent.action)

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not isinstance(spec.single_agent.action, Discrete):
            raise ConfigError("algo", "lookahead needs discrete actions")
        return Needs(keys=("obs",), rewards=False)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        obs: Tensor = step["obs"]
        if mode == "random":
            return {"action": self.ctx.randint(self.actions, len(obs))}, carry
        values = [self.value_of(self.model.step(obs, torch.full(obs.shape[:1], a))) for a in range(self.actions)]
        return {"action": torch.stack(values, -1).argmax(-1)}, carry

    def value_of(self, row: Batch) -> Tensor:
        _, _, angle, turn = row["obs"].unbind(-1)
        return -(angle + self.cfg.turn * turn).abs()

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        return Losses({})


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.planning:"
    planner = Component("algo", "lookahead", module + "Lookahead", ("env=modeled",))
    return [planner, Component("env", "modeled", module + "Modeled")]

@hookimpl
def rlplug_conf():
    return "rlplug_plan"
"""
FILES = {
    "rlplug_plan/__init__.py": MANIFEST,
    "rlplug_plan/conf/env/modeled.yaml": "name: modeled\nmodel: true\n",
    "rlplug_plan/conf/algo/lookahead.yaml": (
        "# @package _global_\nreplay_ratio: null\nalgo:\n  name: lookahead\n  turn: 0.5\n"
    ),
}
