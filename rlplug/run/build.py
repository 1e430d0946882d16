"""Build everything that a run consists of, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlplug.api import Buffer, Collector, Plan
from rlplug.collection.broadcast import BroadcastCollector
from rlplug.config import RunConfig
from rlplug.context import ResolvedRun
from rlplug.distributed.fabric import Fabric, fabric_of
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.evaluation.video import ALONE, check_pictures
from rlplug.run import checks
from rlplug.run.callbacks import Callbacks, Evaluation, MetricsLog
from rlplug.run.resolve import resolve
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.policy import Policy
from rlplug.trainer.trainer import Trainer


def build(
    config: RunConfig,
    run_dir: Path,
    fabric: Fabric | None = None,
    plan: Plan | None = None,
    identity: str | None = None,
) -> Trainer:
    """Build and check a run; nothing is written, and nobody outside of this process is asked.

    Args:
        fabric: of this rank. None: this process is the only one, and builds what the first rank will have; where
            ranks are processes of their own, on the processor.
        plan: another one than the hardware's.
        identity: of the run that is continued; None: it is a new one.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    resolved = resolve(config, plan)
    plan, elsewhere = resolved.plan, False
    set_up_torch(plan, config.deterministic)
    if fabric is None:
        elsewhere = plan.world_size > 1 or plan.launcher == "ray"
        alone = replace(plan, devices=1, num_nodes=1)
        fabric = fabric_of(replace(alone, accelerator="cpu", precision="32-true") if elsewhere else alone)
    rank, ranks, num_envs = fabric.global_rank, plan.world_size, config.num_envs
    replicated, share = num_envs % ranks != 0, num_envs // ranks
    env_ids = range(num_envs) if replicated else range(rank * share, (rank + 1) * share)
    policy = Policy(config, resolved.context(fabric.device, env_ids, rank, ranks))
    buffer: Buffer = config.buffer.build(policy.ctx)
    learner = FabricLearner(
        fabric=fabric,
        ctx=policy.ctx,
        algorithm=policy.algorithm,
        buffer=buffer,
        exploration=policy.exploration,
        normalizer=policy.normalizer,
        microbatches=plan.microbatches,
        compile=config.compile,
        on_nan=config.on_nan,
        replicated=replicated,
        scale_losses=plan.precision == "16-mixed",
    )
    is_async = plan.actors is not None and plan.actors.evaluation > 0
    evaluation = Evaluation(config.eval, policy, run_dir, is_async)
    callbacks = Callbacks(run_dir, config.checkpoint, MetricsLog(config.log.every), evaluation, identity or uuid4().hex)
    collector = _collector(resolved, policy, learner)
    trainer = Trainer(
        resolved=resolved,
        run_dir=run_dir,
        policy=policy,
        buffer=buffer,
        collector=collector,
        learner=learner,
        reports=callbacks,
    )
    try:
        if config.eval.record:
            check_pictures(lambda: policy.env(ALONE, render=True))
        checks.check_fit(resolved, buffer, collector, elsewhere)
    except BaseException:
        trainer.close()
        raise
    return trainer


def _collector(resolved: ResolvedRun, policy: Policy, learner: FabricLearner) -> Collector:
    """Make the collector of this rank's environments; where these do not divide by the ranks, the first one's."""
    ranks, actors = learner.collectives, resolved.plan.actors
    broadcast: Callable[[Any], Any] = ranks.broadcast
    if learner.replicated and ranks.rank != 0:
        return BroadcastCollector(None, broadcast)
    own: Collector
    if actors is None:
        own = policy.collector(policy.ctx.env_ids)
    else:
        from rlplug.actors.collector import RayCollector

        count = actors.count // (1 if learner.replicated else resolved.plan.world_size)
        own = RayCollector(policy, resolved, learner.progress, policy.ctx.env_ids, count, ranks.rank * count)
    return BroadcastCollector(own, broadcast) if learner.replicated else own


def start(trainer: Trainer) -> None:
    """Start the Ray actors of a run, if it has any, and make its collector ready.

    Raises:
        ConfigError: they cannot be had.
    """
    plan, ranks = trainer.resolved.plan, trainer.learner.collectives
    if plan.actors is not None:
        from rlplug.actors import join

        first = ranks.rank == 0
        cluster = join(plan, first, first or not trainer.learner.replicated, ranks.broadcast)
        if cluster is not None:
            trainer.close_with(cluster)
        if first and plan.actors.evaluation:
            from rlplug.actors.evaluation import AsyncEval

            callbacks: Any = trainer.reports
            callbacks.evaluation.start(AsyncEval(trainer.policy, trainer.resolved))
    trainer.collector.start()
