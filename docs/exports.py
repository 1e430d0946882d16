"""Write docs/exports.md: what exports of every algorithm with every kind of model differ by from the policy.

    python docs/exports.py             # train, export and replay all of them (half an hour)
    python docs/exports.py ppo sac     # print these algorithms' rows, and write nothing

A run of docs/matrix.json is trained for an update, its policy is exported to ONNX and torch.export, and 1,000 recorded
steps are replayed in a process without rlplug.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlplug.results.export import FILES, LIMIT, exported, replayed, write
from rlplug.results.export_policy import Policy
from rlplug.results.export_record import Record, record
from rlplug.testing.checks.matrix import Cell
from rlplug.testing.checks.runs import play
from rlplug.types import ConfigError, RunError

DOCS = Path(__file__).parent
PAGE = DOCS / "exports.md"
FORMATS = ("onnx", "torch")
STEPS = 1000
MODELS: dict[str, Callable[[Cell], bool]] = {
    "mlp": lambda cell: cell.observation == "vector" and cell.recurrence == "none",
    "cnn": lambda cell: cell.observation == "image" and cell.recurrence == "none",
    "multi_input": lambda cell: cell.observation in ("dict", "tuple") and cell.recurrence == "none",
    "gru": lambda cell: cell.recurrence == "gru",
    "lstm": lambda cell: cell.recurrence == "lstm",
}
"""columns of the table, and their runs"""
INTRO = f"""# Exports of every algorithm and model

`python docs/exports.py` wrote this page. Each cell is a run of the [matrix](matrix.md) that was trained for an update
and exported by `rlplug export` ([how](export.md)). {STEPS:,} recorded steps were replayed in a process without rlplug, step
by step and all at once. The numbers are the largest differences of actions, scores and recurrent states from the
policy in rlplug, in onnxruntime and in torch.export. An export that differs by more than {LIMIT:g} is not written.
Below them stand observations, actions and what else the run had. A dash: the algorithm does not serve such a model.

| | {" | ".join(MODELS)} |
|{"---|" * (len(MODELS) + 1)}
"""


def cells() -> dict[str, dict[str, Cell]]:
    """Return the run of every algorithm and model, of those that normalize observations the first."""
    found: dict[str, dict[str, Cell]] = {}
    for name, of in json.loads((DOCS / "matrix.json").read_text(encoding="utf-8")).items():
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
        program = exported(policy)
        for path in paths:
            write(program, policy, path)
        env, ctx = trainer.config.env, trainer.ctx
        return dict.fromkeys(paths, record(policy, ctx, lambda shard: env.build(ctx.derive(shard=shard)), steps))
    except (ConfigError, RunError) as error:
        error.add_note(str(cell))
        raise
    finally:
        trainer.close()


def rows(names: Sequence[str]) -> Iterator[str]:
    """Yield the rows of the table, one for each algorithm."""
    for name, of in cells().items():
        if not names or name in names:
            found = dict(zip(of, differences(list(of.values())), strict=True))
            row = [f"{_figures(found[m])}<br>{_said(of[m])}" if m in of else "–" for m in MODELS]
            yield f"| {' | '.join([name, *row])} |\n"


def _figures(found: Sequence[float]) -> str:
    return " / ".join(f"{x:.1e}" for x in found)


def _said(cell: Cell) -> str:
    said = f"{cell.observation}, {cell.action}"
    return f"{said}, normalized" if cell.normalization == "all" else said


if __name__ == "__main__":
    lines = []
    for line in rows(sys.argv[1:]):
        print(line, end="", flush=True)
        lines.append(line)
    if not sys.argv[1:]:
        PAGE.write_text(INTRO + "".join(lines), encoding="utf-8")
