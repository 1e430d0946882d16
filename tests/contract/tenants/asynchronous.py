"""An environment that is slow in one actor, and a diary of segments."""

from __future__ import annotations

import json
import random
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from rlplug.api import Context, Run, Segment, VecEnv
from rlplug.envs import make_list
from rlplug.envs.making import find
from rlplug.registry import hookimpl
from rlplug.settings import PositiveFloat, option, settings


class Numbered(gymnasium.Env):
    """Observes how many steps its episode has, which ends after seven."""

    observation_space, action_space = Box(0.0, np.inf, (1,), np.float32), Discrete(2)

    def __init__(self):
        self.count = 0

    def observe(self):
        return np.array([self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, self.count == 7, False, {}


class NumberedBox(Numbered):
    """The same with actions of one number."""

    action_space = Box(-1.0, 1.0, (1,), np.float32)


class Jittery(Numbered):
    """The same with steps that take a millisecond, more or less."""

    def step(self, action):
        time.sleep(random.expovariate(1000.0))
        return super().step(action)


for world in (Numbered, NumberedBox, Jittery):
    gymnasium.register(f"{world.__name__}-v0", entry_point=f"{__name__}:{world.__name__}")


class Uneven(VecEnv):
    """An environment whose step takes ``seconds``, and ``factor`` times as long where environment 0 is played."""

    @settings
    class Config:
        id: str = option("Of Gymnasium.")
        seconds: PositiveFloat = option("Of a step.")
        factor: PositiveFloat = option("By which the first environment is slower.")

    def __new__(cls, cfg: Config, ctx: Context):
        env = make_list(find(cfg.id), len(ctx.env_ids))
        slow = ctx.role == "actor" and 0 in ctx.env_ids
        pause, step = cfg.seconds * (cfg.factor if slow else 1.0), env.step

        def paused(action):
            time.sleep(pause)
            return step(action)

        env.step = paused
        return env


class Diary:
    """Writes down every segment."""

    @settings
    class Config:
        pass

    def __init__(self, cfg: Config, ctx: Context) -> None:
        pass

    def write(self, run: Run, **entry) -> None:
        with (run.run_dir / "diary.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": run.progress.env_steps} | entry) + "\n")

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        self.write(run, shard=None)

    @hookimpl
    def rlplug_collected(self, run: Run, segment: Segment) -> None:
        batch = segment.batch
        obs, valid = batch["obs"][:, :, 0].T.tolist(), batch["valid"].T.tolist()
        self.write(run, shard=segment.shard, obs=obs, valid=valid)


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.asynchronous:"
    return [Component("env", "uneven", module + "Uneven"), Component("logger", "diary", module + "Diary")]

@hookimpl
def rlplug_conf():
    return "rlplug_uneven"
"""
FILES = {
    "rlplug_uneven/__init__.py": MANIFEST,
    "rlplug_uneven/conf/env/uneven.yaml": "name: uneven\nid: CartPole-v1\nseconds: 0.001\nfactor: 5.0\n",
    "rlplug_uneven/conf/logger/diary.yaml": "# @package logger.diary\nname: diary\n",
}
