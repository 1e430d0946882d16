"""Check that components do not modify their input rows, and can be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from rlplug import tree
from rlplug.testing.checks.runs import Case, answers, differences, episodes, play, require, some
from rlplug.types import Batch


def check_rows_stay(case: Case) -> None:
    """Check that ``act``, ``postprocess``, ``observe`` and ``prepare`` do not modify their input rows."""
    with closing(case.build()) as trainer:
        who: Any = trainer.algorithm
        vars(trainer.ctx)["traceable"] = lambda components: False  # candidates act one by one, on ordinary tensors
        for name in ("act", "postprocess", "annotate", "prepare"):
            setattr(who, name, _leaving(name, getattr(who, name)))
        observe = who.observe

        def watched(segment: Any, learner: Any) -> None:
            before = tree.map(torch.clone, segment.batch)
            observe(segment, learner)
            _require_same(before, segment.batch, "observe")

        who.observe = watched
        play(trainer)


def _leaving(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def called(batch: Batch, *args: Any, **options: Any) -> Any:
        before = tree.map(torch.clone, batch)
        out = method(batch, *args, **options)
        _require_same(before, batch, name)
        return out

    return called


def _require_same(before: Batch, after: Batch, name: str) -> None:
    names = differences(before, after)
    require(
        not names,
        f"{name}() changes {some(names)} of its rows, which other code reads too: compute new tensors and return"
        " them in a new dict, as in `batch | {...}`",
    )


def check_pickles(case: Case) -> None:
    """Check that a pickled copy of a trained algorithm acts equally: processes exchange such copies."""
    with closing(case.build()) as trainer:
        play(trainer)
        rows = episodes(trainer, 4)
        said = answers(trainer.algorithm, trainer.ctx, rows, "greedy")
        try:
            copy = pickle.loads(pickle.dumps(trainer.algorithm))
        except Exception as error:
            why = "a lambda, a function inside a function, a generator, an open file"
            raise AssertionError(f"it cannot be pickled ({error}): look for {why} on self") from error
        names = differences(said, answers(copy, trainer.ctx, rows, "greedy"))
        require(not names, f"a pickled copy acts differently ({some(names)}): does __getstate__ omit something?")
