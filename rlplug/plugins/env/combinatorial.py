"""Combinatorial problems as episodes that build a solution, with simulators for planning."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from pydantic import Field
from torch import Tensor

from rlplug.api import Context
from rlplug.envs.on_device import OnDevice
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError

MOST_VALUE, MOST_WEIGHT = 100, 20
"""values and weights of sampled knapsack items are integers from 1 to these"""


class Knapsack(OnDevice):
    """The 0/1 knapsack problem: every step packs an item that fits, and its reward is the item's value.

    An episode ends when no item fits. The state is the values, the weights, which items are packed, and the room left.

    Raises:
        ConfigError: values, weights and capacity do not define a problem.
    """

    @settings
    class Config:
        values: list[PositiveFloat] | None = option("Values of the items; null: sampled in every episode, 1 to 100.")
        weights: list[PositiveFloat] | None = option("Their weights; null: sampled in every episode, 1 to 20.")
        capacity: PositiveFloat | None = option("Weight that fits; null: half of the weight of all items.")
        num_items: PositiveInt = option("Number of items, if they are sampled.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.n = cfg, len(cfg.values or ()) or cfg.num_items
        if (cfg.values is None) != (cfg.weights is None) or len(cfg.weights or range(self.n)) != self.n:
            raise ConfigError("env.weights", "give one weight for each of env.values, or null for both")
        if cfg.capacity and min(cfg.weights or [MOST_WEIGHT]) > cfg.capacity:
            raise ConfigError("env.capacity", f"is {cfg.capacity:g}, so an item may not fit; raise it")
        n, high = self.n, np.inf
        super().__init__(ctx, Box(0.0, high, (3 * n + 1,)), Discrete(n), 2 * n, n + 1, 3 * n + 1, mask_size=n)

    def initial(self, noise: Tensor) -> Tensor:
        n, fixed = self.n, self.cfg.values
        most = torch.tensor([[MOST_VALUE]] * n + [[MOST_WEIGHT]] * n, device=noise.device)
        items = (noise * most).floor() + 1.0
        if fixed is not None and self.cfg.weights is not None:
            items[:] = torch.tensor([*fixed, *self.cfg.weights], dtype=noise.dtype).unsqueeze(-1)
        weights = items[n:]
        room = torch.maximum(weights.sum(0) / 2.0, weights.amax(0))
        room = room if self.cfg.capacity is None else torch.full_like(room, self.cfg.capacity)
        return torch.cat((items, torch.zeros_like(weights), room.unsqueeze(0)))

    def allowed(self, state: Tensor) -> Tensor:
        _, weights, packed, room = state.split((self.n, self.n, self.n, 1))
        return ((packed == 0) & (weights <= room)).T

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, weights, packed, room = state.split((self.n, self.n, self.n, 1))
        chosen = torch.nn.functional.one_hot(action, self.n).T.to(state.dtype)
        state = torch.cat((values, weights, packed + chosen, room - (weights * chosen).sum(0)))
        return state, (values * chosen).sum(0), ~self.allowed(state).any(-1)

    def observe(self, state: Tensor) -> Tensor:
        """Return values relative to the largest, weights relative to their mean, what is packed, and the room left."""
        values, weights, packed, room = state.split((self.n, self.n, self.n, 1))
        total = weights.sum(0)
        return torch.cat((values / values.amax(0), weights / total * self.n, packed, room / total)).T


class TSP(OnDevice):
    """The traveling salesman problem in the unit square: each step visits a new city; its reward is minus the distance.

    The tour begins in city 0; the reward of the last step includes the way back. The state is the coordinates, which
    cities were visited, and the current one.
    """

    @settings
    class Config:
        num_cities: Annotated[int, Field(ge=3)] = option("Number of cities.")
        world_seed: NonNegativeInt | None = option("Seed of the cities; null: other cities in every episode.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.n = cfg, cfg.num_cities
        n, seed = self.n, cfg.world_seed
        self.cities = None if seed is None else np.random.default_rng(seed).random((2 * n, 1))
        super().__init__(ctx, Box(0.0, 1.0, (4 * n,)), Discrete(n), 2 * n, n, 3 * n + 1, mask_size=n)

    def initial(self, noise: Tensor) -> Tensor:
        if self.cities is not None:
            noise = torch.from_numpy(self.cities).to(noise.device).expand_as(noise)
        flags = torch.zeros(self.n + 1, noise.shape[1], dtype=noise.dtype, device=noise.device)
        flags[0] = 1.0
        return torch.cat((noise, flags))

    def allowed(self, state: Tensor) -> Tensor:
        return (state[2 * self.n : 3 * self.n] == 0).T

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, visited, at = state.split((self.n, self.n, self.n, 1))
        place = torch.stack((x, y))

        def of(city: Tensor) -> Tensor:
            return place.gather(1, city.long().expand(2, 1, -1))

        to = action.unsqueeze(0)
        visited = visited + torch.nn.functional.one_hot(action, self.n).T
        over = (visited > 0).all(0)
        way = (of(to) - of(at)).square().sum(0).sqrt()
        back = (of(torch.zeros_like(to)) - of(to)).square().sum(0).sqrt()
        return torch.cat((x, y, visited, to.to(state.dtype))), -(way + over * back).squeeze(0), over

    def observe(self, state: Tensor) -> Tensor:
        """Return the coordinates, which cities were visited, and the current one as one-hot."""
        here = torch.nn.functional.one_hot(state[-1].long(), self.n).T
        return torch.cat((state[: 3 * self.n], here.to(state.dtype))).T
