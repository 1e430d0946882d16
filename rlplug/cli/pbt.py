"""``sweeper=pbt``: population-based training, Jaderberg et al. 2017 (arXiv:1711.09846), over resumable runs.

All members train ``sweeper.every`` steps. Then every one of the worst copies a random one of the best (exploit): it
continues from a checkpoint of that run with perturbed or resampled settings (explore). Each round of a member is a run
folder of its own, forked from the round before, so an interrupted sweep continues with its unfinished runs, and equals
one that was not interrupted.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pydantic import Field

from rlplug.checkpointing import atomic
from rlplug.cli import fork, say, space, sweep, table, tell
from rlplug.config import RunConfig, compose, composed
from rlplug.config.errors import differences, show
from rlplug.config.origins import option_names
from rlplug.config.schema import typed
from rlplug.registry.discovery import unknown
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
    cfg, folder, fixed, searched, run = prepared(overrides)

    from rlplug.run import run_dir  # here, because torch takes seconds to import

    population, total, unit = Population(cfg, run.seed, searched), run.total_steps, run.loop.cls.unit
    about = {"overrides": fixed, "searched": {key: asdict(one) for key, one in searched.items()}}
    about |= {"sweeper": {key: value for key, value in asdict(cfg).items() if key != "workers"}}
    rounds = -(-total // cfg.every)
    with run_dir.locked(folder, "hydra.sweep.dir"):
        tell(f"{cfg.members} members, {rounds} rounds of {cfg.every:,} {STEP[unit]}s, in {folder}")
        _require_same(folder / STATE, about)
        for number in range(rounds):
            members, until = population.next(), min((number + 1) * cfg.every, total)
            _write(folder, about, population)
            stop = f"stop={{{unit}: {until}}}" if until < total else "stop=null"
            _train(cfg, [_Job(folder, one, run.seed + i, fixed, stop) for i, one in enumerate(members)])
            for one in members:
                done = run_dir.finished(folder / one.folder)
                one.score = math.nan if done is None or done.score is None else done.score
            _write(folder, about, population)
            scores = ", ".join(f"{one.score:,.1f}" for one in members)
            tell(f"round {number + 1}, {until:,} of {total:,} {STEP[unit]}s: eval/return_mean {scores}")
            if all(math.isnan(one.score) for one in members):
                raise RunError(f"all members failed; see {folder / members[0].folder}.log")
    return _report(folder, population, total, STEP[unit], as_json)


def prepared(overrides: Sequence[str]) -> tuple[PBT, Path, list[str], dict[str, space.Space], RunConfig]:
    """Check a command line; return its settings, the sweep's folder, the overrides of all members, the search spaces,
    and the configuration of a member.

    Raises:
        ConfigError: see ``main``.
    """
    own = sorted(word for word in overrides if word.startswith(("sweeper=", "sweeper.")))[::-1]
    rest = [word for word in overrides if word not in own]
    cfg = _settings(own)
    folder, _ = sweep.check_sweep(rest)
    fixed, searched = _split(rest)
    run = _checked(cfg, fixed, searched)
    return cfg, folder, fixed, searched, run


def _settings(words: Sequence[str]) -> PBT:
    """Return the settings of the sweeper: those of its YAML, changed by overrides ``sweeper.<option>=<value>``."""
    chosen, *changes = OverridesParser.create().parse_overrides(list(words))
    if (name := str(chosen.value())) not in (known := option_names("sweeper")):
        raise ConfigError("sweeper", f"there is no sweeper {name!r}; {unknown(name, known)}")
    node: dict[str, Any] = OmegaConf.to_container(composed([f"+sweeper={name}"]).sweeper)  # type: ignore[assignment]
    return typed(PBT, node | {one.key_or_group.removeprefix("sweeper."): one.value() for one in changes}, "sweeper")


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, space.Space]]:
    """Return the overrides of all members, and the search space of every swept key.

    Raises:
        ConfigError: nothing is swept, or a fork cannot change it.
    """
    parsed = OverridesParser.create().parse_overrides(list(words))
    swept = [one for one in parsed if one.is_sweep_override()]
    if not swept:
        example = "'algo.lr=interval(1e-5,1e-2)' algo.gamma=0.95,0.99"
        raise ConfigError("sweeper", f"pbt needs settings to search, as in {example}")
    values = {one.get_key_element(): [*one.sweep_string_iterator()] for one in swept if one.is_discrete_sweep()}
    for one in parsed:
        if one.key_or_group == "stop":
            raise ConfigError("stop", "is set by pbt at the end of every round; use total_steps")
    for one in swept:
        if why := fork.fixed(one.key_or_group):
            raise ConfigError(one.key_or_group, f"cannot be searched by pbt: {why}")
    fixed = [str(one.input_line) for one in parsed if one not in swept and not one.key_or_group.startswith("hydra.")]
    return fixed, space.spaces(swept, values)


def _checked(cfg: PBT, fixed: Sequence[str], searched: dict[str, space.Space]) -> RunConfig:
    """Check the ends of every search space, and return the configuration of a member."""
    rng = np.random.default_rng(0)
    run = compose([*fixed, *space.words(space.sampled(searched, rng))])
    for key, one in searched.items():
        for end in one.ends:
            run = compose([*fixed, *space.words(space.sampled(searched, rng) | {key: end})])
    if cfg.every >= run.total_steps:
        said = f"{cfg.every:,} leaves a single round in total_steps={run.total_steps:,}; choose a smaller interval"
        raise ConfigError("sweeper.every", said)
    if not run.env.cls.traits.playable:
        raise ConfigError("sweeper", f"pbt compares evaluations, but env={run.env.name} cannot be played")
    return run


def _require_same(file: Path, about: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if a file describes another population."""
    with suppress(FileNotFoundError):
        try:
            before = {key: json.loads(atomic.read(file))[key] for key in about}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("hydra.sweep.dir", f"{file} is damaged ({error}); choose another folder") from None
        for key, old, new in differences(before, json.loads(json.dumps(about))):
            said = f"{file.parent} has {key}={show(old)}, which now is {show(new)}; choose another folder"
            raise ConfigError("hydra.sweep.dir", said)


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
        self.log = self.folder.with_name(f"{self.folder.name}.log")
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


def _train(cfg: PBT, jobs: Sequence[_Job]) -> None:
    """Train a round. A member that fails is replaced in the next round.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM ended a member.
    """
    commands = [(job, command) for job in jobs if (command := job.command()) is not None]
    if cfg.workers == 0:
        from rlplug.cli import main as run

        codes = map(run, (command for _, command in commands))
    else:
        lines = [[sys.executable, "-m", "rlplug", *command] for _, command in commands]
        codes = _outcomes(cfg, lines, [str(job.log.absolute()) for job, _ in commands])
    for (job, _), code in zip(commands, codes, strict=True):
        if abs(code) % 128 in (signal.SIGINT, signal.SIGTERM):
            raise KeyboardInterrupt(abs(code) % 128)
        if code:
            tell(f"{job.folder} failed, and will be replaced" + (f"; see {job.log}" if cfg.workers != 0 else ""))


def _outcomes(cfg: PBT, lines: Sequence[Sequence[str]], logs: Sequence[str]) -> Sequence[int]:
    """Run command lines in processes, and return their exit codes."""
    with ThreadPoolExecutor(cfg.workers or os.cpu_count() or 1) as pool:
        return [*pool.map(logged, lines, logs)]


def logged(line: Sequence[str], log: str) -> int:
    """Run a command line with its output appended to a file, and return its exit code."""
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
