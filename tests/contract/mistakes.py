"""Components of a plugin package, each of which breaks its contract in one place, as authors do at first."""

from __future__ import annotations

import inspect
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
from rlplug.api import Exploration, Loop, Losses, Model, Needs, Optim, Plan, VecEnv
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


class PlainNeeds(Sound):
    def needs(self, cfg, spec):
        return super().needs(cfg, spec)


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


class AnnotatesNothing(Sound):
    def annotate(self, batch):
        return None


class BuildsModels(Sound):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.torso = ctx.build("models", ctx.spec.single_agent.obs)


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


class Broadcasting(Sound):
    def forward(self, batch, parts):
        value = self.baseline(batch["obs"])
        return type(super().forward(batch, parts))({"baseline": nn.functional.mse_loss(value, batch["weight"])})


class WideValue(Sound):
    @classmethod
    def needs(cls, cfg, spec):
        return Needs(keys=("obs", "action", "value"))

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return out | {"value": self.baseline(step["obs"])}, carry


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


class Specless(Walk):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        del self.spec


class ResetsItself(Walk):
    def reset(self):
        return super().reset(None)


# ---- exploration -----------------------------------------------------------------------------------------------------


class PerturbsAlone(Exploration):
    Config = Nothing

    def __init__(self, cfg, ctx):
        super().__init__()

    def perturb(self, out, step, carry):
        return out


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


class TellsNothing(ShortReward):
    def intrinsic_reward(self, batch):
        return torch.ones_like(batch["reward"])

    def update(self, batch, learner):
        pass


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


class Computer:
    """Without a mistake."""

    Config = Nothing

    def __init__(self, cfg, ctx):
        pass

    def plan(self):
        return Plan()


class Threads(Computer):
    def plan(self):
        return Plan(thread=2)  # type: ignore[call-arg]


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


# ---- one result or one member is another -----------------------------------------------------------------------------


def doubled(row: Any) -> Any:
    return row | {"obs": row["obs"].astype(np.float64)}


def without(key: str) -> Any:
    return lambda rows: {name: leaf for name, leaf in rows.items() if name != key}


