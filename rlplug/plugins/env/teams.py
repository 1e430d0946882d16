"""Environments of several agents as tensor operations."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from pydantic import Field
from torch import Tensor

from rlplug.api import Context
from rlplug.envs.game_env import GameEnv
from rlplug.envs.games import Game
from rlplug.plugins.env.classic_torch import pushed
from rlplug.settings import PositiveInt, option, settings
from rlplug.types import Batch, EnvSpec, Group


class Carts(Game):
    """Agents with a cart of CartPole-v1 each. An agent whose pole falls is no longer alive.

    A state has the carts' ``physics [B, N, 4]`` and ``alive [B, N]``.
    """

    def __init__(self, agents: int) -> None:
        self.agents, self.noise_size = agents, 4 * agents
        space = Box(-np.inf, np.inf, (4,), np.float32)
        self.spec = EnvSpec({"carts": Group(space, Discrete(2), tuple(f"cart_{i}" for i in range(agents)))})

    def initial(self, noise: Tensor) -> Batch:
        physics = (noise * 0.1 - 0.05).view(-1, self.agents, 4)
        return {"physics": physics, "alive": torch.ones_like(physics[..., 0], dtype=torch.bool)}

    def move(self, state: Batch, action: Tensor) -> tuple[Batch, Batch]:
        alive, physics = state["alive"], state["physics"]
        moved, fallen = pushed(physics.movedim(-1, 0), action)
        after = {"physics": torch.where(alive[..., None], moved.movedim(0, -1), physics), "alive": alive & ~fallen}
        return after, {"reward": alive.float(), "terminated": alive & fallen}

    def row(self, state: Batch) -> Batch:
        return {"obs": state["physics"].float(), "alive": state["alive"]}


class TwoCarts(GameEnv):
    """CartPole for several agents, each with its own cart."""

    @settings
    class Config:
        agents: PositiveInt = option("Number of carts.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__(ctx, Carts(cfg.agents), cfg.max_episode_steps)


class Pursuit(Game):
    """Hunters chase prey on a square grid. Hunters step in eight directions, prey in four; walls stop both.

    A hunter catches a prey by stepping onto its cell, or by exchanging cells with it. The prey then terminates with a
    reward of -1, and every hunter gets a reward of 1. The episode terminates when all prey are caught. Hunters begin in
    the upper half, prey in the lower. An agent observes its position, and for every other agent the relative position
    and whether it is alive.

    A state has ``hunters [B, H, 2]`` and ``prey [B, P, 2]``, the cells, and ``alive [B, P]`` of the prey.
    """

    MOVES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))

    def __init__(self, hunters: int, prey: int, size: int, device: torch.device | None = None) -> None:
        self.hunters, self.size, self.noise_size = hunters, size, 2 * (hunters + prey)
        self._moves = torch.tensor(self.MOVES, device=device)
        self._pairs = _pairs(hunters + prey, device)
        others = 3 * (hunters + prey - 1)
        obs, state = (Box(-1.0, 1.0, (width,), np.float32) for width in (2 + others, 2 * hunters + 3 * prey))
        names = {"hunters": ("hunter", hunters, 9), "prey": ("prey", prey, 5)}
        groups = {
            group: Group(obs, Discrete(moves), tuple(f"{name}_{i}" for i in range(n)))
            for group, (name, n, moves) in names.items()
        }
        self.spec = EnvSpec(groups, {"state": state})

    def initial(self, noise: Tensor) -> Batch:
        place = noise.view(len(noise), -1, 2)
        upper, lower = self.size // 2, self.size - self.size // 2
        heights = torch.tensor([upper] * self.hunters + [lower] * (place.shape[1] - self.hunters), device=noise.device)
        rows = (place[..., 0] * heights).long()
        rows[:, self.hunters :] += upper
        cells = torch.stack([rows, (place[..., 1] * self.size).long()], -1)
        hunters, prey = cells[:, : self.hunters], cells[:, self.hunters :]
        return {"hunters": hunters, "prey": prey, "alive": torch.ones_like(prey[..., 0], dtype=torch.bool)}

    def move(self, state: Batch, action: Batch) -> tuple[Batch, Batch]:
        alive, hunters, prey = state["alive"], state["hunters"], state["prey"]
        going = alive.any(1, keepdim=True)
        chased = torch.where(going[..., None], self._stepped(hunters, action["hunters"]), hunters)
        fled = torch.where(alive[..., None], self._stepped(prey, action["prey"]), prey)
        onto = (chased[:, :, None] == fled[:, None]).all(-1)
        swapped = (chased[:, :, None] == prey[:, None]).all(-1) & (hunters[:, :, None] == fled[:, None]).all(-1)
        caught = alive & (onto | swapped).any(1)
        after = {"hunters": chased, "prey": fled, "alive": alive & ~caught}
        paid = caught.sum(1, keepdim=True).float().repeat(1, self.hunters)
        ends = (going & ~after["alive"].any(1, keepdim=True)).repeat(1, self.hunters)
        return after, {
            "hunters": {"reward": paid, "terminated": ends},
            "prey": {"reward": -caught.float(), "terminated": caught},
        }

    def row(self, state: Batch) -> Batch:
        places = torch.cat([state["hunters"], state["prey"]], 1).float() / max(self.size - 1, 1)
        going = state["alive"].any(1, keepdim=True).repeat(1, self.hunters)
        alive = torch.cat([going, state["alive"]], 1)
        n = alive.shape[1]
        way = (places[:, None] - places[:, :, None]) * alive[:, None, :, None]
        seen = torch.cat([way, alive[:, None, :, None].float().expand(-1, n, -1, 1)], -1)
        me, other = self._pairs
        obs = torch.cat([places, seen[:, me, other].view(len(alive), n, -1)], -1)
        whole = torch.cat([places.flatten(1), state["alive"].float()], 1)
        return {
            "hunters": {"obs": obs[:, : self.hunters], "alive": going},
            "prey": {"obs": obs[:, self.hunters :], "alive": state["alive"]},
            "state": whole,
        }

    def _stepped(self, cells: Tensor, action: Tensor) -> Tensor:
        return (cells + self._moves[action]).clamp(0, self.size - 1)


def _pairs(n: int, device: torch.device | None) -> Tensor:
    """Return the indices of all pairs of different agents, ``[2, n (n - 1)]``, ordered by the first."""
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).T


class Chase(GameEnv):
    """Hunters and prey on a grid: two groups with different actions and goals."""

    @settings
    class Config:
        hunters: PositiveInt = option("Number of hunters.")
        prey: PositiveInt = option("Number of prey.")
        size: Annotated[int, Field(ge=2)] = option("Rows and columns of the grid.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        game = Pursuit(cfg.hunters, cfg.prey, cfg.size, ctx.device)
        super().__init__(ctx, game, cfg.max_episode_steps)


class SimpleSpread(Game):
    """``simple_spread_v3`` of MPE2 (Lowe et al. 2017, arXiv:1706.02275): agents cover landmarks without collisions.

    A state has the agents' positions and velocities, and the landmarks' positions, ``[B, N, 2]`` float64. The extra
    ``state`` is the concatenation of all observations.
    """

    DT, DAMPING, FORCE, CONTACT_FORCE, MARGIN, REACH = 0.1, 0.25, 5.0, 100.0, 1e-3, 0.3

    def __init__(self, agents: int, local_ratio: float, device: torch.device | None = None) -> None:
        self.agents, self.local_ratio, self.noise_size = agents, local_ratio, 4 * agents
        self._push = self.FORCE * torch.tensor(
            [(0.0, 0.0), (-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0)], dtype=torch.float64, device=device
        )
        self._pairs, self._others = (
            _pairs(agents, device),
            ~torch.eye(agents, dtype=torch.bool, device=device)[..., None],
        )
        width = 4 + 2 * agents + 4 * (agents - 1)
        obs, state = (Box(-np.inf, np.inf, (size,), np.float32) for size in (width, width * agents))
        names = tuple(f"agent_{i}" for i in range(agents))
        self.spec = EnvSpec({"agent": Group(obs, Discrete(5), names)}, {"state": state})

    def initial(self, noise: Tensor) -> Batch:
        places = (2.0 * noise - 1.0).view(-1, 2 * self.agents, 2)
        position, landmark = places[:, : self.agents], places[:, self.agents :]
        return {"position": position, "velocity": torch.zeros_like(position), "landmark": landmark}

    def move(self, state: Batch, action: Tensor) -> tuple[Batch, Batch]:
        place, velocity, landmark = (_columns_last(state[key]) for key in ("position", "velocity", "landmark"))
        way, distance = _between(place, place)
        inside = (self.REACH - distance) / self.MARGIN
        penetration = torch.logaddexp(torch.zeros_like(inside), inside) * self.MARGIN
        contact = self.CONTACT_FORCE * penetration / torch.where(self._others, distance, 1.0) * self._others
        force = _columns_last(self._push[action]) - (way * contact).sum(2)
        place, velocity = place + velocity * self.DT, velocity * (1.0 - self.DAMPING) + force * self.DT
        _, apart = _between(place, place)
        _, far = _between(landmark, place)
        collisions = ((apart < self.REACH) & self._others).sum(1)
        reward = -self.local_ratio * collisions - (1.0 - self.local_ratio) * far.amin(1).sum(0)
        after = state | {"position": _columns_last(place), "velocity": _columns_last(velocity)}
        ends = torch.zeros_like(state["position"][..., 0], dtype=torch.bool)
        return after, {"reward": reward.T.float(), "terminated": ends}

    def row(self, state: Batch) -> Batch:
        position = state["position"]
        to_landmarks, to_agents = (x[:, None] - position[:, :, None] for x in (state["landmark"], position))
        me, other = self._pairs
        others = to_agents[:, me, other].view(len(position), self.agents, -1)
        silence = torch.zeros_like(others)  # what the others say: nothing
        parts = [state["velocity"], position, to_landmarks.flatten(2), others, silence]
        obs = torch.cat(parts, -1).float()
        alive = torch.ones_like(position[..., 0], dtype=torch.bool)
        return {"obs": obs, "alive": alive, "state": obs.flatten(1)}


def _columns_last(x: Tensor) -> Tensor:
    """Return vectors ``[B, N, 2]`` as ``[2, N, B]``, on which sums over agents are fast, or the reverse."""
    return x.permute(2, 1, 0).contiguous()


def _between(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ways ``[2, N, M, B]`` from ``start [2, N, B]`` to ``end [2, M, B]``, and their lengths."""
    way = end[:, None] - start[:, :, None]
    return way, (way[0].square() + way[1].square()).sqrt()


class Spread(GameEnv):
    """MPE's simple_spread as tensors, for thousands of environments."""

    @settings
    class Config:
        agents: PositiveInt = option("Number of agents, and of landmarks.")
        local_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = option(
            "Weight of an agent's own collisions in its reward; the distances, which all share, have the rest."
        )
        max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        game: Any = SimpleSpread(cfg.agents, cfg.local_ratio, ctx.device)
        super().__init__(ctx, game, cfg.max_episode_steps)
