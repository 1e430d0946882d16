"""Start or resume a run: every rank builds it, restores its state if resumed, and runs it to its end."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rlplug import pretrained
from rlplug.api import Plan
from rlplug.checkpointing.format import Checkpoint, checkpoints, find, tidy
from rlplug.checkpointing.installed import check_installed
from rlplug.collection.play import Stopped
from rlplug.config import RunConfig, choose, migrate, parse, show
from rlplug.config.errors import differences, told, value_at
from rlplug.config.schema import RESUMABLE, WHY
from rlplug.distributed.fabric import AnyFabric, explain_collective, fabric_of, launched_elsewhere, require_started
from rlplug.distributed.keepalive import watch_ranks
from rlplug.distributed.signals import handle_signals
from rlplug.distributed.spawn import RankError, last_words, spawn_ranks
from rlplug.distributed.torch_setup import denormals_flushed
from rlplug.distributed.versions import check_same
from rlplug.envs.silence import is_silent
from rlplug.nn import remarks
from rlplug.registry.discovery import installed
from rlplug.run import checks, run_dir
from rlplug.run.build import build, start
from rlplug.run.callbacks import restore
from rlplug.script import HERE, Sent, dumps
from rlplug.tracking import DISK, AtOnce, process_age
from rlplug.trainer.trainer import Trainer
from rlplug.types import STEP, CheckpointError, ConfigError, RunError

Tell: TypeAlias = Callable[[str], None]  # called with each line for the user
STOPPING = b"\nrlplug: stopping after this round, with a checkpoint; press Ctrl-C again to stop at once, without one\n"


def train(
    config: RunConfig, folder: Path, command: Sequence[str] = (), tell: Tell = print, notes: Sequence[str] = ()
) -> float:
    """Train ``config``, write the run to ``folder``, and return the mean return of the final evaluation.

    Args:
        notes: lines passed to ``tell`` when the run starts.

    Raises:
        ConfigError: the run cannot start as configured; nothing was written.
        RunError: the run failed.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM, as its summary states; holds the signal.
    """
    return _launch(config.hardware.plan(), config.raw, folder, tell, created, config.raw, list(command), list(notes))


def resume(path: str | Path, overrides: Sequence[str] = (), tell: Tell = print) -> float | None:
    """Resume a run from its newest good checkpoint.

    Args:
        path: the run folder.
        overrides: changes to settings that do not affect learning, as on the command line.

    Returns:
        The mean return of the final evaluation; None if the run had already finished.

    Raises:
        ConfigError: the run cannot be resumed, or not with these overrides; nothing was written.
        RunError, KeyboardInterrupt: see ``train``.
    """
    folder, (raw, *_) = Path(path), _read(Path(path), overrides)
    return _launch(_plan(raw), raw, folder, tell, reopened, list(overrides))


def planned(folder: Path, overrides: Sequence[str]) -> Plan:
    """Return the hardware plan of a run that is resumed. Raises as ``resume``."""
    return _plan(_read(folder, overrides)[0])


def _plan(raw: dict[str, Any]) -> Plan:
    return choose("hardware", "hardware", raw.get("hardware")).plan()


def _launch(plan: Plan, raw: dict[str, Any], folder: Path, tell: Tell, opened: Callable[..., Any], *args: Any) -> Any:
    """Drive the run of ``opened(fabric, tell, plan, folder, *args)`` on every rank; return the result of rank 0.

    If ranks are separate processes, a failed run is restarted as often as the plan allows.
    """
    require_started(plan)
    if launched_elsewhere() or (plan.world_size == 1 and not plan.max_restarts and plan.launcher == "processes"):
        return _drive(opened, fabric_of(plan), tell, plan, folder, *args)
    if plan.num_nodes > 1:
        raise ConfigError("hardware.num_nodes", f"{plan.num_nodes} machines: start rlplug by torchrun or srun on each")
    with closing(build(parse(raw), folder, plan=plan)):
        pass  # find errors before starting processes
    if plan.launcher == "ray":
        from rlplug.actors.launcher import on_cluster as start_ranks
    else:
        start_ranks = spawn_ranks
    restarts, objects = plan.max_restarts, dumps(raw)
    while True:
        try:
            return start_ranks(plan, Sent(partial(_drive, opened), objects), plan, folder, *args, tell=tell)
        except RunError as error:
            if not restarts or not checkpoints(folder):
                if isinstance(error, RankError):  # the rank could not print this itself
                    raise RankError(_with_way_back(error, folder)) from None
                raise
            restarts -= 1
            tell(f"{error}\nrestarting automatically; restarts left: {restarts}")
            opened, args = reopened, ([],)


def _drive(opened: Callable[..., Any], *args: Any) -> float | None:
    """Run to its end what ``opened(*args)`` yields, and return its score; None: the run has already finished."""
    with opened(*args) as trainer:
        if trainer is None:
            return None
        with driven(trainer), suppress(Stopped):
            trainer.loop.run(trainer)
        return trainer.reports.evaluation.latest.get("eval/return_mean", math.nan)


@contextmanager
def created(
    fabric: AnyFabric, tell: Tell, plan: Plan, folder: Path, raw: dict[str, Any], command: list[str], notes: list[str]
) -> Iterator[Trainer]:
    """Build a new run and create its folder."""
    raw, folder = fabric.broadcast((raw, folder))
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")
    config = parse(raw)
    with (
        closing(build(config, folder, fabric, plan)) as trainer,
        last_words(),
        _machine_errors(folder),
        ExitStack() as lock,
    ):
        start(trainer)
        if fabric.is_global_zero:
            run_dir.require_new(folder)
            lock.enter_context(run_dir.locked(folder, "hydra.run.dir"))
            run_dir.create(folder, config, plan, trainer.reports.identity, command)
            seen = (line for group in trainer.ctx.spec.groups.values() for line in remarks(group.obs))
            for note in (*notes, *seen, *trainer.reports.stopping.notes()) if config.log.level != "warning" else ():
                tell(note)
        yield trainer


@contextmanager
def reopened(fabric: AnyFabric, tell: Tell, plan: Plan, folder: Path, overrides: list[str]) -> Iterator[Trainer | None]:
    """Build a run that exists already, with the state of its newest good checkpoint; None: it has finished."""
    first = fabric.is_global_zero
    tell = tell if first else lambda line: None
    check_same(fabric.broadcast(installed()), f"rank {fabric.global_rank}")
    raw, before, manifest, notes = _read(folder, overrides)
    with _machine_errors(folder), run_dir.locked(folder) if first else nullcontext():
        for note in notes:
            tell(note)
        config, changed = parse(raw), differences(before, raw)
        checkpoint = find(folder, tell=tell) if first and checkpoints(folder) else None
        path = fabric.broadcast(checkpoint and checkpoint.path)
        if path is not None:
            checkpoint = checkpoint or Checkpoint(path)
            _check_own(checkpoint, manifest, config, changed)
        unit = config.loop.cls.unit
        if done := run_dir.finished(folder):
            made = checkpoint.steps if checkpoint else before["total_steps"]
            stopped = "" if any(key.split(".")[0] == "stop" for key, *_ in changed) else done.stopped
            if stopped or config.total_steps - made < (config.num_envs if unit == "env_steps" else 1):
                score = stopped or ("no evaluation" if done.score is None else f"evaluation {done.score:,.1f}")
                way = "set stop=null, or another limit" if stopped else f"raise total_steps above {config.total_steps}"
                tell(f"{folder} has finished: {getattr(done, unit):,} {STEP[unit]}s, {score}. To continue, {way}")
                yield None
                return
            if checkpoint is None:
                raise CheckpointError(f"{folder} has finished: no checkpoint to resume")
        with closing(build(config, folder, fabric, plan, manifest["run"])) as trainer, last_words():
            if checkpoint is None:
                pretrained.load(trainer.policy.algorithm, trainer.policy.normalizer, config)
            start(trainer)
            missing = restore(trainer, checkpoint) if checkpoint else []
            where = f"{STEP[unit]} {trainer.steps:,}" if checkpoint else "the beginning: there was no checkpoint yet"
            inexact = [f"not exactly as it would have continued: {what}" for what in missing]
            for line in (*told(changed), f"continuing from {where}", *inexact):
                tell(line)
            fabric.barrier()  # until every rank has read its state
            if first:
                progress = trainer.progress
                for aside in tidy(folder, checkpoint):
                    tell(f"damaged files were moved to {aside}")
                run_dir.note_resumed(folder, config, manifest, progress, changed)
            yield trainer


def _read(folder: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Return a run's configuration with and without overrides, its manifest, and notes on changed plugins."""
    from rlplug.config.changes import STRETCH, extended, resumed  # here: it imports Hydra

    before, manifest = run_dir.read(folder)
    raw, plugins = resumed(before, overrides), manifest["plugins"].items()
    kept = {key: origin for key, origin in plugins if value_at(raw, f"{key}.name") == origin["name"]}
    notes = check_installed(kept, manifest["versions"])
    raw, more = extended(parse(raw).raw, before["total_steps"], STRETCH in overrides)
    return raw, before, manifest, notes + more


