"""Sweeps (``-m``): each job has a folder named by its values, and runs independently of other jobs' failures.

Finished jobs are skipped and unfinished jobs resumed, so the same command with the same ``hydra.sweep.dir`` completes
an interrupted sweep.
"""

from __future__ import annotations

import csv
import io
import json
import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override, RangeSweep
from omegaconf import OmegaConf

from rlplug.checkpointing import atomic
from rlplug.cli import FAILED, is_first_process, refuse, say, table, tell
from rlplug.config import RunConfig, compose, composed
from rlplug.config.errors import differences, show
from rlplug.results.statistics import mean_band
from rlplug.types import ConfigError, RunError

JOB, TABLE = "job.json", "sweep.csv"
FIGURES = {"score": "eval/return_mean", "env_steps": "env_steps", "updates": "updates", "wall_s": "wall_s"}
"""columns of the table, by key in ``summary.json``"""
OF_GROUP = ("mean", "mean_low", "mean_high")
"""columns for the mean over the seeds of a job's settings, and its 95 % interval"""
MOST = 100_000  # maximum jobs of a sweep
CHECKED = 50  # values per key to check before the first job
MAXIMIZE = {"direction": "maximize", "ax_config.experiment.minimize": "false", "optim.maximize": "true"}
"""options of sweepers for the direction of optimization, and their values to maximize"""
WIDEST = 80  # characters of an error in the table; the file has the full text
LONGEST = 200  # bytes in a folder name; file systems allow 255


class JobFailedError(RunError):
    """A job failed, as recorded in its folder and in the table."""


def folder_name(values: str, number: int) -> str:
    """Return the folder name of a job: its swept values (``algo.lr=0.001,seed=1``), or its number."""
    name = values.replace("/", "_")
    if len(name.encode()) > LONGEST:
        name = f"{name.encode()[:LONGEST].decode(errors='ignore')}-{sha256(name.encode()).hexdigest()[:8]}"
    return name or str(number)


OmegaConf.register_new_resolver("job_folder", folder_name, replace=True)  # used by config.yaml in all job processes


def check_sweep(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Check a sweep before its first job: every value of every swept key, with the first values of other keys.

    Of a key with many values, only the first ones and the last are checked. Ranges from which a sweeper samples
    (``interval``) and incompatible combinations are left to the jobs.

    Returns:
        The sweep's folder, and overrides that fix it and exclude constant keys from folder names.

    Raises:
        ConfigError: a value is wrong, or there are none.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from rlplug.config.explain import explained
    from rlplug.config.origins import session

    with session() as loader, explained(overrides):
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        discrete = [o for o in parsed if o.is_discrete_sweep()]
        swept = [_values(override) for override in discrete]
    if (jobs := math.prod(map(len, swept))) > MOST:
        key = max(zip(swept, discrete, strict=True), key=lambda pair: len(pair[0]))[1].key_or_group
        raise ConfigError(key, f"the sweep would have {jobs:,} jobs; the maximum is {MOST:,}")
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    firsts = [values[0] for values in swept]
    compose([*fixed, *firsts])
    for i, values in enumerate(swept):
        for value in values[1:CHECKED] + values[CHECKED:][-1:]:
            compose([*fixed, *firsts[:i], value, *firsts[i + 1 :]])
    hydra = composed([*fixed, *firsts]).hydra
    require_folders(hydra)
    folder = str(hydra.sweep.dir)
    varying = {o.key_or_group for o in parsed if o.is_sweep_override()}
    same = sorted({o.key_or_group for o in parsed} - varying)
    excluded = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(map(quoted, same))}]"
    return Path(folder), [f"hydra.sweep.dir={quoted(folder)}", excluded, *_maximized(hydra, overrides)]


def require_folders(hydra: Any) -> None:
    """Raise ``ConfigError`` if the folder name of a run or a sweep is empty, which means the current folder."""
    for node, key in (("run", "dir"), ("sweep", "dir"), ("sweep", "subdir")):
        name = OmegaConf.to_container(hydra[node], resolve=False)[key]  # type: ignore[index,call-overload]
        if not str(name or "").strip():
            raise ConfigError(f"hydra.{node}.{key}", f"{show(name)} is not a folder; name one, or leave it out")


