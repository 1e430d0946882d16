"""Components of a plugin package, each of which breaks its contract in one place, as authors do at first."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

from rlplug import hookimpl
from rlplug.api import Exploration, Loop, Model, Needs, Optim, Plan, VecEnv
from rlplug.config import RunConfig, compose, parse
from rlplug.plugins.buffer.replay import Replay
from rlplug.registry import Component
from rlplug.run.build import build
from rlplug.settings import PositiveFloat, Scheduled, option, settings
from rlplug.trainer.trainer import Trainer
from rlplug.types import EnvSpec, Group
from tests.contract.toys import Sound


@settings
class Nothing:
    pass


# ---- algorithms ------------------------------------------------------------------------------------------------------


class ActsAlone(Sound):
    def act(self, step, carry, mode):
        return super().act(step, carry, mode)[0]


class ActsBare(Sound):
    def act(self, step, carry, mode):
        return self.policy(step["obs"]).argmax(-1), carry


class ActsWide(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return {"action": out["action"][:, None]}, carry


class Actless(Sound):
    act = None


class PlainNeeds(Sound):
    def needs(self, cfg, spec):
        return super().needs(cfg, spec)


class NeedsNothing(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        super().needs(cfg, spec)


class Demanding(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("obs", "action", "weather"))


class TensorLoss(Sound):
    def forward(self, batch, parts):
        return sum(super().forward(batch, parts).terms.values()).mean()


class ListedLoss(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        losses.terms = {name: term.mean().item() for name, term in losses.terms.items()}
        return losses


class WideLoss(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return type(losses)({name: term[..., None] for name, term in losses.terms.items()})


class Unprepared(Sound):
    def prepare(self, batch):
        super().prepare(batch)


class SilentUpdate(Sound):
    def update(self, batch, learner):
        learner.minimize(batch, self)


class ListOfOptims(Sound):
    def optimizers(self):
        return [*super().optimizers().values()]


class BareOptims(Sound):
    def optimizers(self):
        return {name: optim.optimizer for name, optim in super().optimizers().items()}


class BareConfig(Sound):
    class Config:
        lr = 0.01


class Unscheduled(Sound):
    @settings
    class Config:
        lr: Scheduled[PositiveFloat] = option("Step size.")

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.lr = ctx.schedule(cfg.lr)

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), float(self.lr)))}

    def forward(self, batch, parts):
        return super().forward(batch, ("policy", "baseline"))


class Listed(Sound):
    Config = Unscheduled.Config

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr))}


class BatchOnly(Sound):
    def forward(self, batch):
        return super().forward(batch, ("policy", "baseline"))


class ConfigOnly(Sound):
    def __init__(self, cfg):
        super().__init__(cfg, None)


class Swapped(Sound):
    def __init__(self, ctx, cfg):
        super().__init__(cfg, ctx)


class NoSuper(Sound):
    def __init__(self, cfg, ctx):
        self.cfg, self.ctx = cfg, ctx
        self.policy = nn.Linear(4, 2)


class NeedsKey(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(key=("obs", "action"))


class NeedsWindow(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(data="window", keys=("obs", "action"))


class NeedsText(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys="obs")


class NeedsNoObs(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("action",))


class BuildsModels(Sound):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.torso = ctx.build("models", ctx.spec.single_agent.obs)


class Yielding(Sound):
    def optimizers(self):
        yield from super().optimizers().items()


class Spent(Sound):
    def optimizers(self):
        every = self.parameters()
        return {name: Optim(torch.optim.SGD(every, self.cfg.lr)) for name in ("policy", "baseline")}


class Clipping(Sound):
    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr), clip=0.5)}


class FixedLr(Sound):
    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), self.cfg.lr), lr=self.cfg.lr)}


class Detached(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        losses.terms["policy"] = losses.terms["policy"].detach()
        return losses


class NumberMetric(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        losses.metrics["mean"] = losses.terms["policy"].mean().item()
        return losses


class Broadcasting(Sound):
    def forward(self, batch, parts):
        value = self.baseline(batch["obs"])
        return type(super().forward(batch, parts))({"baseline": nn.functional.mse_loss(value, batch["weight"])})


class DropsValid(Sound):
    def prepare(self, batch):
        return {key: leaf for key, leaf in super().prepare(batch).items() if key != "valid"}


class WideAdvantage(Sound):
    def prepare(self, batch):
        return super().prepare(batch) | {"advantage": batch["reward"][..., None]}


class WideValue(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("obs", "action", "value"))

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return out | {"value": self.baseline(step["obs"])}, carry


class OutOfRange(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return {"action": out["action"] + 2}, carry


class FloatAction(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return {"action": out["action"].float()}, carry


class DrawsThree(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return {"action": (out["action"] + self.ctx.randint(2, 3)[0]) % 2}, carry


class ReadsPrevious(Sound):
    def act(self, step, carry, mode):
        return super().act(step | {"obs": step["obs"] * step["prev_reward"][:, None]}, carry, mode)


class NoAlgorithm:
    """No ``Algorithm``."""

    Config = Sound.Config
    needs = Sound.needs
    act = Sound.act

    def __init__(self, cfg, ctx):
        pass


# ---- models: PPO's ---------------------------------------------------------------------------------------------------


class Stateless(Model):
    Config = Nothing

    def __init__(self, cfg, ctx):
        super().__init__()
        self.linear, self.out_dim = nn.Linear(ctx.space.shape[0], 8), 8

    def forward(self, x, carry, is_first):
        return self.linear(x)


class ReadsInput(Stateless):
    def forward(self, x):
        return self.linear(x)


class NoModel(nn.Module):
    Config = Nothing
    batched = recurrent = False

    def __init__(self, cfg, ctx):
        super().__init__()
        self.linear, self.out_dim = nn.Linear(ctx.space.shape[0], 8), 8

    def forward(self, x, carry, is_first):
        return self.linear(x), carry


class Sizeless(Stateless):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        del self.out_dim

    def forward(self, x, carry, is_first):
        return self.linear(x), carry


class Narrow(Sizeless):
    out_dim = 16


class Forgotten(Stateless):
    recurrent = True

    def forward(self, x, carry, is_first):
        return self.linear(x), carry


# ---- environments ----------------------------------------------------------------------------------------------------


class Walk(VecEnv):
    """Four numbers, two actions and episodes of 5 steps; without a mistake."""

    Config = Nothing
    autoreset = AutoresetMode.NEXT_STEP

    def __init__(self, cfg, ctx):
        self.spec = EnvSpec({"agent": Group(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))})
        self.t = np.zeros(len(ctx.env_ids), np.int64)

    def reset(self, seeds, tasks=None):
        self.t[:] = 0
        return {"obs": np.zeros((len(self.t), 4), np.float32)}

    def step(self, action):
        self.t = np.where(self.t == 5, 0, self.t + 1)
        no = np.zeros(len(self.t), np.bool_)
        row = {"obs": np.zeros((len(no), 4), np.float32), "reward": np.ones(len(no), np.float32)}
        return row | {"terminated": no, "truncated": self.t == 5}

    def state(self):
        return {"t": self.t}

    def load(self, state):
        self.t = state["t"]

    def close(self):
        pass


class NoTruncated(Walk):
    def step(self, action):
        return {key: leaf for key, leaf in super().step(action).items() if key != "truncated"}


class StepsAsGymnasium(Walk):
    def step(self, action):
        row = super().step(action)
        return row["obs"], row["reward"], row["terminated"], row["truncated"], {}


class WideReward(Walk):
    def step(self, action):
        row = super().step(action)
        return row | {"reward": row["reward"][:, None]}


class DoubleObs(Walk):
    def reset(self, seeds, tasks=None):
        return {"obs": super().reset(seeds)["obs"].astype(np.float64)}


class HiddenMask(Walk):
    def reset(self, seeds, tasks=None):
        return super().reset(seeds) | {"action_mask": np.ones((len(self.t), 2), np.bool_)}


class DoubleLater(Walk):
    def step(self, action):
        row = super().step(action)
        return row | {"obs": row["obs"].astype(np.float64)}


class ResetsAsGymnasium(Walk):
    def reset(self, seeds, tasks=None):
        return super().reset(seeds)["obs"], {}


class NoAutoreset(Walk):
    autoreset = None


class NoClose(Walk):
    close = None


class Specless(Walk):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        del self.spec


class ResetsItself(Walk):
    def reset(self):
        return super().reset(None)


class BareGroup(Walk):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.spec = EnvSpec(Group(spaces.Box(-1, 1, (4,)), spaces.Discrete(2)))


class BareSpaces(Walk):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.spec = EnvSpec({"agent": spaces.Box(-1, 1, (4,))})


class Sizes(Walk):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.spec = EnvSpec({"agent": Group(spaces.Box(-1, 1, (4,)), 2)})


# ---- exploration -----------------------------------------------------------------------------------------------------


class PerturbsAlone(Exploration):
    Config = Nothing

    def __init__(self, cfg, ctx):
        super().__init__()

    def perturb(self, out, step, carry):
        return out


class PerturbsBare(PerturbsAlone):
    def perturb(self, out, step, carry):
        return out["action"], carry


class PerturbsAction(PerturbsAlone):
    def perturb(self, action):
        return action


class Initless(Exploration):
    Config = Nothing

    def perturb(self, out, step, carry):
        return out, carry


class ShortReward(Exploration):
    Config = Nothing

    def __init__(self, cfg, ctx):
        super().__init__()

    def intrinsic_reward(self, batch):
        return torch.ones_like(batch["reward"][1:])


class Storing(ShortReward):
    """Without a mistake: it needs what PPO does not."""

    @classmethod
    def reads(cls, cfg, spec):
        return "obs", "is_first"

    def intrinsic_reward(self, batch):
        return batch["is_first"].float()


class Greedy(Storing):
    @classmethod
    def reads(cls, cfg, spec):
        return "obs", "weather"


class Deciding(Storing):
    @classmethod
    def reads(cls, cfg, spec):
        return Needs(keys=("obs",))


class TellsNothing(ShortReward):
    def intrinsic_reward(self, batch):
        return torch.ones_like(batch["reward"])

    def update(self, batch, learner):
        pass


# ---- buffers: DQN's --------------------------------------------------------------------------------------------------


class NoIndex(Replay):
    def sample(self):
        batch = super().sample()
        del batch["index"]
        return batch


class ShortSample(Replay):
    def sample(self):
        batch = super().sample()
        return {key: leaf[1:] if leaf.ndim > 1 else leaf for key, leaf in batch.items()}


class Unsized(Replay):
    nbytes = None


# ---- loops, hardware, loggers ----------------------------------------------------------------------------------------


class Endless(Loop):
    Config = Nothing

    def __init__(self, cfg, ctx):
        pass

    def run(self, run):
        pass


class NoLoop:
    Config = Nothing
    unit = "updates"

    def __init__(self, cfg, ctx):
        pass

    def run(self, run):
        pass


class Threads:
    Config = Nothing

    def __init__(self, cfg, ctx):
        pass

    def plan(self):
        return Plan(thread=2)


class OnGPU(Threads):
    def plan(self):
        return Plan(accelerator="gpu")


class DictPlan(Threads):
    def plan(self):
        return {"accelerator": "cpu"}


class Logger:
    """Without a mistake, and without a hook."""

    Config = Nothing

    def __init__(self, cfg, ctx):
        pass


class Misspelled(Logger):
    @hookimpl
    def rlplug_loged(self, run, metrics, step):
        pass


class MisspelledParameter(Logger):
    @hookimpl
    def rlplug_logged(self, run, metric, step):
        pass


class Unmarked(Logger):
    def rlplug_logged(self, run, metrics, step):
        pass


OF_KIND = {
    "algo": [cls for cls in globals().values() if isinstance(cls, type) and issubclass(cls, Sound) and cls is not Sound]
    + [NoAlgorithm],
    "model": [Stateless, ReadsInput, NoModel, Sizeless, Narrow, Forgotten],
    "env": [Walk, *Walk.__subclasses__()],
    "exploration": [
        *(PerturbsAlone, PerturbsBare, PerturbsAction, Initless),
        *(ShortReward, Storing, Greedy, Deciding, TellsNothing),
    ],
    "buffer": [NoIndex, ShortSample, Unsized],
    "loop": [Endless, NoLoop],
    "hardware": [Threads, OnGPU, DictPlan],
    "logger": [Misspelled, MisspelledParameter, Unmarked],
}
KIND = {cls.__name__.lower(): (kind, cls) for kind, every in OF_KIND.items() for cls in every}


def components() -> list[Component]:
    return [Component(kind, name, f"{__name__}:{cls.__name__}") for name, (kind, cls) in KIND.items()]  # type: ignore[arg-type]


MANIFEST = """
from rlplug import hookimpl
from tests.contract.mistakes import components

