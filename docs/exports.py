"""Write docs/exports.md: what exports of every algorithm with every kind of model differ by from the policy.

    python docs/exports.py             # train, export and replay those that exports.json lacks, and write both files
    python docs/exports.py ppo sac     # these algorithms again
    python docs/exports.py --page      # write the page only, from exports.json

A run of docs/matrix.json is trained for an update, its policy is exported to ONNX and torch.export, and 1,000 recorded
steps are replayed in a process without rlplug. An algorithm takes half a minute of CPU time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplug.results.export import FILES, LIMIT, exported, replayed, write
from rlplug.results.export_policy import Policy
from rlplug.results.export_record import Record, record
from rlplug.testing.checks.matrix import Cell, for_agents
from rlplug.testing.checks.runs import play
from rlplug.types import ConfigError, RunError

DOCS = Path(__file__).parent
PAGE, FOUND = (DOCS / f"exports.{end}" for end in ("md", "json"))
FORMATS = ("onnx", "torch")
STEPS = 1000
MODELS: dict[str, Callable[[Cell], bool]] = {
    "mlp": lambda cell: cell.observation == "vector" and cell.recurrence == "none",
    "cnn": lambda cell: cell.observation == "image" and cell.recurrence == "none",
    "multi_input": lambda cell: cell.observation in ("dict", "tuple") and cell.recurrence == "none",
    "gru": lambda cell: cell.recurrence == "gru",
    "lstm": lambda cell: cell.recurrence == "lstm",
    "attention": lambda cell: cell.recurrence == "attention",
}
"""columns of the table, and their runs"""
INTRO = f"""# Exports of every algorithm and model

`python docs/exports.py` wrote this page. Each cell is a run of the [matrix](matrix.md) that was trained for an update
and exported as `rlplug export` does ([how](export.md)). {STEPS:,} recorded steps were replayed in a process without
rlplug, step by step and all at once. The numbers are the largest differences of actions, scores and recurrent states
from the policy in rlplug: in onnxruntime, and in torch.export. Above {LIMIT:g}, nothing is written. Below them stand
observations and actions. A dash: the algorithm does not serve such a model.

| | {" | ".join(MODELS)} |
|{"---|" * (len(MODELS) + 1)}
"""


def cells() -> dict[str, dict[str, Cell]]:
    """Return the run of every algorithm of one agent and model, of those that normalize observations the first."""
    found: dict[str, dict[str, Cell]] = {}
    for name, of in json.loads((DOCS / "matrix.json").read_text(encoding="utf-8")).items():
        if for_agents(name):
            continue
        runs = sorted((Cell(name, *run.split()) for run in of["runs"]), key=lambda cell: cell.normalization != "all")
        first = {model: next(filter(fits, runs), None) for model, fits in MODELS.items()}
        found[name] = {model: cell for model, cell in first.items() if cell is not None}
    return found


def differences(chosen: Sequence[Cell], formats: Sequence[str] = FORMATS, steps: int = STEPS) -> list[list[float]]:
    """Return the largest difference of every run's policy in every format.

    Raises:
        ConfigError, RunError: one cannot be exported, or differs by more than ``LIMIT``.
    """
    with tempfile.TemporaryDirectory() as folder:
        played: dict[Path, Record] = {}
        for i, cell in enumerate(chosen):
            (Path(folder) / str(i)).mkdir()
            played |= _exported(cell, [Path(folder) / str(i) / FILES[format] for format in formats], steps)
        found = [of["largest_difference"] for of in replayed(played)]
    return [found[i : i + len(formats)] for i in range(0, len(found), len(formats))]


def _exported(cell: Cell, paths: Sequence[Path], steps: int) -> dict[Path, Record]:
    """Train a run for an update, and write its policy to every path; return what to replay there."""
    trainer = cell.build()
    try:
        play(trainer, 1)
        policy = Policy(trainer.algorithm, trainer.ctx, trainer.learner.normalizer)
        program = exported(policy)  # first, as it leaves out what acting does not read
        for path in paths:
            write(program, policy, path)
        env, ctx = trainer.config.env, trainer.ctx
        return dict.fromkeys(paths, record(policy, ctx, lambda shard: env.build(ctx.derive(shard=shard)), steps))
    except (ConfigError, RunError) as error:
        error.add_note(str(cell))
        raise
    finally:
        trainer.close()


def find(name: str) -> dict[str, Any]:
    """Return the runs of an algorithm and the largest differences of their exports, by model."""
    of = cells()[name]
    found = zip(of, differences(list(of.values())), strict=True)
    return {model: {"run": str(of[model]), **dict(zip(FORMATS, figures, strict=True))} for model, figures in found}


def page(found: Mapping[str, Any]) -> str:
    return INTRO + "".join(_row(name, found[name]) for name in cells() if name in found)


def _row(name: str, of: Mapping[str, Any]) -> str:
    row = [name]
    for model in MODELS:
        if model not in of:
            row.append("-")
            continue
        cell = Cell(*of[model]["run"].split())
        said = f"{cell.observation}, {cell.action}{', normalized' * (cell.normalization == 'all')}"
        row.append(f"{' / '.join(f'{of[model][format]:.1e}' for format in FORMATS)}<br>{said}")
    return f"| {' | '.join(row)} |\n"


def main(names: Sequence[str]) -> None:
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    if names != ["--page"]:
        for name in names or [name for name in cells() if name not in found]:
            found[name] = find(name)
            print(_row(name, found[name]), end="", flush=True)
            ordered = {name: found[name] for name in cells() if name in found}
            FOUND.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
