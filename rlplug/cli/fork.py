"""``fork``: continue from a checkpoint of a run with one difference, as a run of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlplug.cli import tell
from rlplug.cli.meant import require_run
from rlplug.registry import warn_broken
from rlplug.types import ConfigError

USAGE = """rlplug fork <run folder>[@step] [--to folder] [key=value ...]

Continues from a checkpoint of a run with other settings, as a new run. Both runs are equal up to the checkpoint and
have the same random numbers afterwards, so that their difference is the effect of the settings:

  rlplug fork runs/ppo_cartpole@20000 algo.lr=1e-4

Without a step, it continues from the newest checkpoint. Checkpoints to fork from are kept by checkpoint.keep_last.
The environment, the model, the number of environments and the seed stay as they are. An option that only sets an
initial value, as the first coefficient of an adaptive penalty, has no effect after the start."""


def main(arguments: Sequence[str]) -> int:
    """Fork one run, and train the fork to its end.

    Raises:
        ConfigError: it cannot be forked, or not with these overrides; nothing was written.
        RunError: the fork failed.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, to = list(arguments), None
    if "--to" in words:
        at = words.index("--to")
        if at + 1 >= len(words):
            raise ConfigError("", "--to needs a folder: --to <folder>")
        to = Path(words[at + 1])
        del words[at : at + 2]
    first, *overrides = words or [""]
    if not first or first.startswith("-") or ("=" in first and not Path(first.rpartition("@")[0] or first).exists()):
        raise ConfigError("", "fork takes a run folder, then settings written key=value; see rlplug fork --help")
    name, step = _parsed(first)
    require_run(name)
    warn_broken()

    from rlplug.results import fork  # here, because torch takes seconds to import
    from rlplug.run import launch

    folder, notes = fork.prepare(Path(name), step, overrides, to)
    for note in (f"forked {name} to {folder}", *notes):
        tell(note)
    try:
        launch.resume(folder, tell=tell)
    except ConfigError:  # raised before the run began
        shutil.rmtree(folder)
        raise
    if overrides and fork.same_weights(Path(name), folder):
        tell(f"the weights are equal to those of {name} at the same step: {' '.join(overrides)} had no effect")
    return 0


def _parsed(word: str) -> tuple[str, int | None]:
    """Split ``run@step``; a run folder may itself have an @ in its name."""
    name, at, step = word.rpartition("@")
    if not at or Path(word).exists():
        return word, None
    if not step.replace("_", "").isdecimal():
        raise ConfigError("", f"{step!r} is no step; fork takes <run folder>@<step>, as runs/ppo_cartpole@20000")
    return name, int(step.replace("_", ""))
