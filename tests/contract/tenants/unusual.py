"""Plugins that are right, in ways that few are: the conformance kit has no objection to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rlplug.api import Algorithm, Context, Learner, Losses, Needs, Optim, Trainable
from rlplug.settings import PositiveFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode


@settings
class StepSize:
    lr: PositiveFloat = option("SGD's step size.")


def sampled(scores: Tensor, ctx: Context, mode: Mode) -> Tensor:
    """Draw actions by the Gumbel-max trick, ``[..., A]`` to ``[...]``; greedily the best one."""
    if mode == "greedy":
        return scores.argmax(-1)
    noise = -(-ctx.rand(*scores.shape).clamp(1e-6, 1.0 - 1e-6).log()).log()
    return ((scores if mode == "explore" else 0.0) + noise).argmax(-1)


def logp_of(scores: Tensor, action: Tensor) -> Tensor:
    return scores.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def of_one(spec: EnvSpec) -> tuple[int, int]:
    """Return the sizes of a vector observation and of a discrete action."""
    group = spec.single_agent
    if not isinstance(group.action, Discrete) or group.obs.shape is None:
        raise ConfigError("algo", "it needs vectors and discrete actions")
    return group.obs.shape[0], int(group.action.n)


class Remembering(Algorithm):
    """A policy gradient whose policy sees the last action and its reward, as RL^2's does (arXiv:1611.02779)."""

    Config = StepSize

    def __init__(self, cfg: StepSize, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        size, self.actions = of_one(ctx.spec)
        self.policy = nn.Linear(size + self.actions + 1, self.actions)

    @classmethod
    def needs(cls, cfg: StepSize, spec: EnvSpec) -> Needs:
        of_one(spec)
        return Needs(keys=("obs", "action", "prev_action", "prev_reward"))

    def scores(self, rows: Batch) -> Tensor:
        before = one_hot(rows["prev_action"].long(), self.actions).float(), rows["prev_reward"].unsqueeze(-1)
        return self.policy(torch.cat([rows["obs"], *before], -1))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return {"action": sampled(self.scores(step), self.ctx, mode)}, carry

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        return Losses({"policy": -logp_of(self.scores(batch), batch["action"]) * batch["reward"]})

    def optimizers(self) -> dict[str, Optim]:
        return {"policy": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr))}


class Together(Algorithm):
    """A policy gradient of all agents of a group: a term has a number for each of them, ``[T+1, B, N]``."""

    Config = StepSize

    def __init__(self, cfg: StepSize, ctx: Context) -> None:
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = self.group(ctx.spec)
        assert isinstance(group.action, Discrete)
        assert group.obs.shape
        self.policy = nn.Linear(group.obs.shape[0], int(group.action.n))

    @staticmethod
    def group(spec: EnvSpec) -> Group:
        (group, *others) = spec.groups.values()
        if others or not group.agents:
            raise ConfigError("env", "together needs one group of agents")
        return group

    @classmethod
    def needs(cls, cfg: StepSize, spec: EnvSpec) -> Needs:
        cls.group(spec)
        return Needs(keys=("obs", "action", "prev_reward", "prev_action"))

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        again = 0.1 * one_hot(step["prev_action"].long(), 2) * step["prev_reward"].unsqueeze(-1)
        return {"action": sampled(self.policy(step["obs"]) + again, self.ctx, mode)}, carry

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        scores = self.policy(batch["obs"])
        term = -logp_of(scores, batch["action"]) * batch["reward"]
        dead = torch.full_like(term, torch.inf)  # what is said of agents that are no longer there means nothing
        logp = scores.detach().log_softmax(-1)
        return Losses({"policy": torch.where(batch["alive"], term, dead)}, {"entropy": -(logp.exp() * logp).sum(-1)})

    def optimizers(self) -> dict[str, Optim]:
        return {"policy": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr))}


class Net(Trainable):
    """A policy that can be learned, or frozen; its first layer is frozen in any case, as of a trained network."""

    def __init__(self, cfg: StepSize, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.cfg, (size, actions) = cfg, sizes
        self.features, self.head = nn.Linear(size, 8).requires_grad_(False), nn.Linear(8, actions)

    def scores(self, obs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(obs)))

    def forward(self, batch: Batch, parts: Sequence[str]) -> Losses:
        return Losses({"imitation": -(batch["target"] * self.scores(batch["obs"]).log_softmax(-1)).sum(-1)})

    def optimizers(self) -> dict[str, Optim]:
        return {"net": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr))}


class Distilled(Algorithm):
    """Policy distillation, Rusu et al. 2015 (arXiv:1511.06295): a student learns what a frozen teacher would do."""

    Config = StepSize

    def __init__(self, cfg: StepSize, ctx: Context) -> None:
        super().__init__()
        self.ctx = ctx
        self.teacher = Net(cfg, of_one(ctx.spec)).requires_grad_(False)
        self.student = Net(cfg, of_one(ctx.spec))

    @classmethod
    def needs(cls, cfg: StepSize, spec: EnvSpec) -> Needs:
        of_one(spec)
        return Needs(keys=("obs",), rewards=False)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        return {"action": sampled(self.student.scores(step["obs"]), self.ctx, mode)}, carry

    def prepare(self, batch: Batch) -> Batch:
        return batch | {"target": self.teacher.scores(batch["obs"]).softmax(-1)}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        return learner.minimize(batch, self.student)


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    ours, built_in = "tests.contract.tenants.", "rlplug.plugins."
    tried = {"remembering": ("algo.lr=0.3",), "distilled": (), "together": ("env=carts2",)}
    found = [Component("algo", name, f"{ours}unusual:{name.title()}", words) for name, words in tried.items()]
    return found + [
        Component("env", "carts2", ours + "teams:Carts"),
        Component("algo", "steering", built_in + "algo.ddpg:DDPG"),
        Component("exploration", "shaking", built_in + "exploration.noise:Gaussian", ("algo=steering", "env=pendulum")),
    ]

@hookimpl
def rlplug_conf():
    return "rlplug_unusual.conf"
"""
ALGO = """# @package _global_
num_envs: 4
rollout_fragment_length: 16
replay_ratio: null
algo:
  name: {}
  lr: 0.05
"""
CONF = {f"algo/{name}": ALGO.format(name) for name in ("remembering", "together", "distilled")}
CONF |= {"env/carts2": "name: carts2\nagents: 2\nmax_steps: 30\n"}


def files(built_in: Any) -> dict[str, str]:
    """Return the package; ``built_in(group, option)`` reads a YAML file, of which components here have two each."""
    steering, shaking = built_in("algo", "ddpg"), built_in("exploration", "gaussian")
    conf = CONF | {f"algo/{name}": steering.replace("name: ddpg", "name: steering") for name in ("steering", "careful")}
    conf |= {
        f"exploration/{name}": shaking.replace("name: gaussian", "name: shaking").replace(".gaussian", f".{name}")
        for name in ("little", "much")
    }
    return {"rlplug_unusual/__init__.py": MANIFEST, "rlplug_unusual/conf/__init__.py": ""} | {
        f"rlplug_unusual/conf/{name}.yaml": text for name, text in conf.items()
    }
