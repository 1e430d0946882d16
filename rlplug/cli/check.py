"""``check``: describe the run of a command line, without training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rlplug.cli import say
from rlplug.cli.meant import no_flag
from rlplug.cli.sweep import require_folders
from rlplug.config import composed, validated
from rlplug.registry import warn_broken

USAGE = """rlplug check [key=value ...]

Composes and checks the run that `rlplug train` would start, and shows its spaces, modules,
parameter counts, memory, devices and number of updates. Does not train and writes no files."""


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise no_flag(flags[0])
    warn_broken()
    config = composed(arguments)
    require_folders(config.hydra)
    run, pair = validated(config, config.hydra, arguments)

    from rlplug.cli.describe import describe  # here, because torch takes seconds to import
    from rlplug.run.build import build

    with closing(build(run, Path())) as trainer:
        say(describe(trainer))
    if pair:
        say(pair)
    return 0
