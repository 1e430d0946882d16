"""``fork``: continue from a checkpoint of a run with other settings, as a run of its own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlplug.checkpointing import atomic
from rlplug.checkpointing.format import FOLDER, MANIFEST, Checkpoint, checkpoints, find, folder_of, sealed
from rlplug.cli import printing, say_run, tell, without_json
from rlplug.cli.arguments import Flags, parsed, run_first
from rlplug.config import parse
from rlplug.config.changes import STRETCH, change, extended
from rlplug.config.errors import differences, joined
from rlplug.registry import warn_broken
from rlplug.results.places import at_step
from rlplug.run import launch, run_dir
from rlplug.types import STEP, ConfigError

USAGE = """rlplug fork <run folder>[@step] [--to folder] [--json] [key=value ...]

Continues from a checkpoint of a run with other settings, as a new run. Both runs are equal up to the checkpoint and
have the same random numbers afterwards, so that their difference is the effect of the settings:

  rlplug fork runs/ppo_cartpole@20000 algo.lr=1e-4

Without a step, it continues from the newest checkpoint. Checkpoints to fork from are kept by checkpoint.keep_last.
The environment, the model, the number of environments and the seed stay as they are. An option that only sets an
initial value, as the first coefficient of an adaptive penalty, has no effect after the start.
--json prints the fork's folder and its summary as one JSON object at the end."""


FLAGS: Flags = {"to": (str, False)}
NOISE = "a fork continues with the random numbers of the checkpoint"
STATE = "a fork continues from the state in the checkpoint"
FIXED = {
    "algo.name": STATE,
    "buffer.name": STATE,
    "curriculum.name": STATE,
    "env": STATE,
    "exploration": STATE,
    "hardware.actors.count": STATE,
    "hardware.devices": STATE,
    "loop.name": STATE,
    "model": STATE,
    "num_envs": STATE,
    "optimizer": STATE,
    "seed": NOISE,
}
"""keys that a fork cannot change, also keys below them, and why"""
NAME = 120
"""maximum length of a generated folder name"""


def main(arguments: Sequence[str]) -> int:
    """Fork one run, and train the fork to its end.

    Raises:
        ConfigError: it cannot be forked, or not with these overrides; nothing was written.
        RunError: the fork failed.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    arguments, as_json = without_json(arguments)
    words, given = parsed("fork", arguments, FLAGS)
    words, step = _without_step(words)
    run, overrides = run_first("fork", words, "a run folder, then settings written key=value")
    warn_broken()

    folder, notes = prepare(run, step, overrides, given.get("to") and Path(given["to"]))
    for note in (f"forked {run} to {folder}", *notes):
        tell(note)
    try:
        with printing(as_json):
            launch.resume(folder, tell=tell)
    except ConfigError:
        if not run_dir.read(folder)[1]["resumed"]:  # it did not begin
            shutil.rmtree(folder)
        raise
    if overrides and same_weights(run, folder):
        tell(f"the weights are equal to those of {run} at the same step: {' '.join(overrides)} had no effect")
    if as_json:
        say_run(folder)
    return 0


def _without_step(words: Sequence[str]) -> tuple[Sequence[str], int | None]:
    """Split the step from the first word, ``run@step``; a fork itself is named ``run@step,key=value``."""
    first, *rest = words or [""]
    name, at, step = first.rpartition("@")
    if not at or "," in step or Path(first).exists():
        return words, None
    if not step.replace("_", "").isdecimal():
        raise ConfigError("", f"{step!r} is no step; fork takes <run folder>@<step>, as runs/ppo_cartpole@20000")
    return [name, *rest], int(step.replace("_", ""))


def prepare(run: Path, step: int | None, overrides: Sequence[str], to: Path | None = None) -> tuple[Path, list[str]]:
    """Write a new run folder, which ``resume`` continues from a checkpoint of ``run`` with ``overrides``.

    It has the state of the checkpoint, including random generators and environments, and the rows of ``metrics.csv``
    before it. Both runs are equal up to the checkpoint, and have the same noise afterwards. Files of the checkpoint are
    hard links where the file system has them.

    Args:
        step: step of the checkpoint, in the unit of the run's loop; None: the newest.
        to: the new folder; None: next to the run, named after its name, the step and the changes.

    Returns:
        The folder, and notes on schedules if ``total_steps`` was raised.

    Raises:
        ConfigError: there is no such run or checkpoint, a setting cannot change, or the folder exists.
    """
    before, manifest = run_dir.read(run)
    checkpoint = _checkpoint(run, step)
    raw, notes = _changed(before, overrides)
    made, unit = checkpoint.steps, checkpoint.manifest["unit"]
    if raw["total_steps"] - made < (raw["num_envs"] if unit == "env_steps" else 1):
        said = f"{raw['total_steps']} leaves nothing to train after the {made} {STEP[unit]}s of {checkpoint.path}"
        raise ConfigError("total_steps", f"{said}; raise it, or fork from an earlier checkpoint")
    folder = to or run.with_name(_name(run, made, overrides))
    if folder.exists():
        raise ConfigError("", f"{folder} exists; choose another folder with --to <folder>")
    identity, origin = uuid4().hex, {"run": str(run.absolute()), "identity": manifest["run"], "step": made}
    changed = {key: {"from": old, "to": new} for key, old, new in differences(before, raw)}
    manifest |= {"run": identity, "resumed": [], "forked": origin | {"changed": changed}}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic.renamed(folder) as partial:
        place = folder_of(partial, made)
        place.mkdir(parents=True)
        for name in checkpoint.manifest["files"]:
            atomic.link(checkpoint.path / name, place / name)
        atomic.write(place / MANIFEST, sealed(checkpoint.manifest | {"run": identity, "config": raw, "score": None}))
        if (run / "metrics.csv").exists():
            atomic.write(partial / "metrics.csv", atomic.read(run / "metrics.csv"))
        run_dir.write_config(partial, raw)
        run_dir.write_json(partial / MANIFEST, manifest)
        atomic.flush(place)
    return folder, notes


def same_weights(run: Path, fork: Path) -> bool:
    """Return whether the newest checkpoints of the same step in a run and its fork hold the same weights."""
    first = folder_of(fork, run_dir.read(fork)[1]["forked"]["step"]).name
    common = {path.name for path in checkpoints(run)} & {path.name for path in checkpoints(fork)} - {first}
    if not common:
        return False
    files = [Checkpoint(folder / FOLDER / max(common)).manifest["files"]["weights.pt"] for folder in (run, fork)]
    return files[0]["sha256"] == files[1]["sha256"]


def _checkpoint(run: Path, step: int | None) -> Checkpoint:
    if step is None:
        return find(run)
    return Checkpoint(at_step(run, step)).verify()


def _changed(before: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the valid settings of a fork, and notes on its schedules."""
    words = [word for word in overrides if word != STRETCH]
    raw = change(before, words, list(before), "it belongs to the start of a run")
    raw, notes = extended(parse(raw).raw, before["total_steps"], STRETCH in overrides)
    errors = [
        ConfigError(key, f"cannot change: {why}; start another run for it")
        for key, _, _ in differences(before, raw)
        if (why := fixed(key))
    ]
    if errors:
        raise joined(errors)
    return raw, notes


def fixed(key: str) -> str | None:
    """Return why a fork cannot change a key; None: it can."""
    return next(
        (why for one, why in FIXED.items() if f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.")), None
    )


def _name(run: Path, step: int, overrides: Sequence[str]) -> str:
    words = [re.sub(r"[^\w.=+-]+", "_", word) for word in overrides]
    return ",".join([f"{run.name}@{step}", *words])[:NAME]
