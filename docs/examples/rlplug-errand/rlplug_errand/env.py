"""Errand: hierarchical agents. A manager chooses a cell, which lasts, and a worker walks there."""

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary
from rlplug import Batch, Context, EnvSpec, Group
from rlplug.envs.game_env import GameEnv
from rlplug.envs.games import Game
from rlplug.settings import PositiveInt, option, settings
from torch import Tensor

MOVES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))


class ErrandGame(Game):
    """A parcel and a door are in two cells of a grid; a worker has to bring the parcel to the door.

    Both agents are alive until the end and act in turn, as in a game: where one acts, the mask of the other allows one
    action. In a row in which the manager chooses, the worker may only wait. The choice then lasts until the worker has
    arrived, or `lasts` steps: in these rows, the manager's mask allows its choice only. So the return of a choice is
    the sum of what the manager is paid while it lasts, and rows without a choice have no gradient.

    A state has the cells `worker`, `parcel`, `door` and `target`, `[B, 2]` int64, `carried [B]` and `over [B]` bool,
    and `left [B]`: the steps for which the target still lasts; 0: the manager chooses.
    """

    noise_size = 6

    def __init__(self, size: int, lasts: int, device: torch.device):
        self.size, self.lasts, cells = size, lasts, size * size
        self._moves = torch.tensor(MOVES, device=device)
        sees = [Box(-1.0, 1.0, (width,), np.float32) for width in (7, 2)]
        actions = [Discrete(cells), Discrete(len(MOVES))]
        self.spec = EnvSpec(
            {
                name: Group(obs, action, extras={"action_mask": MultiBinary(int(action.n))})
                for name, obs, action in zip(("manager", "worker"), sees, actions, strict=True)
            }
        )

    def initial(self, noise: Tensor) -> Batch:
        cells = (noise.view(-1, 3, 2) * self.size).long()
        none = torch.zeros(len(noise), dtype=torch.int64, device=noise.device)
        places = dict(zip(("worker", "parcel", "door"), cells.unbind(1), strict=True))
        return places | {"target": cells[:, 0], "left": none, "carried": none > 0, "over": none > 0}

    def move(self, state: Batch, action: Batch) -> tuple[Batch, Batch]:
        chooses, going = state["left"] == 0, ~state["over"]
        chosen = torch.stack([action["manager"] // self.size, action["manager"] % self.size], 1)
        target = torch.where(chooses[:, None], chosen, state["target"])
        walked = (state["worker"] + self._moves[action["worker"]]).clamp(0, self.size - 1)
        worker = torch.where((chooses | ~going)[:, None], state["worker"], walked)
        arrived = ~chooses & (worker == target).all(1)
        left = torch.where(chooses, self.lasts, torch.where(arrived, 0, state["left"] - 1))
        carried = state["carried"] | (worker == state["parcel"]).all(1)
        done = going & carried & (worker == state["door"]).all(1)
        after = state | {"worker": worker, "target": target, "left": left, "carried": carried}
        paid = {"manager": done.float(), "worker": (arrived & going).float() - 0.05 * ~chooses}
        return after | {"over": state["over"] | done}, {
            name: {"reward": reward, "terminated": done} for name, reward in paid.items()
        }

    def row(self, state: Batch) -> Batch:
        places = torch.cat([state[key] for key in ("worker", "parcel", "door")], 1) / max(1, self.size - 1)
        way = (state["target"] - state["worker"]) / self.size
        chooses, alive = (state["left"] == 0)[:, None], ~state["over"]
        choice = state["target"][:, 0] * self.size + state["target"][:, 1]
        cells, moves = (torch.arange(n, device=alive.device) for n in (self.size**2, len(MOVES)))
        masks = {"manager": chooses | (cells == choice[:, None]), "worker": ~chooses | (moves == 0)}
        obs = {"manager": torch.cat([places, state["carried"][:, None]], 1), "worker": way}
        return {
            name: {"obs": obs[name].float(), "alive": alive, "action_mask": masks[name] | ~alive[:, None]}
            for name in obs
        }


class Errand(GameEnv):
    """A manager whose action lasts, and a worker."""

    @settings
    class Config:
        size: PositiveInt = option("Rows and columns of the grid.")
        lasts: PositiveInt = option("Steps after which the manager may choose again, if the worker has not arrived.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many steps.")

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__(ctx, ErrandGame(cfg.size, cfg.lasts, ctx.device), cfg.max_episode_steps)