def _check_own(
    checkpoint: Checkpoint, manifest: dict[str, Any], config: RunConfig, changed: Sequence[tuple[str, Any, Any]]
) -> None:
    """Check that a run, as configured now and ``changed`` by a command line, can resume from a checkpoint."""
    if checkpoint.manifest["run"] != manifest["run"]:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of another run")
    noted = {key for key, *_ in changed}.union(*(one["changed"] for one in manifest["resumed"]))
    for key, old, new in differences(migrate(checkpoint.manifest["config"]), config.raw):
        if key.split(".")[0] not in RESUMABLE and key not in noted:
            raise ConfigError(key, f"was {show(old)}, and is {show(new)} in config.yaml now, but {WHY}")
        if key == "hardware.actors.count":  # before any actor starts
            then = f"{old} actors" if old else "no actors"
            raise ConfigError(key, f"the run was collected with {then} and must continue with them; it now has {new}")
    total, made = config.total_steps, checkpoint.steps
    if total < min(made, checkpoint.manifest["config"]["total_steps"]):  # episodes of jobs may exceed the total
        what = STEP[config.loop.cls.unit]
        raise ConfigError("total_steps", f"{total} is less than the {made} {what}s that the run has made already")


@contextmanager
def driven(trainer: Trainer) -> Iterator[None]:
    """Execute the rounds of the body, then evaluate and write a last checkpoint; raise as ``train``."""
    callbacks, folder, status, startup, reached = trainer.reports, trainer.run_dir, "failed", 0.0, ""
    manager = callbacks.open(trainer)
    try:
        with _machine_errors(folder), _stop_on_signal(trainer), denormals_flushed(), _end_without_machine(trainer):
            trainer.hooks.hook.rlplug_started(run=trainer)
            trainer.clock.startup_s = trainer.clock.wall() - trainer.clock.before
            startup = process_age() or trainer.clock.startup_s
            yield
            reached = callbacks.stopping.reason
            callbacks.finish(trainer)
            if trainer.resolved.plan.actors is not None and trainer.ctx.rank != 0:
                trainer.close()  # before rank 0 stops a Ray cluster that it started
            errors = trainer.learner.placement.ranks.exchange(trainer.agreement.error)
        if error := next(filter(None, errors), None):
            raise error
        if trainer.agreement.stop:
            raise KeyboardInterrupt(trainer.agreement.stop)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        with suppress(RunError):
            manager.wait()  # until a pending checkpoint is written
        reason = error if isinstance(error, RunError) else explain_collective(error)
        if reason is None:
            error.add_note(_with_way_back("", folder))
            raise
        raise RunError(_with_way_back(reason, folder)) from error.__cause__
    finally:
        if trainer.ctx.rank == 0:
            _end(trainer, status, startup, reached)