RESULTS: dict[str, tuple[type[Any], str, Any]] = {
    "ActsAlone": (Sound, "act", lambda out: out[0]),
    "ActsBare": (Sound, "act", lambda out: (out[0]["action"], out[1])),
    "ActsWide": (Sound, "act", lambda out: ({"action": out[0]["action"][:, None]}, out[1])),
    "OutOfRange": (Sound, "act", lambda out: ({"action": out[0]["action"] + 2}, out[1])),
    "FloatAction": (Sound, "act", lambda out: ({"action": out[0]["action"].float()}, out[1])),
    "NeedsNothing": (Sound, "needs", lambda needs: None),
    "Demanding": (Sound, "needs", lambda needs: Needs(keys=("obs", "action", "weather"))),
    "NeedsWindow": (Sound, "needs", lambda needs: Needs(data="window", keys=("obs", "action"))),  # type: ignore[arg-type]
    "NeedsText": (Sound, "needs", lambda needs: Needs(keys="obs")),  # type: ignore[arg-type]
    "NeedsNoObs": (Sound, "needs", lambda needs: Needs(keys=("action",))),
    "TensorLoss": (Sound, "forward", lambda losses: sum(losses.terms.values()).mean()),
    "ListedLoss": (Sound, "forward", lambda losses: Losses({k: x.mean().item() for k, x in losses.terms.items()})),
    "WideLoss": (Sound, "forward", lambda losses: Losses({k: x[..., None] for k, x in losses.terms.items()})),
    "Detached": (Sound, "forward", lambda losses: Losses(losses.terms | {"policy": losses.terms["policy"].detach()})),
    "NumberMetric": (Sound, "forward", lambda losses: Losses(losses.terms, {"mean": 1.0})),
    "Unprepared": (Sound, "prepare", lambda batch: None),
    "DropsValid": (Sound, "prepare", without("valid")),
    "WideAdvantage": (Sound, "prepare", lambda batch: batch | {"advantage": batch["reward"][..., None]}),
    "SilentUpdate": (Sound, "update", lambda losses: None),
    "ListOfOptims": (Sound, "optimizers", lambda optims: [*optims.values()]),
    "BareOptims": (Sound, "optimizers", lambda optims: {name: optim.optimizer for name, optim in optims.items()}),
    "Yielding": (Sound, "optimizers", lambda optims: (pair for pair in optims.items())),
    "NoTruncated": (Walk, "step", without("truncated")),
    "StepsAsGymnasium": (Walk, "step", lambda row: (*row.values(), {})),
    "WideReward": (Walk, "step", lambda row: row | {"reward": row["reward"][:, None]}),
    "DoubleLater": (Walk, "step", doubled),
    "DoubleObs": (Walk, "reset", doubled),
    "HiddenMask": (Walk, "reset", lambda row: row | {"action_mask": np.ones((len(row["obs"]), 2), np.bool_)}),
    "ResetsAsGymnasium": (Walk, "reset", lambda row: (row["obs"], {})),
    "PerturbsBare": (PerturbsAlone, "perturb", lambda out: (out["action"], {})),
    "Greedy": (Storing, "reads", lambda keys: ("obs", "weather")),
    "Deciding": (Storing, "reads", lambda keys: Needs(keys=("obs",))),
    "NoIndex": (Replay, "sample", without("index")),
    "ShortSample": (Replay, "sample", lambda rows: {k: x[1:] if x.ndim > 1 else x for k, x in rows.items()}),
    "OnGPU": (Computer, "plan", lambda plan: Plan(accelerator="gpu")),  # type: ignore[arg-type]
    "DictPlan": (Computer, "plan", lambda plan: {"accelerator": "cpu"}),
}
"""classes whose member returns another result than their base's"""
FOUR = spaces.Box(-1, 1, (4,))
SPECS: dict[str, Any] = {
    "BareGroup": EnvSpec(Group(FOUR, spaces.Discrete(2))),  # type: ignore[arg-type]
    "BareSpaces": EnvSpec({"agent": FOUR}),  # type: ignore[dict-item]
    "Sizes": EnvSpec({"agent": Group(FOUR, 2)}),  # type: ignore[arg-type]
}
MISSING = {"Actless": (Sound, "act"), "NoAutoreset": (Walk, "autoreset"), "NoClose": (Walk, "close")}
MISSING |= {"Unsized": (Replay, "nbytes")}


def returning(name: str, base: type[Any], member: str, change: Any) -> type[Any]:
    """Return a class whose ``member`` returns what ``change`` makes of the result of its base's."""
    own = getattr(base, member)

    def changed(self, *given):
        return change(own(self, *given))

    of_class = isinstance(inspect.getattr_static(base, member), classmethod)
    function = classmethod(lambda cls, *given: change(own(*given))) if of_class else changed
    return type(name, (base,), {member: function, "__module__": __name__})


def of_spec(spec: EnvSpec) -> Any:
    def init(self, cfg, ctx):
        Walk.__init__(self, cfg, ctx)
        self.spec = spec

    return init


for name, how in RESULTS.items():
    globals()[name] = returning(name, *how)
for name, spec in SPECS.items():
    globals()[name] = type(name, (Walk,), {"__init__": of_spec(spec), "__module__": __name__})
for name, (base, key) in MISSING.items():
    globals()[name] = type(name, (base,), {key: None, "__module__": __name__})


OF_KIND = {
    "algo": [cls for cls in globals().values() if isinstance(cls, type) and issubclass(cls, Sound) and cls is not Sound]
    + [NoAlgorithm],
    "model": [Stateless, ReadsInput, NoModel, Sizeless, Narrow, Forgotten],
    "env": [Walk, *Walk.__subclasses__()],
    "exploration": [
        *(PerturbsAlone, *PerturbsAlone.__subclasses__(), Initless),
        *(ShortReward, Storing, *Storing.__subclasses__(), TellsNothing),
    ],
    "buffer": [cls for cls in globals().values() if isinstance(cls, type) and cls.__bases__ == (Replay,)],
    "loop": [Endless, NoLoop],
    "hardware": Computer.__subclasses__(),
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
