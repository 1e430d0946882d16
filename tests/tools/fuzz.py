"""Damage checkpoints at random and check that nothing wrong is ever loaded: ``python -m tests.tools.fuzz <run> 1000``.

Each case copies a run folder, damages the copy, and loads it as ``resume`` does. That may end in two ways: with the
state of one of the run's own checkpoints, bit for bit, or with one error of few lines. After damage that checksums show
it has to be the newest undamaged checkpoint. Anything else is a violation: another exception, another state, or code in
a file that was executed. The run folder itself is only read.
"""

import hashlib
import shutil
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from rlplug.checkpointing.atomic import delete
from rlplug.checkpointing.format import Checkpoint, FileRowLog, checkpoints, find, folder_of
from rlplug.config import parse
from rlplug.run import launch
from rlplug.run import run_dir as run_folder
from rlplug.run.callbacks import capture, restore
from rlplug.types import ConfigError, RunError, Tree
from tests.tools.asking import MOST_LINES
from tests.tools.asking import main as campaign
from tests.tools.damage import OWN, PLAIN, SLY, Scene, candidates, copied

RESUMED = 10
"""one case in so many goes through the whole of ``resume``; so do those that damage more than checkpoints"""


class ViolationError(AssertionError):
    """A damaged folder was not handled as it must be."""


# ---- what a state is -------------------------------------------------------------------------------------------------


def digest(tree: Tree) -> str:
    """Return a digest of every bit of a tree, its types and its structure."""
    sha = hashlib.sha256()

    def add(node: Tree) -> None:
        if isinstance(node, Tensor):
            node = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if node.numel() else str(node)
        if isinstance(node, np.ndarray):
            sha.update(f"{node.dtype}{node.shape}".encode() + node.tobytes())
        elif isinstance(node, dict):
            sha.update(f"dict{len(node)}".encode())
            for key, value in node.items():
                add(key)
                add(value)
        elif isinstance(node, list | tuple):
            sha.update(f"{type(node).__name__}{len(node)}".encode())
            for value in node:
                add(value)
        else:
            sha.update(f"{type(node).__name__}{node!r};".encode())

    add(tree)
    return sha.hexdigest()


