"""Evaluations and off-policy estimates of a finished run's policy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlplug.agent import core_of, restored
from rlplug.api import Plan, VecEnv
from rlplug.checkpointing.format import Checkpoint, find
from rlplug.checkpointing.installed import check_installed
from rlplug.config import Core, choose, migrate
from rlplug.config.schema import eval_env
from rlplug.context import EnvShard, recorded_keys
from rlplug.data.recorder import digest, episode_files
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.envs.spec_json import mismatch
from rlplug.estimation.estimation import Estimation
from rlplug.evaluation.evaluator import Evaluator
from rlplug.pretrained import adopt
from rlplug.types import ConfigError, Mode

# keys that may change for an evaluation, and for an estimate
EVALUABLE = (
    "eval.episodes",
    "eval.steps",
    "eval.timeout_s",
    "eval.max_episode_steps",
    "eval.record",
    "eval.function",
    "seed",
    "env",
    "hardware",
    "deterministic",
    "record",
)
ESTIMABLE = ("estimate", "estimator", "estimate_model", "data", "seed", "hardware", "deterministic")


def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = warnings.warn,
    mode: Mode = "greedy",
    against: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Play episodes in a run's environment, without writing files unless ``record.path`` is given.

    With the run's ``seed`` and ``eval.episodes``, they are the episodes of its evaluation at the checkpoint's step.
    They are played on one device of the run's hardware, or on the CPU if that is not available.

    Args:
        path: see ``agent.load``.
        overrides: as on the command line: ``eval.episodes=100``, ``seed=7``, ``hardware=cpu``, ``+env.kwargs.g=9.8``.
        tell: called with each line for the user.
        mode: ``greedy``; ``explore``, which samples from the policy without exploration modules; or ``random``.
        against: runs whose policies play, by policy; see ``pretrained.adopt``.

    Returns:
        ``checkpoint``, ``env_steps``, ``updates``, ``episodes``, ``seed`` and the metrics ``eval/...``.

    Raises:
        ConfigError: see ``agent.load``; or the overrides are invalid, or change the environment's spaces.
    """
    checkpoint, raw, core, algorithm, ctx, normalize, make = stage(path, overrides, tell)
    manifest, keys, files = checkpoint.manifest, None, None
    adopt(algorithm, core, against, "against")
    if any(re.match(r"\+*record(\.path)?=", override) for override in overrides) and core.record.path is not None:
        name = f"{manifest['run'][:12]}-eval-{checkpoint.steps}-{core.seed}-{mode}-{core.eval.episodes}-{digest(raw)}"
        files = episode_files(core, raw, ctx.spec, name, checkpoint=str(checkpoint.path), mode=mode)
        ctx.needs = replace(ctx.needs, recorded=recorded_keys(ctx.spec, ctx.needs))
        keys = [key for key in (*ctx.needs.keys, *ctx.needs.recorded) if key != "logp" or mode != "greedy"]
    with closing(Evaluator(make, algorithm, ctx, core.eval, normalize, keys=keys)) as evaluator:
        if mode != "greedy" or files is not None:
            evaluator.job = replace(evaluator.job, mode=mode)
        if files is None:
            metrics, played = evaluator.evaluate(lambda jobs, w: [evaluator.play(j, checkpoint.steps, w) for j in jobs])
        else:
            played = evaluator.play(evaluator.job, checkpoint.steps)
            metrics = evaluator.metrics(played)
            if played:
                files.add_all(played)
    if not played and evaluator.own is None:
        raise ConfigError("eval.timeout_s", f"no episode ended within {core.eval.timeout_s:g} seconds; raise it")
    if files is not None or evaluator.own is None:  # else its return may be another one
        metrics |= {f"eval/return_{name}": getattr(played["return"], name)().item() for name in ("min", "max")}
    return _about(checkpoint, core, len(played.get("return", ()))) | metrics


