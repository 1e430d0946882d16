"""``sweeper=pbt``: population-based training, Jaderberg et al. 2017 (arXiv:1711.09846), over resumable runs.

All members train ``sweeper.every`` steps. Then every one of the worst copies a random one of the best (exploit): it
continues from a checkpoint of that run with perturbed or resampled settings (explore). Each round of a member is a run
folder of its own, forked from the round before, so an interrupted sweep continues with its unfinished runs, and equals
one that was not interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from rlplug.checkpointing import atomic
from rlplug.cli import fork, jobs, say, space, sweep, sweeper, table, tell
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import STEP, ConfigError, RunError

STATE = "pbt.json"


@settings
class PBT:
    name: Literal["pbt"] = option("This sweeper.")
    members: Annotated[PositiveInt, Field(ge=2, le=10_000)] = option("Runs that train at the same time.")
    every: PositiveInt = option("Steps between two decisions, in the unit of total_steps.")
    quantile: Annotated[float, Field(gt=0, le=0.5)] = option("Fraction of the members that are replaced.")
    perturb: Annotated[list[PositiveFloat], Field(min_length=1)] = option("Factors for an option of a copy.")
    resample: UnitFloat = option("Probability of drawing an option from its search space instead.")
    workers: NonNegativeInt | None = option("Runs at a time; null: one per CPU core; 0: in this process.")
    ray: jobs.Ray = option("Ray cluster that trains the runs.")


@dataclass
class Member:
    """One round of a member."""

    folder: str
    """below the sweep's folder"""
    settings: dict[str, str]
    parent: str | None = None
    """folder of the round before that it continues; None: the first round"""
    score: float = math.nan


@dataclass
class Population:
    """The rounds of a sweep; each is a function of the seed and the scores of the round before."""

    cfg: PBT
    seed: int
    space: dict[str, space.Space]
    rounds: list[list[Member]] = field(default_factory=list[list[Member]])

    def next(self) -> list[Member]:
        """Add the members of the next round."""
        number, rng = len(self.rounds), np.random.default_rng([self.seed, len(self.rounds)])
        names = [f"round_{number:03d}/member_{i}" for i in range(self.cfg.members)]
        if not self.rounds:
            self.rounds.append([Member(name, space.sampled(self.space, rng)) for name in names])
            return self.rounds[-1]
        last = self.rounds[-1]
        order = sorted(range(len(last)), key=lambda i: (math.isnan(last[i].score), -last[i].score, i))
        count = max(1, int(self.cfg.members * self.cfg.quantile))
        failed = [i for i in order if math.isnan(last[i].score)]
        best, worst = [i for i in order[:count] if i not in failed], {*order[-count:], *failed}
        members: list[Member] = []
        for i, name in enumerate(names):
            of = best[int(rng.integers(len(best)))] if i in worst else i
            given = last[of].settings
            if i in worst:
                given = space.perturbed(given, self.space, self.cfg.perturb, self.cfg.resample, rng)
            members.append(Member(name, given, last[of].folder))
        self.rounds.append(members)
        return members