def state_of(checkpoint: Checkpoint, config: dict[str, Any]) -> str:
    """Return the digest of a new trainer's state after it was restored from a checkpoint."""
    with closing(launch.build(parse(config), Path())) as trainer:
        restore(trainer, checkpoint)
        store = FileRowLog()
        trainer.buffer.save(store)
        return digest([capture(trainer).trees, list(store.rows())])


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Fuzzer:
    """Runs cases on one run folder.

    Args:
        run: a run folder with checkpoints; it is only read.
        work: an empty folder.
        seed: it determines a case, together with the case's number.
    """

    run: Path
    work: Path
    seed: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of damage, how it ended) -> number of cases"""

    def __post_init__(self) -> None:
        """Copy the run, train another one, and find out what each checkpoint holds and leads to."""
        raw, _ = run_folder.read(self.run)
        newest = find(self.run).steps
        self.work.mkdir(exist_ok=True)
        self.good = self.work / "good"
        shutil.copytree(self.run, self.good, symlinks=True)
        with closing(launch.build(parse(raw), Path())) as trainer:
            self.total = newest + 2 * trainer.ctx.rollout_length * trainer.config.num_envs
        # short, and without anything that depends on time
        raw |= {"total_steps": self.total, "logger": {"csv": {"name": "csv"}}}
        raw |= {"eval": raw["eval"] | {"every": 0, "episodes": 1, "record": 0}}
        raw |= {"checkpoint": raw["checkpoint"] | {"every": 0}}
        self.config = raw
        run_folder.write_config(self.good, raw)
        self.other = self.work / "other"
        launch.train(parse({**raw, "seed": raw["seed"] + 1, "total_steps": min(newest, 2000)}), self.other)
        found = [Checkpoint(path) for path in checkpoints(self.good)]
        self.names = {state_of(one, raw): one.path.name for one in found}
        self.ends = {one.path.name: self._end_from(one.path) for one in found}

    def _end_from(self, path: Path) -> tuple[str, list[str]]:
        """Return the end of a run that is resumed from an undamaged checkpoint."""
        run = copied(self.good, self.work / "end")
        for newer in checkpoints(run):
            if newer.name > path.name:
                delete(newer)
        launch.resume(run, tell=lambda _: None)
        end = self._end(run)
        shutil.rmtree(run)
        return end

    def _end(self, run: Path) -> tuple[str, list[str]]:
        """Return the last state, and the steps of the rows of metrics."""
        rows = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()[1:]
        return state_of(find(run), self.config), [row.partition(",")[0] for row in rows]

    def case(self, number: int) -> str:
        """Run one case.

        Returns:
            How it ended.

        Raises:
            ViolationError: it ended in a way that it must not.
        """
        rng = Random(f"{self.seed} {number}")
        run = copied(self.good, self.work / f"case{number}")
        scene = Scene(run, self.other, self.work / "marker", rng)
        kinds = [rng.choice([PLAIN, PLAIN, SLY, OWN]) for _ in range(rng.choice([1, 1, 2, 3]))]
        done = []
        for kind in kinds:
            name = rng.choice(list(kind))
            done.append((kind, name))
            with suppress(LookupError, OSError):  # earlier damage left nothing for it
                kind[name](scene)
        names = [name for _, name in done]
        whole = number % RESUMED == 0 or any(kind is OWN for kind in kinds)
        try:
            expected = None if any(kind is not PLAIN for kind, _ in done) else self._newest_whole(run)
            any_left = bool(candidates(run))
            ended = (self._resumed if whole else self._loaded)(run, names, expected)
            if ended == "finished" and expected:
                raise ViolationError(f"it did not go on from {expected}")
            if ended == "from the beginning" and any_left:
                raise ViolationError("it began from the start although there are checkpoints")
            if scene.marker.exists():
                raise ViolationError("code in a file was executed")
        except ViolationError as error:
            shutil.rmtree(self.work / "violation", ignore_errors=True)
            run.rename(self.work / "violation")
            raise ViolationError(f"case {number}, {' + '.join(names)}: {error}") from error.__cause__
        shutil.rmtree(run)
        for name in names:
            self.outcomes[name, ended] += 1
        return ended

    def _newest_whole(self, run: Path) -> str:
        """Return the name of the newest undamaged checkpoint; "" if there is none."""
        for path in candidates(run):
            for original in checkpoints(self.good):
                with suppress(OSError):
                    if all((path / file.name).read_bytes() == file.read_bytes() for file in original.iterdir()):
                        return original.name
        return ""

    def _loaded(self, run: Path, names: list[str], expected: str | None) -> str:
        """Find and restore a checkpoint as ``resume`` does."""
        try:
            _, manifest = run_folder.read(run)
            if not checkpoints(run):
                return "from the beginning"
            checkpoint = find(run)
            launch._check_own(checkpoint, manifest, parse(self.config), ())
            state = state_of(checkpoint, self.config)
        except ConfigError as error:
            return self._refused(error, expected)
        except Exception as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error
        if state not in self.names:
            raise ViolationError("a state was loaded that no checkpoint of the run has")
        return self._right(self.names[state], expected)

    def _resumed(self, run: Path, names: list[str], expected: str | None) -> str:
        """Resume to the end of the run."""
        said: list[str] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                launch.resume(run, self._short(run), tell=said.append)
        except ConfigError as error:
            return self._refused(error, expected)
        except RunError as error:  # the run cannot write
            self._refused(error, expected)
            return "stopped"
        except Exception as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error
        if any("has finished" in line for line in said):
            return "finished"
        (start,) = [line.removeprefix("continuing from ") for line in said if line.startswith("continuing from ")]
        if start.startswith("the beginning"):
            return "from the beginning"
        name = folder_of(run, int(start.removeprefix("step ").replace(",", ""))).name
        if name not in self.ends:
            raise ViolationError(f"it went on from {name}, which was never written")
        state, steps = self._end(run)
        if not any(name.startswith("config.yaml") for name in names) and state != self.ends[name][0]:
            raise ViolationError(f"it went on from {name} and came to another end")
        if not any(name.startswith(("config.yaml", "metrics.csv")) for name in names) and steps != self.ends[name][1]:
            raise ViolationError(
                f"it went on from {name} with other rows of metrics than {self.ends[name][1]}: {steps}"
            )
        return self._right(name, expected)

    def _short(self, run: Path) -> list[str]:
        """Return overrides that keep a run with a damaged configuration short."""
        try:
            raw = yaml.safe_load((run / "config.yaml").read_bytes())
            if (raw["total_steps"], raw["eval"]) == (self.total, self.config["eval"]):
                return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
            return []
        return [f"total_steps={self.total}", "eval.episodes=1", "eval.every=0"]

    def _refused(self, error: ConfigError | RunError, expected: str | None) -> str:
        if expected:
            raise ViolationError(f"{expected} is good, but it was refused: {error}") from error
        if not str(error).strip() or len(str(error).splitlines()) > MOST_LINES:
            raise ViolationError(f"the message is too long, or empty: {error}") from error
        return "refused"

    def _right(self, name: str, expected: str | None) -> str:
        if expected is not None and name != expected:
            raise ViolationError(f"{name} was loaded, not {expected or 'nothing'}")
        return "newest" if name == max(self.ends) else "older"

    def faults(self, number: int) -> list[str]:
        """Run one case and return its violation."""
        try:
            self.case(number)
        except ViolationError as error:
            traceback.print_exception(error.__cause__)
            return [f"{error}; the folder is {self.work / 'violation'}"]
        return []


def main(words: Sequence[str]) -> int:
    """Run the command, ``<run> <cases> [seed [the only case]]``, and return its exit code: 2 for bad input."""
    try:
        return campaign(lambda work, seed: Fuzzer(Path(words[0]), work / "fuzz", seed), words[1:])
    except (ConfigError, RunError) as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
