"""Resolution of a configuration to the values derived from it."""

from __future__ import annotations

from rlplug.api import Plan, VecEnv
from rlplug.config import RunConfig
from rlplug.context import ResolvedRun, RunContext
from rlplug.contract.members import check_env
from rlplug.data.advice import of_recordings
from rlplug.run import checks
from rlplug.types import EnvSpec


def resolve(config: RunConfig, plan: Plan | None = None) -> ResolvedRun:
    """Read the environment's spaces and, unless ``plan`` is given, the hardware's plan; check compatibility.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    chosen: Plan = config.hardware.plan() if plan is None else plan
    env: VecEnv = config.env.build(RunContext(spec=EnvSpec({}), seed=config.seed))
    spec = check_env(env)
    env.close()
    with of_recordings(config, spec):
        resolved = ResolvedRun(config, chosen, spec)
    checks.check(resolved)
    return resolved
