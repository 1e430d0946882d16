"""Checks of jobs, which loops and evaluations of plugins request."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.api import Algorithm, Job
from rlplug.types import ConfigError, EnvSpec, NamedWeights, RunError


def check_job(job: Job, weights: NamedWeights, algorithm: Algorithm, spec: EnvSpec) -> None:
    """Check that the environment and the algorithm can play a job with these weights.

    Raises:
        ConfigError: it has a task, but the environment offers none.
        ValueError: the weights are missing, the algorithm does not act with them, or a submodule has a mode but does
            not act.
    """
    if job.task is not None and spec.tasks is None:
        raise ConfigError("env", f"job {job.number} has a task, but this environment has none; use another")
    keys = set[str]()
    for who, name in job.policies.items():
        if name not in weights:
            given = ", ".join(map(repr, weights)) or "none"
            raise ValueError(f"job {job.number} plays with the weights {name!r}; available: {given}")
        keys |= {f"{who}.{key}".removeprefix(".") for key in weights[name]}
    if unknown := keys - {*algorithm.actor_keys()}:
        said = f"which {type(algorithm).__name__}.actor_keys() does not name"
        raise ValueError(f"job {job.number} plays with {min(unknown)!r}, {said}")
    acting = {who for who, part in algorithm.named_modules() if hasattr(part, "act")}
    if unknown := set() if isinstance(job.mode, str) else job.mode.keys() - acting:
        raise ValueError(f"job {job.number} has a mode for {min(unknown)!r}, which is no submodule that acts")


def check_jobs(jobs: Sequence[Job], parts: int) -> None:
    """Check that jobs differ in their numbers, and that each of ``parts`` ranks plays one if it receives its own only.

    Raises:
        RunError: they do not.
    """
    if len({job.number for job in jobs}) < len(jobs):
        raise RunError("two jobs have one number, which determines their random numbers; number them differently")
    if len(jobs) < parts:
        raise RunError(f"mine=True: {len(jobs)} jobs for {parts} ranks; add jobs, so that each has one")
