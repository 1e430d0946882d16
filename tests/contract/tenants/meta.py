# pyright: strict
"""MAML: Model-Agnostic Meta-Learning, Finn et al. 2017 (arXiv:1703.03400), for policy gradients (algorithm 3).

A point learns to reach one of many goals in the plane (section 5.3), which it cannot see: only rewards tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType, reportPrivateImportUsage]

from rlplug import tree
from rlplug.api import Algorithm, Context, Job, Loop, Losses, Needs, Optim, Play, Run, VecEnv
from rlplug.functional.returns import episode_metrics
from rlplug.nn.distributions import Categorical
from rlplug.settings import PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode, Tree, Weights

MOVES = np.array([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [0.0, -0.1]], np.float32)


class Goals(VecEnv):
    """A point begins at the origin, and every step costs its distance to the goal, which is the task."""

    @settings
    class Config:
        steps: PositiveInt = option("Of an episode.")

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.n = cfg, len(ctx.env_ids)
        group = Group(Box(-np.inf, np.inf, (2,), np.float32), Discrete(len(MOVES)))
        goals = Box(-0.5, 0.5, (2,), np.float32)
        self.spec = EnvSpec({"agent": group}, max_episode_steps=cfg.steps, extras={"task": goals})
        self.at, self.count = np.zeros((self.n, 2), np.float32), 0
        self.goal = np.zeros((self.n, 2), np.float32)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        if tasks is None:
            draws = [np.random.default_rng(seed).uniform(-0.5, 0.5, 2) for seed in seeds]
            tasks = np.array(draws, np.float32)
        self.at, self.count, self.goal = np.zeros_like(self.at), 0, tasks
        return {"obs": self.at, "task": self.goal}

    def step(self, action: np.ndarray) -> Batch:
        if self.count == self.cfg.steps:  # all episodes are equally long
            self.at, self.count = np.zeros_like(self.at), 0
            reward = np.zeros(self.n, np.float32)
        else:
            self.at, self.count = self.at + MOVES[action], self.count + 1
            reward = -np.linalg.norm(self.at - self.goal, axis=-1).astype(np.float32)
        ended = np.full(self.n, self.count == self.cfg.steps)
        rows = {"obs": self.at, "task": self.goal}
        return rows | {"reward": reward, "terminated": np.zeros_like(ended), "truncated": ended}

    def state(self) -> Tree:
        return {"at": self.at, "count": self.count, "goal": self.goal}

    def load(self, state: Tree) -> None:
        self.at, self.count, self.goal = state["at"], state["count"], state["goal"]

    def close(self) -> None:
        pass


class Adapts(Protocol):
    """What the loop wants of an algorithm beyond ``Algorithm``."""

    def tasks(self) -> Tree:
        """Return tasks, leaves ``[K, ...]``, the same on every rank."""
        ...

    def adapt(self, batch: Batch) -> Weights:
        """Return the weights that its own become on one task's episodes ``[L+1, M]``."""
        ...