@hookimpl
def rlplug_components():
    return components()
"""
FILES = {"rlplug_mistakes.py": MANIFEST}


@cache
def _base(*words: str) -> dict[str, Any]:
    """A small run's configuration, as Hydra composes it."""
    few = ["tuned=none", "num_envs=2", "rollout_fragment_length=8", "total_steps=64", "logger.only=[]", "hardware=cpu"]
    return compose([*words, *few]).raw


PPO = ("algo=ppo", "algo.sgd_minibatch_size=16")
DQN = ("algo=dqn", "num_steps_sampled_before_learning_starts=16", "train_batch_size=4", "replay_ratio=0.125")


def config(name: str, **changes: Any) -> RunConfig:
    """Return a run with one mistake in it, on top of PPO, or of DQN for buffers and changed actions."""
    kind, cls = KIND[name]
    raw = deepcopy(_base(*(DQN if kind == "buffer" or issubclass(cls, (PerturbsAlone, Initless)) else PPO)))
    node = {"name": name} | changes
    match kind:
        case "exploration" | "logger":
            raw[kind] = {name: node}
        case "buffer":
            raw[kind] |= node
        case "algo":
            raw |= {kind: {"lr": 0.01} | node, "replay_ratio": None}
        case _:
            raw[kind] = node
    return parse(raw)


def build_run(name: str, **changes: Any) -> Trainer:
    return build(config(name, **changes), Path("nowhere"))


def run(name: str, **changes: Any) -> None:
    """Build it, collect, and learn until the first update."""
    with closing(build_run(name, **changes)) as trainer:
        while not trainer.progress.updates and not trainer.done:
            trainer.collect()
            if trainer.ready():
                trainer.update()
