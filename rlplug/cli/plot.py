"""``plot``: draw curves of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlplug.cli import say, tell, without_json
from rlplug.cli.arguments import Flags, of_runs
from rlplug.types import ConfigError

USAGE = """rlplug plot <runs ...> [key=value ...] [--metric NAME ...] [--out FILE] [--json] [...]

Draws a metric of runs against their steps. Runs are folders, folders of runs such as a sweep, or names below runs/;
filters choose among them as for rlplug runs. Runs that differ by their seed only are one curve: their mean, with its
95 % bootstrap interval as a band. Needs matplotlib: pip install 'rlplug[plots]'.

  --metric NAME            a column of metrics.csv, such as train/value; may be given several times. If not given:
                           eval/return_mean, or episode/return where there are no evaluations
  --out FILE               .png, .svg or .pdf; without a suffix, FILE.png and FILE.svg. If not given: curves
  --width INCHES           3.3, one of two columns, if not given; the size of the text stays the same
  --title TEXT             if not given, the environment, if there is only one
  --smooth N               average every value with those before it, N in all; evaluations are left as they are
  --compare LABEL=VALUE    add a horizontal line, such as a published result: --compare 'CleanRL, 10M steps=20.4'; or a
                           curve from a CSV file with the columns step and return: --compare SB3=pong_sb3.csv
  --json                   print the files as one JSON object"""

FLAGS: Flags = {"metric": (str, True), "out": (str, False), "width": (float, False), "title": (str, False)}
FLAGS |= {"smooth": (int, False), "compare": (str, True)}


def main(arguments: Sequence[str]) -> int:
    """Draw curves.

    Raises:
        ConfigError: the runs have nothing to draw in common, or the files cannot be written.
    """
    arguments, as_json = without_json(arguments)
    if (found := of_runs("plot", arguments, FLAGS, USAGE)) is None:
        return 0
    words, given = found

    from rlplug.results import curves, plot  # here, because NumPy is slow to import
    from rlplug.results.find import find, split
    from rlplug.results.groups import grouped, repeated

    plot.require_matplotlib()
    width, smooth = given.get("width", plot.WIDTH), given.get("smooth", 1)
    if not 1 <= width <= 40:
        raise ConfigError("--width", f"{width:g} is out of range: should be 1 to 40 inches")
    if smooth < 1:
        raise ConfigError("--smooth", f"{smooth} is out of range: should be at least 1")
    paths = plot.outputs(given.get("out", "curves"))
    places, filters = split(words)
    runs = curves.with_metrics(find(places, filters, tell), tell)
    levels, others = curves.compared(given.get("compare", []))
    metrics = curves.chosen_metrics(runs, given.get("metric", []))
    groups = grouped(runs)
    for line in [*filter(None, (run.damage for run in runs)), *repeated(groups)]:
        tell(line)
    drawn = curves.drawn(groups, metrics, smooth, tell)
    title = given.get("title", curves.title(groups))
    labels = curves.axis(runs), curves.values_axis(metrics)
    plot.save(plot.draw([*drawn, *others], *labels, title=title, width=width, levels=levels), paths)
    say(json.dumps({"files": [str(path) for path in paths]}) if as_json else "\n".join(map(str, paths)))
    return 0
