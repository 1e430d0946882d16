"""A sound small algorithm, and components that each break their contract in one way."""

from __future__ import annotations

import time

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlplug.api import Algorithm, Exploration, Losses, Model, Needs, Optim, VecEnv
from rlplug.envs import make_list
from rlplug.envs.making import find
from rlplug.plugins.buffer.replay import Replay
from rlplug.plugins.buffer.rollout import Rollout
from rlplug.plugins.loop.alternate import Alternate
from rlplug.registry import Component, hookimpl
from rlplug.settings import PositiveFloat, PositiveInt, option, settings
from rlplug.types import ConfigError


class Sound(Algorithm):
    """A policy and a baseline, an optimizer each; its policy gradient is jittered by noise from ``prepare``."""

    @settings
    class Config:
        lr: PositiveFloat = option("Step size.")

    @classmethod
    def needs(cls, cfg, spec):
        if not isinstance(spec.single_agent.action, spaces.Discrete):
            raise ConfigError("algo", "toys need discrete actions")
        return Needs(keys=("obs", "action"))

    def __init__(self, cfg, ctx):
        super().__init__()
        self.cfg, self.ctx = cfg, ctx
        group = ctx.spec.single_agent
        self.policy = nn.Linear(group.obs.shape[0], int(group.action.n))
        self.baseline = nn.Linear(group.obs.shape[0], 1)
        self.register_buffer("steps", torch.zeros(()))

    def optimizers(self):
        return {
            "policy": Optim(torch.optim.SGD(self.policy.parameters(), self.cfg.lr)),
            "baseline": Optim(torch.optim.SGD(self.baseline.parameters(), self.cfg.lr)),
        }

    def act(self, step, carry, mode):
        scores = self.policy(step["obs"]) * (mode != "random")
        if mode != "greedy":
            scores = scores - (-self.ctx.rand(*scores.shape).clamp(1e-6, 1 - 1e-6).log()).log()
        return {"action": scores.argmax(-1)}, carry

    def prepare(self, batch):
        columns = batch["reward"].shape[1]
        noise = 0.1 * self.ctx.randn(columns).expand_as(batch["reward"])
        return batch | {"weight": batch["reward"] + noise}

    def forward(self, batch, parts):
        logp = self.policy(batch["obs"]).log_softmax(-1).gather(-1, batch["action"][..., None]).squeeze(-1)
        value = self.baseline(batch["obs"]).squeeze(-1)
        terms = {"policy": -logp * (batch["weight"] - value.detach()), "baseline": (value - batch["weight"]).square()}
        return Losses({name: terms[name] for name in parts})

    def after_step(self, parts, losses, learner):
        self.steps += 1


class Impure(Sound):
    def forward(self, batch, parts):
        self.steps += 1
        return super().forward(batch, parts)


