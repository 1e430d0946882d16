"""Start or continue a run: every rank builds it, restores its state if it continues, and drives it to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from rlplug.api import Plan
from rlplug.checkpointing.reading import Checkpoint, checkpoints, find, tidy
from rlplug.config import RunConfig, choose, migrate, parse, show
from rlplug.config.errors import differences, told, value_at
from rlplug.config.schema import RESUMABLE, WHY
from rlplug.distributed.fabric import Fabric, fabric_of, launched_elsewhere, require_started
from rlplug.distributed.spawn import RankError, spawn_ranks
from rlplug.registry.installed import check_installed, check_same, installed
from rlplug.run import run_dir
from rlplug.run.build import build, start
from rlplug.run.drive import disk_errors, drive, with_way_back
from rlplug.run.state import restore
from rlplug.types import CheckpointError, ConfigError, RunError


def train(config: RunConfig, folder: Path, command: Sequence[str] = (), tell: Callable[[str], None] = print) -> float:
    """Run ``config`` and write everything about it into ``folder``.

    Args:
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation: the score that sweepers maximize.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        RunError: the run could not go on.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM, and its folder says so; it holds the signal.
    """
    plan: Plan = config.hardware.build(None).plan()
    return _launch(plan, config.raw, folder, tell, _train, config.raw, list(command))


def resume(path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = print) -> float | None:
    """Continue a run where its newest good checkpoint was written.

    Args:
        path: the run folder.
        overrides: changes to what does not alter learning, as on the command line.
        tell: is given, line by line, what a person should know.

    Returns:
        The mean return of the final evaluation; None for a run that has finished already.

    Raises:
        ConfigError: the run cannot be continued, or not with these overrides; nothing was written.
        RunError, KeyboardInterrupt: as in ``train``.
    """
    folder = Path(path)
    raw, *_ = _read(folder, overrides)
    plan: Plan = choose("hardware", "hardware", raw["hardware"]).build(None).plan()
    return _launch(plan, raw, folder, tell, _resume, list(overrides))


def _launch(
    plan: Plan, raw: dict[str, Any], folder: Path, tell: Callable[[str], None], work: Callable[..., Any], *args: Any
) -> Any:
    """Call ``work(fabric, tell, plan, folder, *args)`` on every rank; return what the first rank returns.

    A process that is the only rank, or was started as one of several, does the work itself. Otherwise each rank gets a
    process, and a run that broke off is continued as often as the plan allows.
    """
    require_started(plan)
    if launched_elsewhere() or (plan.world_size == 1 and not plan.max_restarts and plan.launcher == "processes"):
        return work(fabric_of(plan), tell, plan, folder, *args)
    if plan.num_nodes > 1:
        raise ConfigError("hardware.num_nodes", f"{plan.num_nodes} machines: start rlplug by torchrun or srun on each")
    with closing(build(parse(raw), folder, plan=plan)):
        pass  # mistakes are found before any process is started
    if plan.launcher == "ray":
        from rlplug.actors.launcher import on_cluster as start_ranks
    else:
        start_ranks = spawn_ranks
    restarts = plan.max_restarts
    while True:
        try:
            return start_ranks(plan, work, plan, folder, *args, tell=tell)
        except RunError as error:
            last = next(iter(checkpoints(folder)), None)
            if not restarts or last is None:
                if isinstance(error, RankError):  # the rank had no time to say this itself
                    raise RankError(with_way_back(error, folder, last)) from None
                raise
            restarts -= 1
            tell(f"{error}\ncontinuing by itself, {restarts} more times if need be")
            work, args = _resume, ([],)


def _train(
    fabric: Fabric, tell: Callable[[str], None], plan: Plan, folder: Path, raw: dict[str, Any], command: list[str]
) -> float:
    raw, folder = fabric.broadcast((raw, folder))
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")
    config = parse(raw)
    with closing(build(config, folder, fabric, plan)) as trainer, disk_errors(folder):
        start(trainer)
        if not fabric.is_global_zero:
            return drive(trainer)
        run_dir.require_new(folder)
        with run_dir.locked(folder, "hydra.run.dir"):
            run_dir.create(folder, config, plan, trainer.reports.identity, command)
            return drive(trainer)


def _resume(
    fabric: Fabric, tell: Callable[[str], None], plan: Plan, folder: Path, overrides: list[str]
) -> float | None:
    tell = tell if fabric.is_global_zero else lambda line: None
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")
    raw, before, manifest, notes = _read(folder, overrides)
    changed = differences(before, raw)
    with disk_errors(folder), run_dir.locked(folder) if fabric.is_global_zero else nullcontext():
        for note in notes:
            tell(note)
        config = parse(raw)
        checkpoint = find(folder, tell=tell) if fabric.is_global_zero and checkpoints(folder) else None
        path = fabric.broadcast(checkpoint and checkpoint.path)
        if path is None:
            left = config.total_steps - before["total_steps"]
        else:
            checkpoint = checkpoint or Checkpoint(path)
            _check_own(checkpoint, manifest["run"], config)
            left = (config.total_steps - checkpoint.manifest["env_steps"]) // config.num_envs
        if done := run_dir.finished(folder):
            if not left:
                tell(f"{folder} has finished: {done}. To go on, give it more than total_steps={config.total_steps}")
                return None
            if checkpoint is None:
                raise CheckpointError(f"{folder} has finished, and its checkpoints are gone: nothing to go on from")
        with closing(build(config, folder, fabric, plan, manifest["run"])) as trainer:
            start(trainer)
            missing = restore(trainer, checkpoint) if checkpoint else []
            steps = trainer.progress.env_steps
            for line in told(changed):
                tell(line)
            tell(f"continuing from {f'step {steps:,}' if checkpoint else 'the beginning: there was no checkpoint yet'}")
            for what in missing:
                tell(f"not exactly as it would have gone on: {what}")
            fabric.barrier()  # every rank has read what it needs
            if fabric.is_global_zero:
                for aside in tidy(folder, checkpoint):
                    tell(f"what is damaged was set aside as {aside}")
                run_dir.note_resumed(folder, config, manifest, steps, changed)
            return drive(trainer)


def _read(folder: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Return a run's configuration with the overrides and without, its manifest, and notes on changed plugins."""
    from rlplug.config.composition import change  # here: it imports Hydra

    before, manifest = run_dir.read(folder)
    raw = change(before, overrides, RESUMABLE, WHY)
    kept = {
        key: origin for key, origin in manifest["plugins"].items() if value_at(raw, f"{key}.name") == origin["name"]
    }
    return raw, before, manifest, check_installed(kept, manifest["versions"])


def _check_own(checkpoint: Checkpoint, run: str, config: RunConfig) -> None:
    """Check that the run ``run``, as it is configured now, can continue from ``checkpoint``."""
    if checkpoint.manifest["run"] != run:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of another run")
    for key, old, new in differences(migrate(checkpoint.manifest["config"]), config.raw):
        if key.split(".")[0] not in RESUMABLE:
            raise ConfigError(key, f"was {show(old)}, and is {show(new)} in config.yaml now, but {WHY}")
    made, total = checkpoint.manifest["env_steps"], config.total_steps
    if total < made:
        raise ConfigError("total_steps", f"{total} is less than the {made} steps that the run has made already")