class Meta(Loop):
    """Plays a few episodes of every task, adapts to it, plays again, and lets the algorithm learn from both."""

    @settings
    class Config:
        episodes: PositiveInt = option("Of a task, before and after the adaptation.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg

    def updates(self, env_steps: int) -> int:
        return 0

    def run(self, run: Run) -> None:
        algorithm = cast(Adapts, run.algorithm)
        while not run.done:
            run.report()
            tasks = algorithm.tasks()
            pre, post = rounds(run.play, algorithm, tasks, self.cfg.episodes, run.progress.updates, "explore")
            run.update({"pre": stacked(pre), "post": stacked(post)})


def rounds(
    play: Play, algorithm: Adapts, tasks: Tree, episodes: int, number: int, mode: Mode
) -> tuple[list[Batch], list[Batch]]:
    """Play every task, adapt to it, and play it again; return the episodes of before and after."""
    size = len(next(tree.leaves(tasks)))
    first, each = 2 * size * number, [tree.take(tasks, k) for k in range(size)]
    before = [Job(first + k, task=task, episodes=episodes) for k, task in enumerate(each)]
    pre = [batch for _, batch in play(before)]
    adapted = {str(k): algorithm.adapt(batch) for k, batch in enumerate(pre)}
    after = [Job(first + size + k, {"": str(k)}, task=each[k], episodes=episodes, mode=mode) for k in range(size)]
    return pre, [batch for _, batch in play(after, adapted)]


class MAML(Algorithm):
    @settings
    class Config:
        gamma: UnitFloat = option("Discount factor.")
        inner_lr: PositiveFloat = option("Step size of the adaptation.")
        lr: PositiveFloat = option("Adam's step size.")
        hidden: PositiveInt = option("Width of the policy.")
        tasks: PositiveInt = option("Of an update.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        assert isinstance(group.action, Discrete)
        assert group.obs.shape
        hidden = nn.Linear(group.obs.shape[0], cfg.hidden)
        self.policy = nn.Sequential(hidden, nn.Tanh(), nn.Linear(cfg.hidden, int(group.action.n)))

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if spec.tasks is None:
            raise ConfigError("env", "maml needs an environment with tasks")
        return Needs(keys=("obs", "action"), rewards=False)  # of a sample: its batches are those of the loop

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        policy = Categorical(self.policy(step["obs"]))
        noise = self.ctx.rand(len(policy.params), 1)
        return {"action": policy.mode() if mode == "greedy" else policy.sample(noise)}, carry

    def tasks(self) -> Tree:
        return self.ctx.rand(self.cfg.tasks, 2, rows=False).cpu().numpy() - 0.5

    def evaluate(self, play: Play, episodes: int) -> dict[str, float]:
        """Return what adapted policies get, and what they got before."""
        angles = np.arange(8) * np.pi / 4
        goals = 0.5 * np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        parts = rounds(play, self, goals, episodes, 0, "explore")
        before, after = (episode_metrics({"return": joined(x, "return"), "length": joined(x, "length")}) for x in parts)
        return after | {"eval/return_before": before["eval/return_mean"]}

    def prepare(self, batch: Batch) -> Batch:
        """Return ``pre`` and ``post`` with leaves ``[K, L+1, M]``. A row of the whole is a task: ``valid [K]``."""
        parts: Batch = {name: self.advantages(batch[name]) for name in ("pre", "post")}
        return parts | {"valid": parts["pre"]["valid"].flatten(1).any(1)}

    def advantages(self, rows: Batch) -> Batch:
        """Return the reward to go less its mean over the episodes of a task: ``[K, L+1, M]``."""
        reward = rows["reward"] * rows["valid"]
        total = torch.zeros_like(reward)
        for t in reversed(range(reward.shape[1] - 1)):
            total[:, t] = reward[:, t] + self.cfg.gamma * total[:, t + 1]
        return rows | {"advantage": total - total.mean(2, keepdim=True)}

    def surrogate(self, weights: Weights, rows: Batch) -> Tensor:
        """Return the mean over one task's valid rows, 0-d."""
        logp = Categorical(functional_call(self.policy, weights, (rows["obs"],))).logp(rows["action"])
        keep = rows["valid"].to(logp.dtype)
        return -(logp * rows["advantage"] * keep).sum() / keep.sum().clamp(min=1)

    def inner(self, weights: Weights, rows: Batch, create_graph: bool) -> Weights:
        """Adapt by one step: equation 1."""
        grads = torch.autograd.grad(self.surrogate(weights, rows), [*weights.values()], create_graph=create_graph)
        return {name: w - self.cfg.inner_lr * g for (name, w), g in zip(weights.items(), grads, strict=True)}

    def adapt(self, batch: Batch) -> Weights:
        rows = tree.map(lambda x: x[0], self.advantages(tree.map(lambda x: x[None].to(self.ctx.device), batch)))
        with torch.enable_grad():
            start = {name: w.detach().requires_grad_() for name, w in self.policy.named_parameters()}
            return {f"policy.{name}": w.detach() for name, w in self.inner(start, rows, False).items()}

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        """Compute the loss of every task after its adaptation, through which the gradient goes."""
        start: Weights = dict(self.policy.named_parameters())
        terms: list[Tensor] = []
        for k in range(len(batch["valid"])):
            pre, post = (tree.map(lambda x, k=k: x[k], batch[name]) for name in ("pre", "post"))
            terms.append(self.surrogate(self.inner(start, pre, True), post))
        return Losses({"policy": torch.stack(terms)})  # [K]

    def optimizers(self) -> dict[str, Optim]:
        return {"policy": Optim(torch.optim.Adam(self.policy.parameters(), lr=self.cfg.lr))}


def stacked(batches: Sequence[Batch]) -> Batch:
    """Return episodes ``[L+1, M]`` of K tasks as one batch ``[K, L+1, M]``."""
    rows = [{key: x for key, x in batch.items() if key not in ("return", "length")} for batch in batches]
    return tree.map(lambda *leaves: torch.stack(leaves), *rows)


def joined(batches: Sequence[Batch], key: str) -> Tensor:
    return torch.cat([batch[key] for batch in batches])


PROTOCOLS: Sequence[type[Adapts]] = (MAML,)  # pyright checks that MAML is one
MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.meta:"
    tried = {"MAML": ("env=goals", "loop.episodes=5"), "Meta": ("algo=maml", "env=goals", "loop.episodes=5")}
    return [Component(kind, name.lower(), module + name, tried.get(name, ())) for kind, name in
            (("algo", "MAML"), ("loop", "Meta"), ("env", "Goals"))]

@hookimpl
def rlplug_conf():
    return "rlplug_maml"
"""
CONF = """# @package _global_
defaults:
  - override /loop: meta

rollout_fragment_length: 20
algo:
  name: maml
  gamma: 1.0
  inner_lr: 0.5
  lr: 0.01
  hidden: 32
  tasks: 10
"""
FILES = {
    "rlplug_maml/__init__.py": MANIFEST,
    "rlplug_maml/conf/loop/meta.yaml": "name: meta\nepisodes: 20\n",
    "rlplug_maml/conf/env/goals.yaml": "name: goals\nsteps: 10\n",
    "rlplug_maml/conf/algo/maml.yaml": CONF,
}
