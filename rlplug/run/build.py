"""Construction of all parts of a run, on one rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from rlplug import pretrained
from rlplug.api import Buffer, Collector, Plan, VecEnv
from rlplug.collection.in_process import InProcessCollector
from rlplug.config import RunConfig
from rlplug.context import ResolvedRun, RunContext
from rlplug.contract import results
from rlplug.contract.members import check_env
from rlplug.data.advice import of_recordings
from rlplug.data.collector import MixedCollector, open_recording
from rlplug.distributed.collectives import Collectives
from rlplug.distributed.fabric import AnyFabric, fabric_of, shared_store
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.envs.pictures import check_pictures
from rlplug.envs.spec_json import require_equal
from rlplug.estimation.estimation import estimation_of
from rlplug.evaluation.evaluator import ALONE
from rlplug.run import checks
from rlplug.run.callbacks import Callbacks
from rlplug.tracking import register
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.placement import Placement
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec


def build(
    config: RunConfig, run_dir: Path, fabric: AnyFabric | None = None, plan: Plan | None = None, identity: str = ""
) -> Trainer:
    """Build and check a run, without writing files or starting other processes.

    Args:
        fabric: this rank's Fabric; None: build as rank 0, on the CPU if ranks are separate processes.
        plan: replaces the hardware's plan.
        identity: identity of the resumed run; empty for a new one.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    resolved = resolve(config, plan)
    plan, ranks, num_envs = resolved.plan, resolved.plan.world_size, config.num_envs
    set_up_torch(plan, config.deterministic)
    elsewhere = fabric is None and (ranks > 1 or plan.launcher == "ray")
    if fabric is None:
        fabric = fabric_of(replace(plan, devices=1, num_nodes=1, accelerator="cpu" if elsewhere else plan.accelerator))
    placement = Placement(Collectives(fabric), num_envs % ranks != 0)
    rank, parts = fabric.global_rank, 1 if num_envs % ranks else ranks  # this process may stand for the first rank
    env_ids = range(rank % parts * num_envs // parts, (rank % parts + 1) * num_envs // parts)
    said = "its networks are too large, there is no memory for {}; make it smaller"
    with checks.memory(lambda what: ConfigError("model", said.format(what))):
        policy = BehaviorPolicy(config, resolved.context(fabric.device, env_ids, rank, ranks))
    if not identity:  # a resumed run has its own weights
        pretrained.load(policy.algorithm, policy.normalizer, config)
    buffer: Buffer = config.buffer.build(policy.ctx)
    trusted = policy.ctx.traceable([policy.algorithm, *policy.exploration.values()])  # compile=auto compiles only these
    learner = RankLearner(
        fabric=fabric,
        ctx=policy.ctx,
        algorithm=policy.algorithm,
        buffer=buffer,
        exploration=policy.exploration,
        normalizer=policy.normalizer,
        watching=[] if policy.curriculum is None else [policy.curriculum],
        placement=placement,
        microbatches=plan.microbatches,
        compile=config.compile if trusted or config.compile == "max" else "off",
        on_nan=config.on_nan,
        precision=plan.precision,
        scale_losses=plan.precision == "16-mixed",
    )
    modules = zip(config.exploration.values(), policy.exploration.values(), strict=True)
    for chosen, who in ((config.algo, policy.algorithm), *modules):
        following = policy.ctx.schedules.following
        results.check_step_sizes(chosen.key, chosen.cfg, who, partial(learner.parts, who), following)
    identity = identity or placement.ranks.broadcast(uuid4().hex)  # equal on all ranks
    estimator = estimation_of(config, policy.algorithm, policy.ctx, policy.normalize)
    given = {slot for slot in config.models if slot != "model" and config.raw[slot] is not None}
    for slot in given - {slot for slot, _ in policy.ctx.built} if rank == 0 and estimator is None else ():
        raise ConfigError(slot, f"{config.algo.name}, as it is set up, builds no network from this slot; leave it out")
    trainer = Trainer(
        resolved=resolved,
        run_dir=run_dir,
        policy=policy,
        collector=placement.collector(partial(_collector, resolved, policy, learner)),
        learner=learner,
        reports=Callbacks(policy, plan.actors is not None and plan.actors.evaluation > 0, estimator, identity),
    )
    if config.record.path is not None and placement.collects:
        trainer.reports.record(trainer)
    try:
        if config.eval.env:
            with closing(policy.env(ALONE)) as env:
                require_equal(resolved.spec, env.spec, "eval.env")
        if config.eval.record:
            check_pictures(policy.env(ALONE, render=True))
        checks.check_fit(trainer, elsewhere)
    except BaseException:
        trainer.close()
        raise
    return trainer


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


def _collector(resolved: ResolvedRun, policy: BehaviorPolicy, learner: RankLearner) -> Collector:
    """Create the collector of this rank."""
    data, ctx = resolved.config.data, policy.ctx
    recorded = 0 if data.path is None else data.envs or len(ctx.env_ids)
    recording = resolved, policy.algorithm, ctx, policy.finishing(ctx.needs.keys)
    if recorded == len(ctx.env_ids):
        return InProcessCollector(open_recording(*recording, ctx.env_ids), None, learner.progress)
    if resolved.plan.actors is not None:
        from rlplug.actors.collector import RayCollector

        return RayCollector(policy, resolved, learner.progress)
    loop, ranks = resolved.loop, learner.placement.parts
    preemption = loop.preemption(shared_store(), ranks) if loop.preemption is not None and ranks > 1 else None
    shard = policy.shard(ctx.env_ids[recorded:], compiler=learner.steps.compiler)
    if recorded:
        shard = MixedCollector(open_recording(*recording, ctx.env_ids[:recorded]), shard)
    return InProcessCollector(shard, policy.player(), learner.progress, loop.tempo.broadcast_interval > 1, preemption)


def start(trainer: Trainer) -> None:
    """Start a run's Ray actors and collector, and register its loggers. Raises ``ConfigError``."""
    plan, placement, first = trainer.resolved.plan, trainer.learner.placement, trainer.ctx.rank == 0
    if plan.actors is not None:
        from rlplug.actors.cluster import connect

        trainer.close_with(connect(plan, first, placement.collects, placement.ranks.broadcast))
        if first and plan.actors.evaluation:
            trainer.reports.evaluation.start(trainer.resolved)
    trainer.collector.start()
    register(trainer)
