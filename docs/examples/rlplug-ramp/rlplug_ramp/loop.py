"""Ramp: collect, then update, in turn, to begin with."""

from rlplug import Context, Loop, Run
from rlplug.settings import PositiveInt, option, settings


class Ramp(Loop):
    """It keeps no state: what it does follows from `run.progress` alone, so that a resumed run goes on in step."""

    # Every option: type, range, and what it does. The defaults stand in conf/loop/ramp.yaml.
    @settings
    class Config:
        in_flight: PositiveInt = option("Rounds that are ordered at a time; above 1, actors play on during updates.")

    def __init__(self, cfg: Config, ctx: Context):
        self.in_flight = cfg.in_flight
        # the tempo of learning, which an algorithm's YAML sets
        self.learning_starts, self.replay_ratio = ctx.learning_starts, ctx.replay_ratio
        self.round_steps = ctx.rollout_length * ctx.num_envs

    def run(self, run: Run):
        while not run.done:
            run.report()  # logs, evaluates and writes checkpoints, where they are due: once between two rounds
            run.collect("explore" if run.progress.env_steps >= self.learning_starts else "random")
            while run.ready() and run.progress.updates < self.updates(run.progress.env_steps):
                run.update()

    def updates(self, env_steps: int) -> int:
        """How many updates there are after so many steps: `replay_ratio` of each, or one a round."""
        per_step = 1.0 / self.round_steps if self.replay_ratio is None else self.replay_ratio
        return int(max(0, env_steps - self.learning_starts) * per_step)
