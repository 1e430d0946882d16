"""``sweeper=optuna``: hyperparameter optimization with Optuna, over resumable runs.

A trial trains a run for each seed, and its value is the mean of their final evaluations. With a pruner, all trials of a
batch train ``sweeper.every`` steps, then the pruner ends the worst of them, and the others continue. The study is a
function of the search space, the seeds and the scores: the sampler of trial n draws from a generator of its own, and
decisions are taken in the order of trials, whichever run ends first. Optuna's journal counts up to the size that was
noted when the last decisions were complete, so that an interrupted study equals one that was not interrupted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlplug.checkpointing import atomic
from rlplug.cli import FAILED, jobs, say, space, sweep, sweeper, table, tell
from rlplug.config.errors import show
from rlplug.settings import NonNegativeInt, PositiveInt, option, settings
from rlplug.types import STEP, ConfigError, RunError, Unit

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages.journal import JournalStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STATE, JOURNAL, NAME = "optuna.json", "study.log", "rlplug"
SCORES = "scores"  # attribute of a trial: the scores of its seeds


@settings
class Optuna:
    name: Literal["optuna"] = option("This sweeper.")
    trials: PositiveInt = option("Settings to try.")
    batch: PositiveInt = option("Trials suggested together, from the results of those before.")
    sampler: Literal["tpe", "gp", "cmaes", "random"] = option("Optuna's sampler.")
    startup: NonNegativeInt = option("Random trials, none of which is pruned, before results count.")
    direction: Literal["maximize", "minimize"] = option("What to do with the mean of eval/return_mean over seeds.")
    pruner: Literal["median", "halving", "none"] = option("Which trials end early.")
    every: PositiveInt | None = option("Steps between two decisions to prune; null: a quarter of total_steps.")
    workers: NonNegativeInt | None = option("Runs at a time; null: one per CPU core; 0: in this process.")
    ray: jobs.Ray = option("Ray cluster that trains the runs.")


def main(overrides: Sequence[str], as_json: bool = False) -> int:
    """Run or continue a study.

    Returns:
        The exit code: 1 if some trials failed.

    Raises:
        ConfigError: a setting is wrong, or a package is missing; nothing was written.
        RunError: all trials failed.
    """
    cfg, found, seeds = prepared(overrides)

    from rlplug.run import run_dir  # here, because torch takes seconds to import

    total, unit = found.run.total_steps, found.run.loop.cls.unit
    about = {"overrides": found.fixed, "searched": {key: asdict(one) for key, one in found.space.items()}}
    about |= {"seeds": seeds, "sweeper": {key: value for key, value in asdict(cfg).items() if key not in jobs.OWN}}
    with jobs.pool(cfg.workers, cfg.ray) as train, run_dir.locked(found.folder, "hydra.sweep.dir"):
        many = f" of {len(seeds)} seeds" if len(seeds) > 1 else ""
        tell(f"{cfg.trials} trials{many}, {total:,} {STEP[unit]}s, in {found.folder}")
        search = _Search(cfg, found, seeds, unit, about)
        while running := search.running() or search.suggest():
            search.advance(running, train)
    return _report(search, as_json)


def prepared(overrides: Sequence[str]) -> tuple[Optuna, sweeper.Searched, list[int]]:
    """Check a command line; return the seeds of every trial, too.

    Raises:
        ConfigError: see ``main``.
    """
    cfg, words = sweeper.settings(Optuna, overrides)
    _require_packages(cfg)
    given, swept = sweeper.split(words, "optuna")
    searched = [one for one in swept if one.key_or_group != "seed"]
    of_seed = [one for one in swept if one.key_or_group == "seed"]
    if any(not one.is_discrete_sweep() for one in of_seed):
        raise ConfigError("seed", "is not searched: seed=1,2,3 trains three seeds of every trial")
    found = sweeper.search("optuna", words, given, searched, cfg.ray.address is None)
    total, every = found.run.total_steps, cfg.every
    if cfg.pruner == "none" and every is not None:
        raise ConfigError("sweeper.every", "is the interval of a pruner; choose sweeper.pruner=median")
    if cfg.pruner != "none" and any(one.key_or_group == "stop" for one in given):
        raise ConfigError("stop", "is set by optuna when it prunes; use total_steps, or sweeper.pruner=none")
    if every is not None and every >= total:
        said = f"{every:,} leaves nothing to prune in total_steps={total:,}; choose a smaller interval"
        raise ConfigError("sweeper.every", f"{said}, or sweeper.pruner=none")
    seeds = [int(str(seed)) for one in of_seed for seed in one.sweep_string_iterator()] or [found.run.seed]
    if len({*seeds}) < len(seeds):
        raise ConfigError("seed", f"{show(seeds)} has a seed twice")
    return cfg, found, seeds


def _require_packages(cfg: Optuna) -> None:
    """Raise ``ConfigError`` if a package of the sampler is not installed."""
    import importlib

    for package in ("optuna", *{"cmaes": ("cmaes",), "gp": ("scipy",)}.get(cfg.sampler, ())):
        try:
            importlib.import_module(package)
        except ImportError as error:
            key = "sweeper" if package == "optuna" else "sweeper.sampler"
            raise ConfigError(
                key, f"{show(package)} is not installed ({error}): pip install 'rlplug[optuna]'"
            ) from None


class _Search:
    """A study in a folder."""

    def __init__(
        self, cfg: Optuna, found: sweeper.Searched, seeds: Sequence[int], unit: Unit, about: dict[str, Any]
    ) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        optuna.logging.set_verbosity(logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.cfg, self.found, self.seeds, self.about = cfg, found, seeds, about
        self.unit: Unit = unit
        self.folder, self.space, total = found.folder, found.space, found.run.total_steps
        every = total if cfg.pruner == "none" else cfg.every or -(-total // 4)
        self.ends = [*range(every, total, every), total]
        pruners = {
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=1),
            "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(every, reduction_factor=2),
            "none": optuna.pruners.NopPruner,
        }
        before = sweeper.state(self.folder / STATE, about)
        journal = self.folder / JOURNAL
        Path(f"{journal}.lock").unlink(missing_ok=True)  # of a killed process; the folder is locked
        with open(journal, "ab") as file:
            file.truncate(before["bytes"] if before else 0)
        self.storage: JournalStorage = JournalStorage(JournalFileBackend(str(journal)))
        self.study: Study = optuna.create_study(
            storage=self.storage,
            study_name=NAME,
            direction=cfg.direction,
            pruner=pruners[cfg.pruner](),
            load_if_exists=True,
        )
        self._commit()

    def running(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if not trial.state.is_finished()]

    def suggest(self) -> list[FrozenTrial]:
        """Start the next trials; none if all have been tried."""
        made = len(self.study.get_trials(deepcopy=False))
        for number in range(made, min(made + self.cfg.batch, self.cfg.trials)):
            self.study.sampler = _sampler(self.cfg, self.seeds[0], number)
            self.study.ask({key: _distribution(one) for key, one in self.space.items()})
        self._commit()
        return self.running()

    def advance(self, trials: Sequence[FrozenTrial], train: jobs.Train) -> None:
        """Train a batch until its next evaluation, and decide which trials end there.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM ended a run.
        """
        from optuna.trial import TrialState

        from rlplug.run import run_dir

        until = next(end for end in self.ends if end > (trials[0].last_step or 0))
        last = until == self.ends[-1]
        stop = None if len(self.ends) == 1 else {} if last else {self.unit: until}
        runs = {trial.number: [_Job(self, trial, seed, stop) for seed in self.seeds] for trial in trials}
        for failed in train([job for of in runs.values() for job in of]):
            tell(f"{failed} failed{jobs.hint(failed, self.cfg.workers)}")
        values: dict[int, float] = {}
        for trial in trials:
            done = [run_dir.finished(job.folder) for job in runs[trial.number]]
            scores = [math.nan if one is None or one.score is None else one.score for one in done]
            value = float(np.mean(scores))
            if not math.isfinite(value):
                self.study.tell(trial.number, state=TrialState.FAIL)
                continue
            values[trial.number] = value
            key = self.storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
            self.storage.set_trial_user_attr(key, SCORES, scores)
            self.storage.set_trial_intermediate_value(key, until, value)
        for number, value in values.items():
            if last:
                self.study.tell(number, value)
            else:
                worst = self.study.pruner.prune(self.study, self.study.get_trials(deepcopy=False)[number])
                if worst and number >= self.cfg.startup:
                    self.study.tell(number, state=TrialState.PRUNED)
        self._commit()
        for trial in self.study.get_trials(deepcopy=False)[trials[0].number :]:
            score = f"{values[trial.number]:,.1f}" if trial.number in values else "no score"
            words = " ".join(_words(self, trial, short=True))
            state = "" if last or not trial.state.is_finished() else f", {_state(trial, self.unit)}"
            tell(f"trial {trial.number}, {until:,} {STEP[self.unit]}s: {score}{state} ({words})")

    @property
    def _id(self) -> int:
        return self.storage.get_study_id_from_name(NAME)

    def _commit(self) -> None:
        """Note how much of the journal counts."""
        size = os.path.getsize(self.folder / JOURNAL)
        atomic.replace(self.folder / STATE, (json.dumps(self.about | {"bytes": size}, indent=1) + "\n").encode())


class _Job:
    """The run of one seed of a trial, until the next decision.

    Args:
        stop: limit of the run, ``{unit: steps}``; empty: total_steps; None: nothing is decided before its end.
    """

    def __init__(self, search: _Search, trial: FrozenTrial, seed: int, stop: dict[str, int] | None) -> None:
        self.folder, self.fixed, self.stop = _folder(search, trial, seed), search.found.fixed, stop
        self.words = [*_words(search, trial), f"seed={seed}"]

    def command(self) -> list[str] | None:
        from rlplug.run import run_dir

        limit = ", ".join(f"{unit}: {steps}" for unit, steps in (self.stop or {}).items())
        stop = [] if self.stop is None else [f"stop={{{limit}}}" if limit else "stop=null"]
        if not (self.folder / run_dir.MANIFEST).exists():
            run = f"hydra.run.dir={sweep.quoted(str(self.folder))}"
            return ["train", *self.fixed, *self.words, *stop, run]
        before = run_dir.read(self.folder)[0]["stop"] or {}
        done = run_dir.finished(self.folder) and self.stop in (None, before)
        return None if done else ["resume", str(self.folder), *stop]


def _folder(search: _Search, trial: FrozenTrial, seed: int) -> Path:
    return search.folder / f"trial_{trial.number:03d}" / f"seed_{seed}"


def _sampler(cfg: Optuna, seed: int, number: int) -> Any:
    """Return the sampler of a trial, with a generator of its own."""
    from optuna import samplers

    drawn = int(np.random.default_rng([seed, number]).integers(2**31))
    makers = {
        "tpe": lambda: samplers.TPESampler(n_startup_trials=cfg.startup, constant_liar=cfg.batch > 1, seed=drawn),
        "gp": lambda: samplers.GPSampler(n_startup_trials=cfg.startup, seed=drawn),
        "cmaes": lambda: samplers.CmaEsSampler(n_startup_trials=cfg.startup, seed=drawn),
        "random": lambda: samplers.RandomSampler(seed=drawn),
    }
    return makers[cfg.sampler]()


def _distribution(one: space.Space) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(one, space.Interval):
        if one.whole:
            return IntDistribution(int(one.low), int(one.high), log=one.log)
        return FloatDistribution(one.low, one.high, log=one.log)
    if not isinstance(one, space.Range):
        return CategoricalDistribution(one.values)
    first, second, last = (float(one.values[i]) for i in (0, 1, -1))
    low, high, step = min(first, last), max(first, last), abs(second - first)
    if all(word.lstrip("-").isdecimal() for word in one.values):
        return IntDistribution(int(low), int(high), step=int(step))
    return FloatDistribution(low, high, step=step)


def _words(search: _Search, trial: FrozenTrial, short: bool = False) -> list[str]:
    """Return the settings of a trial as overrides; ``short``: numbers with four digits."""
    values = {key: trial.params[key] for key in search.space}
    return [f"{key}={_short(value) if short else value}" for key, value in values.items()]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _state(trial: FrozenTrial, unit: Unit) -> str:
    if trial.state.name == "PRUNED":
        return f"pruned at {trial.last_step:,} {STEP[unit]}s"
    return {"COMPLETE": "finished", "FAIL": "failed"}[trial.state.name]


def _report(search: _Search, as_json: bool) -> int:
    """Print and write all trials, best first, and draw them if matplotlib is installed.

    Raises:
        RunError: no trial finished.
    """
    sign = 1 if search.cfg.direction == "minimize" else -1
    order = {"COMPLETE": 0, "PRUNED": 1, "FAIL": 2}
    trials = sorted(
        search.study.get_trials(deepcopy=False),
        key=lambda trial: (order[trial.state.name], -(trial.last_step or 0), sign * (trial.value or 0.0)),
    )
    records = [
        {
            "job": f"trial_{trial.number:03d}",
            "values": {key: _short(trial.params[key]) for key in search.space},
            **sweep.statistics([] if trial.state.name == "FAIL" else trial.user_attrs[SCORES]),
            "status": _state(trial, search.unit),
        }
        for trial in trials
    ]
    fields = ["job", *search.space, "status", "score", "low", "high", "seeds"]
    sweep.write_table(search.folder, [one | one["values"] for one in records], fields)
    failed = sum(trial.state.name == "FAIL" for trial in trials)
    if as_json:
        say(json.dumps({"folder": str(search.folder), "jobs": [sweep.plain(one) for one in records]}))
    else:
        head, cells = sweep.columns(records)
        rows = [
            (*one["values"].values(), *row, one["status"], one["job"]) for one, row in zip(records, cells, strict=True)
        ]
        lines = table((*search.space, *head, "status", "trial"), rows)
        say("\n".join(["", *lines, f"as a table: {search.folder / sweep.TABLE}"]))
    if trials[0].state.name != "COMPLETE":
        raise RunError(f"no trial finished; see {jobs.log(_folder(search, trials[0], search.seeds[0]))}")
    _draw(search, tell if as_json else say)
    tell(f"best: {' '.join(_words(search, trials[0]))}")
    if failed:
        tell(f"{failed} of {len(trials)} trials failed")
    return FAILED if failed else 0


def _draw(search: _Search, out: Any) -> None:
    """Draw the history of the study, and the importance of its settings where trials differ."""
    with suppress(ImportError):
        from rlplug.results import search as pictures

        study = search.study
        points = [(trial.number, trial.value, trial.state.name) for trial in study.get_trials(deepcopy=False)]
        out(f"history: {pictures.draw_history(search.folder, points, search.cfg.direction == 'maximize')}")
        if importance := _importance(study):
            out(f"importance: {pictures.draw_importance(search.folder, importance)}")


def _importance(study: Study) -> dict[str, float]:
    """Return the share of each setting in what separates good trials, by PED-ANOVA; empty if unknown."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    values = {trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"}
    if len(values) < 2:
        return {}
    found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return found if all(map(math.isfinite, found.values())) else {}
