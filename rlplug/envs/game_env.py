"""Games of agents as vector environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug import tree
from rlplug.api import Context, EnvTraits, VecEnv
from rlplug.envs.checking import check_seeds
from rlplug.envs.games import Game, GameSimulator, TurnGame
from rlplug.envs.matrix_games import MatrixGame
from rlplug.envs.on_device import GOLDEN, first_counter, uniform
from rlplug.types import Batch, ConfigError, EnvSpec, RunError, Tree, groups_of


class GameEnv(VecEnv):
    """Runs a ``Game`` in every column, on the learner's device; rows and actions are arrays of the host.

    An episode's initial state depends only on its column's seed and its number. A ``TurnGame`` or a
    ``MatrixGame`` offers a simulator, for planners unless it ``hides`` its state.

    Args:
        game: its constants are on ``ctx.device``.
        max_episode_steps: steps after which an episode is truncated; None: the game ends by its rules.

    Raises:
        ConfigError: rendering is requested.
    """

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(self, ctx: Context, game: Game, max_episode_steps: int | None = None) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "games cannot render; use 0")
        self.game, self.limit, self.env_ids, self.device = game, max_episode_steps, ctx.env_ids, ctx.device
        self.spec: EnvSpec = replace(game.spec, max_episode_steps=max_episode_steps or game.spec.max_episode_steps)
        offers = partial(GameSimulator, game) if isinstance(game, TurnGame | MatrixGame) else None
        self.traits = EnvTraits(check_bounds=False, simulator=offers)
        self._draws = torch.arange(1, game.noise_size + 1, device=ctx.device) * GOLDEN
        self._stride = torch.tensor(game.noise_size, device=ctx.device) * GOLDEN

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start episode 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
        """
        check_seeds(seeds, len(self.env_ids))
        self._counter = first_counter(seeds, self.device)
        self._length, self._cut = torch.zeros_like(self._counter), torch.zeros_like(self._counter, dtype=torch.bool)
        self._state = self._initial()
        self._row = self.game.row(self._state)
        return _arrays(self._row)

    def step(self, action: Any) -> Batch:
        """Step every column; one in which no agent is alive starts its next episode instead.

        Raises:
            RunError: an agent takes an action that its mask forbids.
        """
        given = tree.map(lambda x: torch.as_tensor(x, device=self.device), action)
        before = groups_of(self._row)
        self._check(given, before)
        over = ~_going(self._row)
        after, result = self.game.move(self._state, given)
        self._length = torch.where(over, 0, self._length + 1)
        if over.any():
            self._counter = self._counter + over * self._stride
            after = tree.map(lambda new, old: torch.where(_like(over, old), new, old), self._initial(), after)
        self._cut = torch.zeros_like(over) if self.limit is None else self._length >= self.limit
        self._state, self._row = after, self._cut_row(self.game.row(after))
        paid: Batch = {}
        for name, part in before.items():
            own, acted = result[name] if name else result, part["alive"]
            terminated = own["terminated"] & acted
            ends = {"terminated": terminated, "truncated": acted & ~terminated & _like(self._cut, acted)}
            paid |= _nested(name, {"reward": torch.where(acted, own["reward"], 0.0).float()} | ends)
        rows = {key: part | paid[key] if isinstance(paid.get(key), dict) else part for key, part in self._row.items()}
        return _arrays(paid | rows)

    def state(self) -> Tree:
        """Return the state that determines the columns' next rows."""
        found = {"counter": self._counter, "length": self._length, "cut": self._cut, "state": self._state}
        return tree.map(torch.clone, found)

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this game.
        """
        tree.check_like(self.state(), state, "env", exact=True)
        own = tree.map(lambda x: torch.as_tensor(x).to(self.device, copy=True), state)
        self._counter, self._length, self._cut, self._state = (own[k] for k in ("counter", "length", "cut", "state"))
        self._row = self._cut_row(self.game.row(self._state))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _initial(self) -> Tree:
        return self.game.initial(uniform(self._counter[:, None] + self._draws))

    def _cut_row(self, row: Batch) -> Batch:
        """Return the row without agents that are alive in truncated columns."""
        for part in groups_of(row).values():
            part["alive"] = part["alive"] & ~_like(self._cut, part["alive"])
        return row

    def _check(self, action: Any, parts: dict[str, Batch]) -> None:
        for name, part in parts.items():
            if (mask := part.get("action_mask")) is None:
                continue
            chosen = action[name] if name else action
            if (bad := part["alive"] & ~mask.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)).any():
                column, *agent = bad.nonzero()[0].tolist()
                group = self.spec.groups[name or next(iter(self.spec.groups))]
                who = group.agents[agent[0]] if agent else name
                took = int(chosen[(column, *agent)])
                raise RunError(f"environment {self.env_ids[column]}: {who} takes action {took}, which its mask forbids")


def _going(row: Batch) -> Tensor:
    """Return in which columns an agent is alive, ``[B]``."""
    return torch.stack([part["alive"].view(len(part["alive"]), -1).any(1) for part in groups_of(row).values()]).any(0)


def _like(column: Tensor, x: Tensor) -> Tensor:
    """Return numbers of columns ``[B]`` with as many axes as ``x [B, ...]``."""
    return column.view(-1, *(1 for _ in x.shape[1:]))


def _nested(name: str, part: Batch) -> Batch:
    return {name: part} if name else part


def _arrays(rows: Batch) -> Batch:
    return tree.map(lambda x: x.cpu().numpy(), rows)