def _values(override: Override) -> list[str]:
    """Return the overrides of a sweep over one key.

    Raises:
        ConfigError: there are none, or too many.
    """
    value, given = override.value(), str(override.input_line).partition("=")[2]
    if isinstance(value, RangeSweep):
        start, stop, step = (float(x or 0) for x in (value.start, value.stop, value.step))
        if step == 0 or abs(stop - start) > MOST * abs(step) or not math.isfinite(stop - start):
            said = f"{given} has more values than a sweep supports, {MOST:,}; range(1,4) is 1, 2 and 3"
            raise ConfigError(override.key_or_group, said)
    values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise ConfigError(override.key_or_group, f"{given} has no values; range(1,4) is 1, 2 and 3")
    return values


def is_foreign(hydra: HydraConf) -> bool:
    """Return whether the sweeper is another package's, which chooses values by the scores of jobs."""
    return not str(hydra.sweeper["_target_"]).startswith("hydra.")  # type: ignore[index]


def _maximized(hydra: HydraConf, overrides: Sequence[str]) -> list[str]:
    """Return overrides to maximize the score, and report them; a given direction is kept."""
    if not is_foreign(hydra):
        return []
    score = "the score of a job is the mean return of its final evaluation"
    for option, right in MAXIMIZE.items():
        key = f"hydra.sweeper.{option}"
        if (value := OmegaConf.select(OmegaConf.create({"hydra": hydra}), key)) is None:
            continue
        given = any(word.lstrip("+").startswith(f"{key}=") for word in overrides)
        tell(f"{key}={show(value) if given else right}{', as given' if given else ''}: {score}")
        return [] if given else [f"{key}={right}"]
    tell(f"{score}; larger is better: configure {hydra.runtime.choices['hydra/sweeper']} to maximize it")
    return []


def attempt(hydra: HydraConf, words: Sequence[str], job: Callable[[], float]) -> float:
    """Run a job, and record its outcome in its folder and in the sweep's table.

    Args:
        hydra: Hydra's node of this job.
        words: overrides of the job.

    Returns:
        The job's score; NaN if it failed.

    Raises:
        JobFailedError: it failed, and another package's sweeper counts failures by exceptions.
        KeyboardInterrupt: the job and the sweep were stopped.
        SystemExit: see ``go_on``.
    """
    score, status, error = math.nan, "failed", ""
    try:
        score, status = job(), "finished"
    except (ConfigError, RunError) as mistake:
        refuse(mistake)
        error = str(mistake)
    except Exception as bug:
        traceback.print_exc()
        error = f"{type(bug).__name__}: {bug}"
    except KeyboardInterrupt:
        _record(hydra, words, "interrupted", "")
        raise
    _record(hydra, words, status, error)
    if status == "failed" and is_foreign(hydra):
        raise JobFailedError(error)
    return score


def go_on(folder: Path, run: RunConfig, start: Callable[[], float]) -> float:
    """Resume a job if its folder already holds it, otherwise call ``start``.

    Returns:
        The mean return of its final evaluation.

    Raises:
        SystemExit: the folder holds a job with other settings. The sweep ends, because it would mix settings.
        ConfigError, RunError, KeyboardInterrupt: see ``launch.resume``.
    """
    from rlplug.run import launch, run_dir  # here, because torch takes seconds to import

    if not (folder / run_dir.MANIFEST).exists():
        return start()
    before, _ = run_dir.read(folder)
    for key, old, new in differences(before, run.raw):
        said = f"{folder} was made with {key}={show(old)}, which now is {show(new)}; choose another folder"
        raise SystemExit(ConfigError("hydra.sweep.dir", said))
    done = run_dir.finished(folder)
    score = done and done.score
    tell(f"{folder.name}: {'goes on' if score is None else f'has already finished, with {score:,.1f}'}")
    if score is None:
        score = launch.resume(folder, tell=tell)
    return math.nan if score is None else score


def report(folder: Path, as_json: bool = False) -> int:
    """Print the settings of a sweep, best first by the mean over seeds. With torchrun or srun, only rank 0 prints.

    Returns:
        The exit code: 1 if some jobs have not finished.
    """
    rows = _rows(folder)
    if not rows:
        return 0
    missing = sum(row["status"] != "finished" for row in rows)
    if not is_first_process():
        return FAILED if missing else 0
    groups = grouped(rows)
    if as_json:
        jobs = [plain({key: row[key] for key in row if key not in OF_GROUP}) for row in rows]
        say(json.dumps({"folder": str(folder), "jobs": jobs, "groups": [*map(plain, groups)]}))
        return FAILED if missing else 0
    swept = list(dict.fromkeys(key for group in groups for key in group["values"]))
    head, cells = columns(groups)
    lines = [
        (*(of["values"].get(key, "") for key in swept), *row, of["status"], _shortened(of["error"]))
        for of, row in zip(groups, cells, strict=True)
    ]
    say("\n".join(["", *table((*swept, *head, "status", ""), lines), f"as a table: {folder / TABLE}"]))
    if missing:
        again = f"the same command with hydra.sweep.dir={folder} retries them"
        tell(f"{missing} of {len(rows)} jobs did not finish; {again}")
    return FAILED if missing else 0


