"""Work out what follows from a configuration, once."""

from __future__ import annotations

from rlplug.api import Plan
from rlplug.config import RunConfig
from rlplug.context import EnvShard, ResolvedRun, RunContext
from rlplug.run import checks
from rlplug.types import EnvSpec


def resolve(config: RunConfig, plan: Plan | None = None) -> ResolvedRun:
    """Read the hardware plan and the environment's spaces, and check that everything goes together.

    Args:
        plan: another one than the hardware's.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    chosen: Plan = config.hardware.build(None).plan() if plan is None else plan
    resolved = ResolvedRun.read(config, chosen, read_spec(config))
    checks.check(resolved)
    return resolved


def read_spec(config: RunConfig) -> EnvSpec:
    """Make the configured environment, read its spaces, and close it."""
    ctx = RunContext(spec=EnvSpec({}), seed=config.seed)
    env = config.env.build(ctx.derive(shard=EnvShard("learner", 1, range(1))))
    env.close()
    return env.spec
