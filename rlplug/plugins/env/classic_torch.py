"""Gymnasium's classic control environments as tensor operations, for thousands of columns on the learner's device."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from rlplug.api import Context
from rlplug.envs.on_device import OnDevice
from rlplug.settings import PositiveInt, option, settings

GRAVITY, MASS_POLE, HALF_LENGTH, FORCE, DT = 9.8, 0.1, 0.5, 10.0, 0.02  # of CartPole
MASS = 1.0 + MASS_POLE
MOST_X, MOST_ANGLE = 2.4, 12 * 2 * math.pi / 360


@settings
class Config:
    max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")


def pushed(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states ``[4, ...]`` of CartPole after ``action [...]``, and whether the pole has fallen, ``[...]``."""
    _, velocity, angle, spin = state
    sin, cos, pole = angle.sin(), angle.cos(), MASS_POLE * HALF_LENGTH
    push = (action * (2 * FORCE) - FORCE + pole * spin.square() * sin) / MASS
    inertia = HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cos.square() / MASS)
    spin_rate = (GRAVITY * sin - cos * push) / inertia
    rates = torch.stack([velocity, push - pole * spin_rate * cos / MASS, spin, spin_rate])
    state = state + DT * rates
    return state, fell(state)


def fell(state: Tensor) -> Tensor:
    """Return whether the pole or the cart is out of its bounds in states ``[4, ...]``."""
    x, _, angle, _ = state
    return (x.abs() > MOST_X) | (angle.abs() > MOST_ANGLE)


class CartPole(OnDevice):
    """CartPole-v1: Barto, Sutton and Anderson 1983, with the equations of Florian 2007 and Euler integration.

    The state is position, velocity, angle [rad] and angular velocity.
    """

    Config, traceable = Config, True

    def __init__(self, cfg: Config, ctx: Context) -> None:
        high = np.array([2 * MOST_X, np.inf, 2 * MOST_ANGLE, np.inf], np.float32)
        super().__init__(ctx, Box(-high, high), Discrete(2), 4, cfg.max_episode_steps)

    def initial(self, noise: Tensor) -> Tensor:
        return noise * 0.1 - 0.05

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state, fallen = pushed(state, action)
        x, *_ = state
        return state, torch.ones_like(x), fallen

    def observe(self, state: Tensor) -> Tensor:
        return state.T

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(obs[:, 0]), fell(next_obs.T)


