"""Behavioral cloning (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88): rows in memory, and a loop that only updates."""

from __future__ import annotations

from functools import cached_property

import gymnasium
import numpy as np
import torch
from torch import nn

from rlplug import tree
from rlplug.api import Algorithm, Buffer, Context, Loop, Losses, Needs, Optim, RowLog, Run, Segment
from rlplug.settings import NonNegativeFloat, PositiveInt, Scheduled, option, settings
from rlplug.types import Batch

EXPERT = np.array([0.1, 0.3, 3.0, 1.0])  # pushes to the right where this combination of an observation is positive


def play_expert(episodes: int) -> Batch:
    """Return the rows of an expert's episodes on CartPole, one behind another: leaves ``[n, ...]``."""
    env, rows = gymnasium.make("CartPole-v1"), []
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        first, ended = True, False
        while not ended:
            action = int(EXPERT @ obs > 0)
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, action, reward, terminated, truncated, first, True))
            obs, first, ended = following, False, terminated or truncated
        rows.append((obs, 0, 0.0, False, False, False, False))
    keys = ("obs", "action", "reward", "terminated", "truncated", "is_first", "valid")
    leaves = {key: np.array(leaf) for key, leaf in zip(keys, zip(*rows, strict=True), strict=True)}
    leaves["reward"] = leaves["reward"].astype(np.float32)
    return {key: torch.from_numpy(leaf) for key, leaf in leaves.items()}


class Experts(Buffer):
    """Holds an expert's episodes, which it plays when it is first asked for rows."""

    gives = frozenset({"windows"})
    sources = frozenset({"stored"})
    sequences = False
    size_key = "buffer.episodes"
    device = torch.device("cpu")

    @settings
    class Config:
        episodes: PositiveInt = option("Of the expert.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.ctx = cfg, ctx

    @cached_property
    def rows(self) -> Batch:
        return play_expert(self.cfg.episodes)

    def add(self, segment: Segment) -> None:
        raise NotImplementedError("it holds only rows of its own")

    def ready(self) -> bool:
        return True

    def sample(self) -> Batch:
        """Return ``[window + 1, B]``; every first row is valid, and all ranks together draw one sample."""
        window, size = self.ctx.needs.window.length, self.ctx.batch_size // self.ctx.world_size
        (ids,) = self.rows["valid"][:-window].nonzero(as_tuple=True)
        ids = ids[self.ctx.randint(len(ids), size).cpu()]
        where = ids + torch.arange(window + 1)[:, None]
        batch = tree.map(lambda leaf: leaf[where], self.rows)
        batch["valid"][-1] = False
        return batch | {"index": ids, "sample_prob": torch.full((size,), 1.0 / int(self.rows["valid"].sum()))}

    def feedback(self, index: torch.Tensor, values: Batch) -> None:
        raise NotImplementedError("it draws uniformly")

    def nbytes(self, row: Batch) -> int:
        return sum(leaf.nbytes for leaf in self.rows.values())

    def save(self, log: RowLog) -> None:
        """Save nothing: the expert plays the same episodes again."""

    def load(self, log: RowLog) -> None:
        """Load nothing."""


class Cloning(Algorithm):
    """Learns to act as the actions of the data: the cross entropy of its policy with them."""

    @settings
    class Config:
        lr: Scheduled[NonNegativeFloat] = option("Step size of Adam.")

    @classmethod
    def needs(cls, cfg, spec):
        return Needs(data="windows", off_policy=True, keys=("obs", "action"))

    def __init__(self, cfg, ctx):
        super().__init__()
        self.ctx, self.lr = ctx, ctx.schedule(cfg.lr)
        group = ctx.spec.single_agent
        self.torso = ctx.build("model", group.obs)
        self.head = nn.Linear(self.torso.out_dim, int(group.action.n))

    def optimizers(self):
        return {"policy": Optim(torch.optim.Adam(self.parameters(), 1e-3), lr=self.lr)}

    def logits(self, obs):
        return self.head(self.torso(obs, {}, None)[0])

    def act(self, step, carry, mode):
        logits = self.logits(step["obs"])
        if mode == "greedy":
            return {"action": logits.argmax(-1)}, carry
        probs = logits.softmax(-1) if mode == "explore" else torch.full_like(logits, 1 / logits.shape[-1])
        drawn = self.ctx.rand(len(probs))
        return {"action": (probs.cumsum(-1)[:, :-1] < drawn[:, None]).sum(-1)}, carry

    def forward(self, batch, parts):
        logits = self.logits(batch["obs"][:-1])
        action = batch["action"][:-1]
        agrees = (logits.argmax(-1) == action).float()
        terms = {"policy": nn.functional.cross_entropy(logits.flatten(0, 1), action.flatten(), reduction="none")}
        return Losses(
            {name: term.view_as(action) for name, term in terms.items()}, {"agrees": agrees, "lr": self.lr.clone()}
        )


class Study(Loop):
    """Updates from what the buffer has, and collects nothing."""

    unit = "updates"
    collects = False

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        pass

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs) -> str | None:
        return None if needs.off_policy else "learns from an expert's data, which the algorithm cannot"

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            run.update()


ALGO = """# @package _global_
defaults:
  - override /buffer: experts
  - override /loop: study
total_steps: 600
train_batch_size: 64
eval:
  every: 200
log:
  every: 100
checkpoint:
  every: 150
algo:
  name: cloning
  lr: [[0, 0.003], [600, 0.0]]
"""
MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module, cloning = "tests.contract.tenants.cloning:", ("algo=cloning",)
    return [
        Component("algo", "cloning", module + "Cloning", ("env=cartpole",)),
        Component("buffer", "experts", module + "Experts", cloning),
        Component("loop", "study", module + "Study", cloning),
    ]

@hookimpl
def rlplug_conf():
    return "rlplug_cloning"
"""
FILES = {
    "rlplug_cloning/__init__.py": MANIFEST,
    "rlplug_cloning/conf/algo/cloning.yaml": ALGO,
    "rlplug_cloning/conf/buffer/experts.yaml": "name: experts\nepisodes: 5\n",
    "rlplug_cloning/conf/loop/study.yaml": "name: study\n",
}
