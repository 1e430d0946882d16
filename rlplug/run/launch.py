"""From a validated configuration to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from rlplug.api import Plan
from rlplug.checkpointing.reading import Checkpoint, checkpoints, find, tidy
from rlplug.config import RunConfig, choose, migrate, parse, show
from rlplug.config.overrides import RESUMABLE, WHY, change, differences, told
from rlplug.config.run import chosen_name
from rlplug.distributed.fabric import Fabric, fabric_of, launched_elsewhere, require_started
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.registry.installed import check_installed, check_same, installed
from rlplug.run import run_dir
from rlplug.run.build import build, start
from rlplug.run.describe import describe
from rlplug.run.drive import disk_errors, drive, with_way_back
from rlplug.run.state import restore
from rlplug.trainer.trainer import Trainer
from rlplug.types import CheckpointError, ConfigError, RunError


def train(config: RunConfig, folder: Path, command: Sequence[str] = (), tell: Callable[[str], None] = print) -> float:
    """Run ``config`` and write everything about it into ``folder``.

    Args:
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation: the score that sweepers maximise.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        RunError: the run could not go on.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM, and its folder says so; it holds the signal.
    """
    plan: Plan = config.hardware.build(None).plan()
    return _launched(plan, lambda: config, folder, tell, _train, config.raw, folder, list(command))


def resume(path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = print) -> float | None:
    """Continue a run where its newest good checkpoint was written.

    Args:
        path: the run folder.
        overrides: changes to what does not alter learning, as on the command line.
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation; None for a run that has finished already.

    Raises:
        ConfigError: the run cannot be continued (so); nothing was written.
        RunError, KeyboardInterrupt: as in ``train``.
    """
    folder = Path(path)
    raw, manifest = run_dir.read(folder)
    new = change(raw, overrides, RESUMABLE, WHY)
    check_installed(_kept(new, manifest))
    plan: Plan = choose("hardware", "hardware", new["hardware"]).build(None).plan()
    return _launched(plan, lambda: parse(new), folder, tell, _resume, folder, list(overrides))


def _kept(raw: dict[str, Any], manifest: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Where the components come from that are as they were when the run began."""
    return {key: origin for key, origin in manifest["plugins"].items() if chosen_name(raw, key) == origin["name"]}


def _launched(
    plan: Plan,
    config: Callable[[], RunConfig],
    folder: Path,
    tell: Callable[[str], None],
    work: Any,
    *args: Any,
) -> Any:
    """Call ``work(fabric, tell, plan, *args)`` on every rank.

    It runs in this process, if that is the only rank or was started as one of several. Otherwise ranks are processes of
    their own; a run that broke off is continued as often as the plan allows.
    """
    on_ray = plan.launcher == "ray"
    require_started(plan)
    if launched_elsewhere() or (plan.world_size == 1 and not plan.max_restarts and not on_ray):
        return work(fabric_of(plan), tell, plan, *args)
    if plan.num_nodes > 1:
        raise ConfigError(
            "hardware.num_nodes", f"{plan.num_nodes} machines: start rlplug by torchrun or srun on each of them"
        )
    with closing(build(config(), folder, plan=plan)):
        pass  # mistakes are found before any process is started
    if on_ray:
        from rlplug.actors.launcher import on_cluster as start_ranks
    else:
        start_ranks = spawn_ranks
    restarts = plan.max_restarts
    while True:
        try:
            return start_ranks(plan, work, plan, *args, tell=tell)
        except RunError as error:
            if not restarts or not checkpoints(folder):
                if isinstance(error, RankError):  # the rank had no time to say this itself
                    raise RankError(with_way_back(error, folder, next(iter(checkpoints(folder)), None))) from None
                raise
            restarts -= 1
            tell(f"{error}\ncontinuing by itself, {restarts} more times if need be")
            work, args = _resume, (folder, [])


def _train(
    fabric: Fabric, tell: Callable[[str], None], plan: Plan, raw: dict[str, Any], folder: Path, command: list[str]
) -> float:
    raw, folder = fabric.broadcast((raw, folder))
    check_same_versions(fabric)
    config = parse(raw)
    with closing(build(config, folder, fabric, plan)) as trainer, disk_errors(folder):
        start(trainer)
        loggers = _loggers(trainer)
        if fabric.is_global_zero:
            run_dir.require_new(folder)
        with _written(folder, fabric, "hydra.run.dir"):
            if fabric.is_global_zero:
                run_dir.create(folder, config, plan, trainer.reports.identity, command)
            return drive(trainer, loggers)


