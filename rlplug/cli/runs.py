"""``runs``: list runs and sweeps."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlplug.cli import say, table, tell
from rlplug.types import ConfigError

USAGE = """rlplug runs [folder ...] [key=value ...] [--json]

Lists the runs and sweeps in folders, or in runs/, newest first: state, algorithm, environment, steps, the last
evaluation and training return, and the time since the run last wrote a file. A run is running, finished, interrupted
(by Ctrl-C or SIGTERM), failed, or killed: it has not ended, and no process works on it. Filters choose by state,
environment, or any setting; several values are alternatives:

  rlplug runs state=finished algo=ppo,dqn env=cartpole
  rlplug runs runs/multirun algo.lr=0.001 model=lstm

--json prints one JSON object."""


def main(arguments: Sequence[str]) -> int:
    """List runs.

    Raises:
        ConfigError: a folder does not exist or holds no run, or a filter matches nothing.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words = [argument for argument in arguments if argument != "--json"]
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError("", f"runs takes no flag {flags[0]}; see rlplug runs --help")

    from rlplug.results import listing  # here, because NumPy is slow to import
    from rlplug.results.find import RUNS, find, located, split, sweeps
    from rlplug.results.record import EVALUATION

    places, filters = split(words)
    runs = sorted(find(places, filters, tell, copies=True), key=lambda run: run.age_s)
    found = {sweep.path: sweep for place in places or [str(RUNS)] for sweep in sweeps(located(place), runs, EVALUATION)}
    of_runs, of_sweeps = [*map(listing.figures, runs)], [*map(listing.sweep_figures, found.values())]
    for damage in filter(None, (run.damage for run in runs)):
        tell(damage)
    if "--json" in arguments:
        say(json.dumps({"runs": of_runs, "sweeps": of_sweeps}))
        return 0
    lines = table(listing.ROW, map(listing.row, of_runs))
    if of_sweeps:
        lines += ["", *table(listing.SWEEP_ROW, map(listing.sweep_row, of_sweeps))]
    say("\n".join(lines))
    return 0