def statistics(scores: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the scores of seeds, its 95 % bootstrap interval, and their number; NaN if unknown."""
    known = np.array([score for score in scores if math.isfinite(score)])
    low, high = mean_band(known[:, None])[:, 0].tolist() if len(known) > 1 else (math.nan, math.nan)
    return {"score": float(known.mean()) if len(known) else math.nan, "low": low, "high": high, "seeds": len(known)}


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and cells of a table of ``statistics``; the score is the only one if no record has several seeds."""
    cells = [
        (
            _number(of["score"]),
            "" if math.isnan(of["low"]) else f"{of['low']:,.1f} to {of['high']:,.1f}",
            str(of["seeds"]),
        )
        for of in records
    ]
    shown = 3 if any(of["seeds"] > 1 for of in records) else 1
    return ("score", "95 % interval", "seeds")[:shown], [row[:shown] for row in cells]


def plain(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record for JSON, which has no NaN."""
    return {key: None if value != value else value for key, value in of.items()}


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the jobs that differ by their seed only as one record each, in the order of ``rows``."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(_without_seed(row), []).append(row)
    groups: list[dict[str, Any]] = []
    for jobs in found.values():
        counts = Counter(row["status"] for row in jobs)
        status = ", ".join(f"{n} {status}" if len(counts) > 1 else status for status, n in counts.items())
        error = next(filter(None, (row["error"] for row in jobs)), "")
        values = {key: value for key, value in jobs[0]["values"].items() if key != "seed"}
        groups.append(
            {"values": values, **statistics([row["score"] for row in jobs]), "status": status, "error": error}
        )
    return groups


def _without_seed(row: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in row["values"].items() if key != "seed"}, sort_keys=True)


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Write records as ``sweep.csv``; a cell is empty where a value is missing or NaN."""
    text = io.StringIO()
    file = csv.DictWriter(text, fields, lineterminator="\n", extrasaction="ignore")
    file.writeheader()
    file.writerows({key: value for key, value in row.items() if value == value} for row in rows)
    atomic.replace(folder / TABLE, text.getvalue().encode())


def _record(hydra: HydraConf, words: Sequence[str], status: str, error: str) -> None:
    from rlplug.run.run_dir import write_json

    sweep, folder = Path(hydra.sweep.dir), Path(hydra.runtime.output_dir)
    same = hydra.job.config.override_dirname.exclude_keys
    pairs = (word.lstrip("+~").partition("=") for word in words)
    values = {key: value for key, _, value in pairs if key.partition("@")[0] not in same}
    write_json(folder / JOB, {"values": values, "status": status, "error": error})
    rows = _rows(sweep)
    swept = dict.fromkeys(key for row in rows for key in row["values"])
    write_table(sweep, [row | row["values"] for row in rows], ["job", *swept, "status", *FIGURES, *OF_GROUP, "error"])


def _rows(sweep: Path) -> list[dict[str, Any]]:
    """Return the records of a sweep's jobs, those of the best setting first, by its mean over seeds."""
    rows: list[dict[str, Any]] = []
    for file in sorted(sweep.glob(f"**/{JOB}")):
        summary: dict[str, Any] = {}
        try:
            row = {"values": {}, "error": ""} | json.loads(atomic.read(file))
            if row["status"] == "finished":
                summary = json.loads(atomic.read(file.parent / "summary.json"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            row = {"values": {}, "status": "unreadable", "error": str(error)}
        row["job"] = str(file.parent.relative_to(sweep))
        rows.append(row | {name: summary.get(key, math.nan) for name, key in FIGURES.items()})
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(_without_seed(row), []).append(row["score"])
    for row in rows:
        of = statistics(scores[_without_seed(row)])
        row |= dict(zip(OF_GROUP, (of["score"], of["low"], of["high"]), strict=True))
    return sorted(rows, key=lambda row: tuple(-math.inf if math.isnan(x) else x for x in (row["mean"], row["score"])))[
        ::-1
    ]


def _number(score: float) -> str:
    return "" if math.isnan(score) else f"{score:,.1f}"


def _shortened(text: str) -> str:
    line = next(iter(text.splitlines()), "")
    return line if len(line) <= WIDEST else line[: WIDEST - 1] + "…"


def quoted(word: str) -> str:
    """Quote a word as one value for Hydra's command line."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
