"""``resume``: continue a run that was interrupted or killed, or extend a finished one."""

from __future__ import annotations

from collections.abc import Sequence

from rlplug.cli import printing, say_run, tell, without_json
from rlplug.cli.arguments import run_first
from rlplug.registry import warn_broken

USAGE = """rlplug resume <run folder> [--json] [-v] [key=value ...]

Continues a run from its newest good checkpoint, exactly as if it had not stopped. Needs only the run folder.
Settings that do not affect learning can change: stop, eval, estimate, log, checkpoint, logger, callbacks, hardware,
compile, deterministic, on_nan. total_steps can be raised, and options that accept schedules can be set:

  total_steps=200_000 schedules=stretch
                           stretch schedules that ended with the run over the new total
  total_steps=200_000 algo.lr=1e-4
                           continue with this step size

--json prints the run's folder and its summary as one JSON object at the end. -v prints every row of metrics and
every checkpoint."""


def main(arguments: Sequence[str]) -> int:
    """Resume one run.

    Raises:
        ConfigError: it cannot be resumed, or not with these overrides.
        RunError: the run failed.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, as_json = without_json(arguments)
    folder, overrides = run_first("resume", words, "a run folder, then settings written key=value")
    warn_broken()

    from rlplug.run import launch  # here, because torch takes seconds to import

    with printing(as_json):
        launch.resume(folder, overrides, tell=tell)
    if as_json:
        say_run(folder)
    return 0
