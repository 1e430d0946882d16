"""A loop that never waits for the slowest actor, and an environment that is slow in one of them."""

from __future__ import annotations

import time

from rlplug.api import Context, Loop, Run
from rlplug.envs import make_list
from rlplug.envs.making import find
from rlplug.settings import PositiveFloat, PositiveInt, option, settings


class Eager(Loop):
    """Updates with the segments that are ready first."""

    @settings
    class Config:
        shards: PositiveInt | None = option("Shards that are waited for; null: all.")
        in_flight: PositiveInt = option("Rollouts of a shard that are ordered at a time.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.shards, self.in_flight = cfg.shards, cfg.in_flight
        self.replay_ratio = ctx.replay_ratio or 0.0

    def updates(self, env_steps: int) -> int:
        return int(env_steps * self.replay_ratio)

    def run(self, run: Run) -> None:
        while not run.done:
            run.report()
            run.collect(shards=self.shards)
            while run.ready() and run.progress.updates < self.updates(run.progress.env_steps):
                run.update()


class Uneven:
    """CartPole-v1 whose step takes ``seconds``, and ``factor`` times as long where environment 0 is played."""

    @settings
    class Config:
        seconds: PositiveFloat = option("Of a step.")
        factor: PositiveFloat = option("By which the first environment is slower.")

    def __new__(cls, cfg: Config, ctx: Context):
        env = make_list(find("CartPole-v1"), len(ctx.env_ids))
        slow = ctx.role == "actor" and 0 in ctx.env_ids
        pause, step = cfg.seconds * (cfg.factor if slow else 1.0), env.step

        def paused(action):
            time.sleep(pause)
            return step(action)

        env.step = paused
        return env


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    module = "tests.contract.tenants.asynchronous:"
    return [Component("loop", "eager", module + "Eager"), Component("env", "uneven", module + "Uneven")]

@hookimpl
def rlplug_conf():
    return "rlplug_eager"
"""
FILES = {
    "rlplug_eager/__init__.py": MANIFEST,
    "rlplug_eager/conf/loop/eager.yaml": "name: eager\nshards: 1\nin_flight: 2\n",
    "rlplug_eager/conf/env/uneven.yaml": "name: uneven\nseconds: 0.001\nfactor: 5.0\n",
}