def _end(trainer: Trainer, status: str, startup: float, reached: str) -> None:
    """Write ``summary.json`` and close the loggers.

    Args:
        startup: seconds before the loop began.
        reached: limit of ``stop`` that ended the loop.
    """
    callbacks, progress, folder = trainer.reports, trainer.progress, trainer.run_dir
    evaluation, wall = callbacks.evaluation, trainer.clock.wall()
    loop_s = wall - trainer.clock.startup_s
    summary = {"status": status} | ({"stopped": reached} if reached else {})
    summary |= {**callbacks.estimation.latest, **evaluation.latest}
    summary |= {f"eval/{trainer.loop.unit}": evaluation.latest_at}
    summary |= {name: getattr(progress, name) for name in ("env_steps", "updates", "episodes")}
    summary |= {"wall_s": round(wall, 3), "startup_s": round(startup, 3)}
    summary |= {f"{name}_per_s": round(getattr(progress, name) / loop_s, 1) for name in ("env_steps", "updates")}
    summary |= {"checkpoint": next((path.name for path in checkpoints(folder)), None)}
    try:
        try:
            run_dir.write_json(folder / run_dir.SUMMARY, summary)
        finally:
            trainer.hooks.hook.rlplug_ended(run=trainer, summary=summary)
    except OSError as error:
        if status == "finished":  # otherwise keep the error that ended the run
            raise RunError(_with_way_back(f"{folder}: {error.strerror}", folder)) from None


