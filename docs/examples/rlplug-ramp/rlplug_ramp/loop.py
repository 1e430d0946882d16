"""Ramp: collect and update in turn, with a replay ratio that grows to its full size.

Networks that overfit to few transitions keep part of that for good, the primacy bias of Nikishin et al. 2022
(arXiv:2205.07802). So this loop makes fewer updates on the first transitions.
"""

from rlplug import Algorithm, ConfigError, Context, Loop, Needs, Run, Tempo
from rlplug.settings import PositiveInt, option, settings


class Ramp(Loop):
    """Keeps no state: its decisions follow only from `run.progress`, so that a resumed run continues identically."""

    # Every option: type, range, and what it does. The defaults are in conf/loop/ramp.yaml.
    @settings
    class Config:
        ramp_steps: PositiveInt = option("Environment steps in which the replay ratio grows from 0 to replay_ratio.")
        in_flight: PositiveInt = option("Rounds requested at a time; above 1, actors collect during updates.")

    def __init__(self, cfg: Config, ctx: Context):
        if ctx.replay_ratio is None:
            raise ConfigError("replay_ratio", "loop=ramp lets it grow to a number, and null is none; take one")
        self.ramp_steps, self.tempo = cfg.ramp_steps, Tempo(in_flight=cfg.in_flight)
        # the update frequency, which an algorithm's YAML sets
        self.learning_starts, self.replay_ratio = ctx.learning_starts, ctx.replay_ratio

    @classmethod
    def refusal(cls, algorithm: type[Algorithm], needs: Needs):
        """Return why the loop cannot drive an algorithm, or None if it can."""
        return None if needs.off_policy else f"learns less often at first, and {algorithm.__name__} is on-policy"

    def run(self, run: Run):
        while not run.done:
            run.report()  # logs, evaluates and writes checkpoints when due: once between two rounds
            run.collect("explore" if run.progress.env_steps >= self.learning_starts else "random")
            while run.ready() and run.progress.updates < self.updates(run.progress.env_steps):
                run.update()

    def updates(self, env_steps: int) -> int:
        """Return the number of updates after `env_steps`: the cumulative ratio since `learning_starts`."""
        steps = max(0, env_steps - self.learning_starts)
        on_ramp = min(steps, self.ramp_steps)
        return int(self.replay_ratio * (on_ramp**2 / (2 * self.ramp_steps) + steps - on_ramp))