def stage(path: str | Path, overrides: Sequence[str], tell: Callable[[str], None]) -> tuple[Any, ...]:
    """Return checkpoint, settings, core settings, algorithm, context, normalization, and ``make(shard, render)``."""
    checkpoint, raw, core, plan = _opened(path, overrides, EVALUABLE, tell, "an evaluation")
    if raw["env"]["name"] == checkpoint.manifest["config"]["env"]["name"]:
        check_installed({"env": checkpoint.manifest["plugins"]["env"]})
    given = any(re.match(r"\+*env\b", override) for override in overrides)
    env = choose("env", "env", raw["env"] if given else eval_env(raw))
    algorithm, ctx, normalizer = restored(checkpoint, torch.device(plan.accelerator), core, tell)

    def make(shard: EnvShard, render: bool = False) -> VecEnv:
        made = env.build(ctx.derive(shard=shard, render=render))
        if difference := mismatch(ctx.spec, replace(made.spec, max_episode_steps=ctx.spec.max_episode_steps)):
            made.close()
            raise ConfigError("env", f"is not the environment of {checkpoint.path}: {difference}")
        return made

    return checkpoint, raw, core, algorithm, ctx, normalizer if normalizer.obs else None, make


def estimate(
    path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = warnings.warn
) -> dict[str, Any]:
    """Estimate the return of a run's policy from recorded episodes; see ``estimation.Estimation``.

    It needs neither the environment nor the run's hardware. The policy is that of mode ``explore``, without exploration
    modules.

    Args:
        path, tell: see ``evaluate``.
        overrides: as on the command line: ``data.path=data/medium``, ``estimate.gamma=0.99``, ``seed=7``.

    Returns:
        ``checkpoint``, ``env_steps``, ``updates``, ``episodes``, ``seed``, ``steps``, ``confidence`` and the metrics
        ``estimate/...``.

    Raises:
        ConfigError: see ``agent.load``; or there are no episodes, or they lack data that the estimates need.
    """
    checkpoint, raw, core, plan = _opened(path, overrides, ESTIMABLE, tell, "an estimate")
    asked = core.estimate.path is None or any(re.match(r"\+*data\.path=", override) for override in overrides)
    if (paths := core.data.path if asked else core.estimate.path) is None:
        raise ConfigError("data.path", "is missing: estimates need recorded episodes, data.path=<folder>")
    algorithm, ctx, normalizer = restored(checkpoint, torch.device(plan.accelerator), core, tell)
    if (node := raw.get("estimate_model")) is not None:
        ctx.slots = {**ctx.slots, "estimate_model": choose("model", "estimate_model", node)}
    normalize, key = normalizer if normalizer.obs else None, "data.path" if asked else "estimate.path"
    chosen = {name: choose("estimator", f"estimator.{name}", node) for name, node in raw["estimator"].items()}
    estimator = Estimation.reading(core, paths, key, algorithm, ctx, chosen, normalize, tell)
    about = _about(checkpoint, core, len(estimator.lengths))
    about |= {"steps": estimator.recording.steps(), "confidence": core.estimate.confidence}
    return about | estimator.estimate(checkpoint.steps)


def _opened(
    path: str | Path, overrides: Sequence[str], may: Sequence[str], tell: Callable[[str], None], what: str
) -> tuple[Checkpoint, dict[str, Any], Core, Plan]:
    """Return a checkpoint, its configuration with overrides of the keys ``may``, and the plan to use it with."""
    from rlplug.config.changes import change  # here, because it imports Hydra

    checkpoint, why = find(Path(path), ("weights",), tell), f"{what} can change only {', '.join(may)}"
    raw = change(migrate(checkpoint.manifest["config"], may), overrides, may, why)
    core, plan = core_of(raw), _machine(raw, overrides, tell, what)
    set_up_torch(plan, core.deterministic)
    return checkpoint, raw, core, plan


def _about(checkpoint: Checkpoint, core: Core, episodes: int) -> dict[str, Any]:
    counts = {name: checkpoint.manifest[name] for name in ("env_steps", "updates")}
    return {"checkpoint": str(checkpoint.path), **counts, "episodes": episodes, "seed": core.seed}


def _machine(raw: Mapping[str, Any], overrides: Sequence[str], tell: Callable[[str], None], what: str) -> Plan:
    """Return the run's hardware plan, or the CPU if that is not available and not requested."""
    try:
        plan: Plan = choose("hardware", "hardware", raw["hardware"]).plan()
        if plan.accelerator == "cuda" and not torch.cuda.is_available():  # the run used another machine
            raise ConfigError("hardware", "needs a CUDA device, but none was found")
    except ConfigError as error:
        if any(re.match(r"\+*hardware\b", override) for override in overrides):
            raise
        tell(f"{what} runs on the CPU because the run's hardware is not available: {error}")
        return Plan()
    return plan