def main(overrides: Sequence[str], as_json: bool = False) -> int:
    """Run or continue a population.

    Raises:
        ConfigError: a setting is wrong, or cannot change between rounds; nothing was written.
        RunError: all members of a round failed.
    """
    cfg, found = prepared(overrides)

    from rlplug.run import run_dir  # here, because torch takes seconds to import

    folder, run = found.folder, found.run
    population, total, unit = Population(cfg, run.seed, found.space), run.total_steps, run.loop.cls.unit
    about = {"overrides": found.fixed, "searched": {key: asdict(one) for key, one in found.space.items()}}
    about |= {"sweeper": {key: value for key, value in asdict(cfg).items() if key not in jobs.OWN}}
    rounds = -(-total // cfg.every)
    with jobs.pool(cfg.workers, cfg.ray) as train, run_dir.locked(folder, "hydra.sweep.dir"):
        tell(f"{cfg.members} members, {rounds} rounds of {cfg.every:,} {STEP[unit]}s, in {folder}")
        before = (sweeper.state(folder / STATE, about) or {"rounds": []})["rounds"]
        for number in range(rounds):
            members, until = population.next(), min((number + 1) * cfg.every, total)
            if number + 1 < len(before):  # the next round was decided by these scores
                for one, known in zip(members, before[number], strict=True):
                    one.score = math.nan if known["score"] is None else known["score"]
                continue
            _write(folder, about, population)
            stop = f"stop={{{unit}: {until}}}" if until < total else "stop=null"
            rounds_of = [_Job(folder, one, run.seed + i, found.fixed, stop) for i, one in enumerate(members)]
            for failed in train(rounds_of):
                tell(f"{failed} failed, and will be replaced{jobs.hint(failed, cfg.workers)}")
            summaries = [run_dir.finished(folder / one.folder) for one in members]
            for one, done in zip(members, summaries, strict=True):
                one.score = math.nan if done is None or done.score is None else done.score
            _write(folder, about, population)
            scores = ", ".join(f"{one.score:,.1f}" for one in members)
            tell(f"round {number + 1}, {until:,} of {total:,} {STEP[unit]}s: eval/return_mean {scores}")
            if all(math.isnan(one.score) for one in members):
                raise RunError(f"all members failed{jobs.hint(folder / members[0].folder, cfg.workers)}")
            if any(done and getattr(done, unit) >= total for done in summaries):
                break  # the last update of a round may exceed it
    return _report(folder, population, total, STEP[unit], as_json)


def prepared(overrides: Sequence[str]) -> tuple[PBT, sweeper.Searched]:
    """Check a command line.

    Raises:
        ConfigError: see ``main``.
    """
    cfg, words = sweeper.settings(PBT, overrides)
    given, swept = sweeper.split(words, "pbt")
    for one in given:
        if one.key_or_group == "stop":
            raise ConfigError("stop", "is set by pbt at the end of every round; use total_steps")
    for one in swept:
        if one.key_or_group == "total_steps":
            raise ConfigError("total_steps", "cannot be searched by pbt: all members train equally long")
        if why := fork.fixed(one.key_or_group):
            raise ConfigError(one.key_or_group, f"cannot be searched by pbt: {why}")
    found = sweeper.search("pbt", words, given, swept, cfg.ray.address is None)
    if cfg.every >= found.run.total_steps:
        said = f"{cfg.every:,} leaves a single round in total_steps={found.run.total_steps:,}"
        raise ConfigError("sweeper.every", f"{said}; choose a smaller interval")
    return cfg, found


def _write(folder: Path, about: dict[str, Any], population: Population) -> None:
    rounds = [
        [{**asdict(one), "score": None if math.isnan(one.score) else one.score} for one in members]
        for members in population.rounds
    ]
    atomic.replace(folder / STATE, (json.dumps(about | {"rounds": rounds}, indent=1) + "\n").encode())


def _report(folder: Path, population: Population, total: int, unit: str, as_json: bool) -> int:
    """Print the members of the last round, best first, and draw the lineage if matplotlib is installed."""
    last = sorted(population.rounds[-1], key=lambda one: -math.inf if math.isnan(one.score) else one.score)[::-1]
    rows = [(*one.settings.values(), f"{one.score:,.1f}", one.folder) for one in last]
    if as_json:
        scores = [None if math.isnan(one.score) else one.score for one in last]
        jobs = [{"values": one.settings, "score": x, "job": one.folder} for one, x in zip(last, scores, strict=True)]
        say(json.dumps({"folder": str(folder), "jobs": jobs}))
    else:
        say("\n".join(["", *table((*population.space, "score", "run folder"), rows), f"all rounds: {folder / STATE}"]))
    with suppress(ImportError):
        from rlplug.results import lineage

        ends = [min((i + 1) * population.cfg.every, total) for i in range(len(population.rounds))]
        lineage.draw(folder, population.rounds, ends, unit)
        (tell if as_json else say)(f"lineage: {folder / lineage.FILE}")
    tell(f"best: python -m rlplug evaluate {folder / last[0].folder}")
    return 0


class _Job:
    """One round of a member: a new run, a fork of the round before, or the rest of an interrupted run."""

    def __init__(self, folder: Path, member: Member, seed: int, fixed: Sequence[str], stop: str) -> None:
        self.folder, self.parent = folder / member.folder, folder / member.parent if member.parent else None
        self.words, self.fixed, self.seed = [*space.words(member.settings), stop], fixed, seed

    def command(self) -> list[str] | None:
        """Return the words of a command line that trains this round; None: it has been trained."""
        from rlplug.cli import fork
        from rlplug.run import run_dir

        if (self.folder / run_dir.MANIFEST).exists():
            return None if run_dir.finished(self.folder) else ["resume", str(self.folder)]
        if self.parent is None:
            run = f"hydra.run.dir={sweep.quoted(str(self.folder))}"
            return ["train", *self.fixed, *self.words, f"seed={self.seed}", run]
        fork.prepare(self.parent, None, self.words, self.folder)
        return ["resume", str(self.folder)]
