"""``report``: write an HTML page about runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlplug.cli import say, tell, without_json
from rlplug.cli.arguments import Flags, of_runs
from rlplug.types import ConfigError

USAGE = """rlplug report <runs ...> [key=value ...] [--metric NAME] [--out FILE] [--title TEXT] [--json]

Writes one HTML page that needs no other file and no network: curves of every metric, final scores with interquartile
means and 95 % intervals, probabilities of improvement, performance profiles, what differs between groups, videos,
machine and versions, and the command that repeats each run. Runs are chosen and grouped as for rlplug plot.

  --metric NAME            of the final scores; eval/return_mean, or episode/return where there are no evaluations, if
                           not given
  --out FILE               report.html, if not given
  --title TEXT             of the page
  --json                   print the file as one JSON object"""

FLAGS: Flags = {"metric": (str, False), "out": (str, False), "title": (str, False)}


def main(arguments: Sequence[str]) -> int:
    """Write a page.

    Raises:
        ConfigError: the runs have nothing to show in common, or the file cannot be written.
    """
    arguments, as_json = without_json(arguments)
    if (found := of_runs("report", arguments, FLAGS, USAGE)) is None:
        return 0
    words, given = found

    from rlplug.results import curves  # here, because NumPy is slow to import
    from rlplug.results.find import find, split
    from rlplug.results.groups import grouped, repeated
    from rlplug.results.output import require_file, write
    from rlplug.results.report import Report, page

    out = Path(given.get("out", "report.html"))
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError("--out", f"{out} should end in .html")
    require_file(out)
    runs = curves.with_metrics(find(*split(words), tell), tell)
    (metric,) = curves.chosen_metrics(runs, [given["metric"]] if "metric" in given else [])
    groups = grouped(runs)
    for line in [*filter(None, (run.damage for run in runs)), *repeated(groups)]:
        tell(line)
    algos, envs = (
        ", ".join(dict.fromkeys(names)) for names in zip(*((run.algo, run.env) for run in runs), strict=True)
    )
    title = given.get("title", f"{algos} on {envs}")
    write(out, page(Report(groups, metric, out), title, tell))
    say(json.dumps({"files": [str(out)]}) if as_json else out)
    return 0