class Rolling(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        losses.terms["policy"] = losses.terms["policy"] * (1 + self.ctx.rand(1))
        return losses


class Overwriting(Sound):
    def forward(self, batch, parts):
        batch["weight"].mul_(0.5)
        return super().forward(batch, parts)


class Global(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        if mode == "explore":
            out = {"action": torch.randint(2, out["action"].shape)}
        return out, carry


class Forgetful(Sound):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.shift = torch.zeros(2)

    def after_step(self, parts, losses, learner):
        self.shift = self.shift + torch.tensor([0.0, 9.0])

    def act(self, step, carry, mode):
        return {"action": (self.policy(step["obs"]) + self.shift).argmax(-1)}, carry


class Unresumable(Sound):
    calls = 0

    def prepare(self, batch):
        self.calls += 1
        batch = super().prepare(batch)
        return batch | {"weight": batch["weight"] * self.calls}


class Patient(Sound):
    """A counter that acts at every 50th update, which no short run reaches."""

    calls = 0

    def prepare(self, batch):
        self.calls += 1
        batch = super().prepare(batch)
        return batch | {"weight": batch["weight"] * (2.0 if self.calls % 50 == 0 else 1.0)}


class Deaf(Sound):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        pass


class Hoarding(Sound):
    def observe(self, segment, learner):
        self.last = segment.batch["obs"]


class Dropping(Sound):
    """Its policy drops inputs at random."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.policy = nn.Sequential(nn.Dropout(0.5), self.policy)


class Normed(Sound):
    """Its policy is normalized over the batch."""

    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.policy = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), self.policy)

    def act(self, step, carry, mode):
        return {"action": step["is_first"].long()}, carry

    def forward(self, batch, parts):
        batch = batch | {"obs": batch["obs"].flatten(0, 1)}
        scores = self.policy(batch["obs"]).unflatten(0, batch["action"].shape)
        term = (
            scores.square().sum(-1) + self.baseline(batch["obs"]).square().unflatten(0, batch["action"].shape)[..., 0]
        )
        return Losses(dict.fromkeys(parts, term))


class Relative(Sound):
    """Weighs a row by what the other rows of its batch have."""

    def forward(self, batch, parts):
        return super().forward(batch | {"weight": batch["obs"][..., 0] - batch["obs"][..., 0].mean()}, parts)


class Herding(Sound):
    """Acts by what it observes beside the mean of all environments."""

    def act(self, step, carry, mode):
        return super().act({"obs": step["obs"] - step["obs"].mean(0)}, carry, mode)


class Endless(Sound):
    def act(self, step, carry, mode):
        while mode == "greedy":
            time.sleep(1.0)
        return super().act(step, carry, mode)


class NotANumber(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        losses.terms["policy"] = losses.terms["policy"] * (batch["weight"] * 0).log()
        return losses


class Leaky(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        if "policy" in parts:
            losses.terms["policy"] = losses.terms["policy"] * self.baseline(batch["obs"]).squeeze(-1)
        return losses


class Orphan(Sound):
    def __init__(self, cfg, ctx):
        super().__init__(cfg, ctx)
        self.scale = nn.Parameter(torch.ones(()))


class Twofold(Sound):
    def optimizers(self):
        parts = super().optimizers()
        return parts | {"again": Optim(torch.optim.SGD(self.policy.parameters(), self.cfg.lr))}


class Asleep(Sound):
    def forward(self, batch, parts):
        return super().forward(batch, [part for part in parts if part != "baseline"])


class Outside(Sound):
    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return {"action": out["action"] + 2} if mode == "random" else out, carry


class Habitual(Sound):
    def act(self, step, carry, mode):
        return super().act(step, carry, "explore" if mode == "random" else mode)


class Indecisive(Sound):
    def act(self, step, carry, mode):
        return super().act(step, carry, "explore")


class Wide(Sound):
    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses({name: term[..., None] for name, term in losses.terms.items()})


class Local(Sound):
    def update(self, batch, learner):
        return learner.minimize(batch | {"weight": batch["weight"] - batch["weight"].mean()}, self)


class Secretive(Sound):
    def actor_keys(self):
        return ("policy.weight",)


class Defaulted(Sound):
    @settings
    class Config:
        lr: PositiveFloat = 0.1


class Sparse(Sound):
    @settings
    class Config:
        lr: PositiveFloat = option("Step size.")
        decay: PositiveFloat = option("Missing in the YAML.")


class Lax(Sound):
    class Config:
        def __init__(self, **options):
            self.__dict__ |= options


class Late(Replay):
    """Still samples a transition whose first row has been overwritten."""

    def _range(self, ring):
        low, high = super()._range(ring)
        return max(low - 1, 0), high


class Modest(Replay):
    def nbytes(self, row):
        return super().nbytes(row) // 2


class Wasteful(Replay):
    """Stores all its rows with every checkpoint."""

    def save(self, store):
        store.end = 0
        super().save(store)


class Amnesic(Replay):
    """Forgets which rows are valid."""

    def load(self, store):
        super().load(store)
        for ring in self.rings:
            ring.ids = ring.ids * 0 + ring.ids.max()


class Blank(Replay):
    def load(self, store):
        pass


class Borrowing(Rollout):
    def add(self, segment):
        self._segments.append(segment.batch)


class Wild(Exploration):
    @settings
    class Config:
        pass

    def __init__(self, cfg, ctx):
        super().__init__()

    def perturb(self, out, step, carry):
        return out | {"action": out["action"] + 3.0}, carry


class Tally(Exploration):
    """Rewards states less, the more often it was asked; it counts by itself."""

    Config = Wild.Config

    def __init__(self, cfg, ctx):
        super().__init__()
        self.register_buffer("level", torch.ones(4))
        self.calls = {"all": 0}

    @classmethod
    def reads(cls, cfg, spec):
        return ("obs",)

    def intrinsic_reward(self, batch):
        begins = batch["valid"].clone()
        begins[-1] = False
        return (batch["obs"] * self.level).sum(-1) * begins

    def observe(self, segment, learner):
        self.calls["all"] += 1


class Lopsided(Tally):
    """Its statistics are those of its own rank."""

    def observe(self, segment, learner):
        self.level.copy_(1.0 + segment.batch["obs"].mean((0, 1)))


class Unhearing(Lopsided):
    def observe(self, segment, learner):
        self.level.add_(learner.reduce(segment.batch["obs"].mean((0, 1)), "mean"))

    def load_state_dict(self, state_dict, strict=True, assign=False):
        pass


class Hazy(Model):
    @settings
    class Config:
        size: PositiveInt = option("Features.")

    def __init__(self, cfg, ctx):
        super().__init__()
        if ctx.space.shape != (4,):
            raise ConfigError("model", "reads vectors of 4")
        self.out_dim, self.linear, self.drop = cfg.size, nn.Linear(4, cfg.size), nn.Dropout(0.5)

    def forward(self, x, carry, is_first):
        return self.drop(self.linear(x)), carry


class Social(Hazy):
    def forward(self, x, carry, is_first):
        return self.linear(x - x.mean(-2, keepdim=True)), carry


class Sticky(Model):
    """A recurrent model that carries its state over into the next episode."""

    recurrent = True

    @settings
    class Config:
        size: PositiveInt = option("Features.")

    def __init__(self, cfg, ctx):
        super().__init__()
        if ctx.space.shape != (4,):
            raise ConfigError("model", "reads vectors of 4")
        self.out_dim, self.cell = cfg.size, nn.GRUCell(4, cfg.size)

    def initial_carry(self, n):
        return {"h": torch.zeros(n, self.out_dim)}

    def forward(self, x, carry, is_first):
        h, out = carry["h"], []
        for row in x if x.ndim == 3 else x[None]:
            h = self.cell(row, h)
            out.append(h)
        return (torch.stack(out) if x.ndim == 3 else h), {"h": h}


class Precise(VecEnv):
    """CartPole whose rewards are float64."""

    @settings
    class Config:
        pass

    def __new__(cls, cfg, ctx):
        env = make_list(find("CartPole-v1"), len(ctx.env_ids))
        env._reward = env._reward.astype(np.float64)
        return env


class Rigid(VecEnv):
    """CartPole that does not go on where it was saved."""

    Config = Precise.Config

    def __new__(cls, cfg, ctx):
        env = make_list(find("CartPole-v1"), len(ctx.env_ids))
        env.load = lambda state: None
        return env


class Stubborn(Alternate):
    """Counts its rounds by itself, and learns after every other one."""

    def run(self, run):
        rounds = 0
        while not run.done:
            run.collect()
            rounds += 1
            if rounds % 2:
                run.update()
            else:
                run.learner.sample()


class Misspelt:
    @settings
    class Config:
        pass

    def __init__(self, cfg, ctx):
        pass

    @hookimpl
    def rlplug_started(self, run):
        pass

    @hookimpl
    def rlplug_loged(self, run, metrics, step):
        pass


YAML = """# @package _global_
defaults:
  - override /buffer: rollout
num_envs: 2
rollout_fragment_length: 8
replay_ratio: null
algo:
  name: {name}
  lr: 0.01
"""

REPLAY = "capacity: 1000\ndevice: cpu\ndeduplicate: true\ncompress: null\ncompressed_share: 0.5\n"
ALGORITHMS = {cls.__name__.lower(): cls for cls in (Sound, *Sound.__subclasses__())}
MODULES = ("wild", "tally", "lopsided", "unhearing")
OTHERS = {
    ("buffer", "late"): "name: late\n" + REPLAY,
    ("buffer", "modest"): "name: modest\n" + REPLAY,
    ("buffer", "wasteful"): "name: wasteful\n" + REPLAY,
    ("buffer", "amnesic"): "name: amnesic\n" + REPLAY,
    ("buffer", "blank"): "name: blank\n" + REPLAY,
    ("buffer", "borrowing"): "name: borrowing\n",
    **{("exploration", name): f"# @package exploration.{name}\nname: {name}\n" for name in MODULES},
    **{("model", name): f"name: {name}\nsize: 8\n" for name in ("sticky", "hazy", "social")},
    ("loop", "stubborn"): "name: stubborn\nin_flight: 1\nbroadcast_interval: 1\nmax_weight_sync_delay: null\n"
    "preemption_threshold: null\nmin_rollout_fraction: 0.25\n",
    ("env", "precise"): "name: precise\n",
    ("env", "rigid"): "name: rigid\n",
    ("logger", "misspelt"): "# @package logger.misspelt\nname: misspelt\n",
}
CONF = {f"conf/algo/{name}.yaml": YAML.format(name=name) for name in ALGORITHMS}
CONF |= {f"conf/{kind}/{name}.yaml": text for (kind, name), text in OTHERS.items()}

MANIFEST = """
from rlplug import hookimpl
from tests.contract.toys import components

@hookimpl
def rlplug_components():
    return components()

@hookimpl
def rlplug_conf():
    return "rlplug_toys"
"""
FILES = {f"rlplug_toys/{name}": text for name, text in {"__init__.py": MANIFEST, **CONF}.items()}


def components() -> list[Component]:
    names = [*(("algo", name) for name in ALGORITHMS), *OTHERS]
    return [Component(kind, name, f"{__name__}:{_class_name(name)}") for kind, name in names]  # type: ignore[arg-type]


def _class_name(name: str) -> str:
    return next(key for key in globals() if key.lower() == name)