class Pendulum(OnDevice):
    """Pendulum-v1. The state is the angle [rad], 0 when upright, and the angular velocity."""

    Config, traceable = Config, True
    GRAVITY, TORQUE, MOST_SPIN, DT = 10.0, 2.0, 8.0, 0.05

    def __init__(self, cfg: Config, ctx: Context) -> None:
        high = np.array([1.0, 1.0, self.MOST_SPIN], np.float32)
        super().__init__(ctx, Box(-high, high), Box(-self.TORQUE, self.TORQUE, (1,)), 2, cfg.max_episode_steps)
        self._high = torch.tensor([[math.pi], [1.0]], dtype=torch.float64, device=self.device)

    def initial(self, noise: Tensor) -> Tensor:
        return (2.0 * noise - 1.0) * self._high

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, spin = state
        torque = self.TORQUE * action.squeeze(-1).clamp(-1.0, 1.0)  # in single precision, as in Gymnasium
        off = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = off.square() + 0.1 * spin.square() + 0.001 * torque.square()
        spin = spin + (1.5 * self.GRAVITY * angle.sin() + 3.0 * torque) * self.DT
        spin = spin.clamp(-self.MOST_SPIN, self.MOST_SPIN)
        return torch.stack([angle + spin * self.DT, spin]), -cost, torch.zeros_like(spin, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        angle, spin = state
        return torch.stack([angle.cos(), angle.sin(), spin], -1)

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin, spin = obs.T
        _, reward, terminated = self.move(torch.stack([torch.atan2(sin, cos), spin]), action)
        return reward, terminated


class SparseCartPole(CartPole):
    """CartPole whose only reward is the number of steps, given when the pole falls or the step limit is reached.

    Both ends terminate, since the steps so far are in the state and in the observation, as a fraction.
    """

    Config, traceable = Config, True

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.limit = cfg.max_episode_steps
        high = np.array([2 * MOST_X, np.inf, 2 * MOST_ANGLE, np.inf, 1.0], np.float32)
        OnDevice.__init__(self, ctx, Box(-high, high), Discrete(2), 4, cfg.max_episode_steps, 5)

    def initial(self, noise: Tensor) -> Tensor:
        return torch.cat((super().initial(noise), torch.zeros_like(noise[:1])))

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pole, _, fallen = super().move(state[:4], action)
        steps = state[4:] + 1.0
        over = fallen | (steps[0] >= self.limit)
        return torch.cat((pole, steps)), steps[0] * over, over

    def observe(self, state: Tensor) -> Tensor:
        return torch.cat((state[:4], state[4:] / self.limit)).T

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        return OnDevice.paid(self, obs, action, next_obs)  # the steps so far are not predicted exactly


class Acrobot(OnDevice):
    """Acrobot-v1: Sutton 1996 with the equations of Sutton and Barto's book, integrated by Runge-Kutta's method.

    The state is two angles [rad], the second relative to the first, and their velocities. Masses, lengths and moments
    of inertia are 1, and the centers of mass in the middle.
    """

    Config, traceable = Config, True
    GRAVITY, DT = 9.8, 0.2
    MOST_SPIN = 4 * math.pi, 9 * math.pi

    def __init__(self, cfg: Config, ctx: Context) -> None:
        high = np.array([1, 1, 1, 1, *self.MOST_SPIN], np.float32)
        super().__init__(ctx, Box(-high, high), Discrete(3), 4, cfg.max_episode_steps)
        self._most = torch.tensor(self.MOST_SPIN, dtype=torch.float64, device=self.device).unsqueeze(-1)

    def initial(self, noise: Tensor) -> Tensor:
        return noise * 0.2 - 0.1

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torque, dt = action - 1.0, self.DT
        k1 = self._rates(state, torque)
        k2 = self._rates(state + dt / 2 * k1, torque)
        k3 = self._rates(state + dt / 2 * k2, torque)
        k4 = self._rates(state + dt * k3, torque)
        angles, spins = (state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)).split(2)
        turns = ((angles + math.pi) / (2 * math.pi)).floor()
        spins = torch.minimum(torch.maximum(spins, -self._most), self._most)
        state = torch.cat([angles - turns * (2 * math.pi), spins])
        up = self._swung_up(*angles)
        return state, up.double() - 1.0, up

    def _rates(self, state: Tensor, torque: Tensor) -> Tensor:
        """Return the derivatives ``[4, B]`` of a state with respect to time."""
        first, second, spin, spin2 = state
        cos, sin = second.cos(), second.sin()
        d1, d2 = 3.5 + cos, 1.25 + 0.5 * cos
        phi2 = 0.5 * self.GRAVITY * (first + second).sin()
        phi1 = 1.5 * self.GRAVITY * first.sin() + phi2 - (0.5 * spin2 + spin) * spin2 * sin
        rate2 = (torque + d2 / d1 * phi1 - 0.5 * spin.square() * sin - phi2) / (1.25 - d2.square() / d1)
        return torch.stack([spin, spin2, -(d2 * rate2 + phi1) / d1, rate2])

    @staticmethod
    def _swung_up(first: Tensor, second: Tensor) -> Tensor:
        return -first.cos() - (first + second).cos() > 1.0

    def observe(self, state: Tensor) -> Tensor:
        first, second, spin, spin2 = state
        return torch.stack([first.cos(), first.sin(), second.cos(), second.sin(), spin, spin2], -1)

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin, cos2, sin2, *_ = next_obs.unbind(-1)
        up = self._swung_up(torch.atan2(sin, cos), torch.atan2(sin2, cos2))
        return up.float() - 1.0, up


class MountainCarContinuous(OnDevice):
    """MountainCarContinuous-v0: Moore 1990, with a continuous force. The state is position and velocity."""

    Config, traceable = Config, True
    POWER, MOST_SPEED, LEFT, RIGHT, GOAL = 0.0015, 0.07, -1.2, 0.6, 0.45

    def __init__(self, cfg: Config, ctx: Context) -> None:
        low, high = (
            np.array([x, speed], np.float32)
            for x, speed in ((self.LEFT, -self.MOST_SPEED), (self.RIGHT, self.MOST_SPEED))
        )
        super().__init__(ctx, Box(low, high), Box(-1.0, 1.0, (1,)), 1, cfg.max_episode_steps, 2)

    def initial(self, noise: Tensor) -> Tensor:
        return torch.cat((noise * 0.2 - 0.6, torch.zeros_like(noise)))

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        position, speed = state
        force = action.squeeze(-1).clamp(-1.0, 1.0)
        speed = speed + force * self.POWER - 0.0025 * (3 * position).cos()
        speed = speed.clamp(-self.MOST_SPEED, self.MOST_SPEED)
        position = (position + speed).clamp(self.LEFT, self.RIGHT)
        speed = torch.where((position == self.LEFT) & (speed < 0), 0.0, speed)
        there = (position >= self.GOAL) & (speed >= 0)
        return torch.stack([position, speed]), 100.0 * there - 0.1 * force.square(), there

    def observe(self, state: Tensor) -> Tensor:
        return state.T

    def paid(self, obs: Tensor, action: Tensor, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        position, speed = next_obs.unbind(-1)
        there = (position >= self.GOAL) & (speed >= 0)
        return 100.0 * there - 0.1 * action.squeeze(-1).clamp(-1.0, 1.0).square(), there