def _resume(
    fabric: Fabric, tell: Callable[[str], None], plan: Plan, folder: Path, overrides: list[str]
) -> float | None:
    if not fabric.is_global_zero:
        tell = _nobody
    check_same_versions(fabric)
    raw, manifest = run_dir.read(folder)
    new = change(raw, overrides, RESUMABLE, WHY)
    changed = differences(raw, new)
    with disk_errors(folder), _written(folder, fabric):
        for note in (*check_installed(_kept(new, manifest)), *run_dir.other_versions(manifest)):
            tell(note)
        config = parse(new)
        checkpoint = find(folder, tell=tell) if fabric.is_global_zero and checkpoints(folder) else None
        path = fabric.broadcast(checkpoint and checkpoint.path)
        if path is not None:
            checkpoint = checkpoint or Checkpoint(path)
            _check_own(checkpoint, manifest["run"], config)
        done = run_dir.finished(folder)
        made = checkpoint.manifest["env_steps"] if checkpoint is not None else None
        over = config.total_steps == raw["total_steps"] if made is None else config.total_steps - made < config.num_envs
        if done and over:
            tell(f"{folder} has finished: {done}. To go on, give it more than total_steps={config.total_steps}")
            return None
        if done and checkpoint is None:
            raise CheckpointError(f"{folder} has finished, and its checkpoints are gone: nothing to go on from")
        with closing(build(config, folder, fabric, plan, manifest["run"])) as trainer:
            start(trainer)
            missing = restore(trainer, checkpoint) if checkpoint is not None else []
            loggers = _loggers(trainer)
            for line in told(changed):
                tell(line)
            steps = trainer.progress.env_steps
            tell(f"continuing from {f'step {steps:,}' if checkpoint else 'the beginning: there was no checkpoint yet'}")
            for what in missing:
                tell(f"not exactly as it would have gone on: {what}")
            fabric.barrier()  # every rank has read what it needs
            if fabric.is_global_zero:
                for aside in tidy(folder, checkpoint):
                    tell(f"what is damaged was set aside as {aside}")
                run_dir.note_resumed(folder, config, manifest, trainer.progress.env_steps, changed)
            return drive(trainer, loggers)


def _nobody(line: str) -> None:
    """Take what ranks other than the first would tell."""


def _written(folder: Path, fabric: Fabric, key: str = "") -> AbstractContextManager[None]:
    """Lock the run folder, into which only the first rank writes."""
    return run_dir.locked(folder, key) if fabric.is_global_zero else nullcontext()


def check_same_versions(fabric: Fabric) -> None:
    """Check that this rank has the same software as the first one.

    Raises:
        ConfigError: another version of rlplug, of a library or of a plugin is installed here, or none.
    """
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")


def _check_own(checkpoint: Checkpoint, run: str, config: RunConfig) -> None:
    """Check that the run ``run``, as it is configured now, can continue from ``checkpoint``.

    Raises:
        ConfigError: it is another run's, or the configuration was changed where it may not be.
    """
    if checkpoint.manifest["run"] != run:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of another run")
    for key, old, new in differences(migrate(checkpoint.manifest["config"]), config.raw):
        if key.split(".")[0] not in RESUMABLE:
            raise ConfigError(key, f"was {show(old)}, and is {show(new)} in config.yaml now, but {WHY}")
    made, total = checkpoint.manifest["env_steps"], config.total_steps
    if total < made:
        raise ConfigError("total_steps", f"{total} is less than the {made} steps that the run has made already")


def _loggers(trainer: Trainer) -> list[Any]:
    """Build the loggers, on the first rank alone."""
    if trainer.ctx.rank != 0:
        return []
    return [chosen.build(trainer.ctx) for chosen in trainer.config.logger.values()]


def check(config: RunConfig) -> str:
    """Return the plan of a run, in words, without training.

    Raises:
        ConfigError: the run could not start.
    """
    with closing(build(config, Path())) as trainer:
        return describe(trainer.resolved, trainer.policy, trainer.buffer, trainer.collector)