def _stop_on_signal(trainer: Trainer) -> AbstractContextManager[None]:
    """End the run after this round at Ctrl-C or SIGTERM, and immediately at a second Ctrl-C."""
    turns = itertools.count()

    def request(number: int, frame: Any) -> None:
        first = next(turns) == 0  # another signal may arrive while this one is handled
        if (not first and number == signal.SIGINT) or is_silent():  # the round would never end
            raise AtOnce(number)
        trainer.agreement.request_stop(number)
        if first and trainer.ctx.rank == 0:
            with suppress(OSError):  # stderr may be closed
                os.write(2, STOPPING)  # print itself may have been interrupted

    return handle_signals(request)


def _end_without_machine(trainer: Trainer) -> AbstractContextManager[None]:
    """End a run on several machines when one of them is lost."""

    def end(reason: str) -> None:
        if trainer.learner.fabric.local_rank == 0:
            with suppress(OSError):  # it may have no reader
                os.write(2, f"rlplug: {_with_way_back(reason, trainer.run_dir)}\n".encode())
        os._exit(1)  # the main thread may be waiting in a collective

    return nullcontext() if trainer.resolved.plan.num_nodes == 1 else watch_ranks(trainer.learner.fabric, end)


@contextmanager
def _machine_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the disk and lack of memory, which are not bugs, to one message."""
    said = "there is no memory for {}; a smaller buffer or model, or fewer environments, takes less"
    try:
        with checks.memory(lambda what: RunError(said.format(what))):
            yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunError(f"{error.filename or folder}: {error.strerror}") from None


def _with_way_back(error: object, folder: Path) -> str:
    """Return an error with instructions to resume from the newest checkpoint."""
    said, last = str(error), next(iter(checkpoints(folder)), None)
    between = "\n" if "\n" in said else "; " if said else ""
    good = f"the last good checkpoint is {last}; continue" if last else "there is no checkpoint yet; begin again"
    of_script = (file := folder / run_dir.CONFIG).is_file() and HERE in file.read_text("utf-8")
    way = f"rlplug.resume({str(folder)!r}, ...) with the script's objects" if of_script else "python -m rlplug resume"
    return f"{said}{between}{good} with: {way if of_script else f'{way} {folder}'}"
