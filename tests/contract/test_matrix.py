"""Features cross: what docs/matrix.md promises runs, and what it says is refused is refused, in its words."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from rlplug import compose, registry
from rlplug.nn import distributions
from rlplug.testing.checks import resume
from rlplug.testing.checks.covering import base, check_matrix, holds, tuples
from rlplug.testing.checks.matrix import Cell, check_cell, for_agents
from rlplug.testing.worlds import World
from rlplug.types import RunError

GENERATOR = Path(__file__).parent.parent.parent / "docs" / "matrix.py"
_spec = importlib.util.spec_from_file_location("docs_matrix", GENERATOR)
assert _spec is not None
assert _spec.loader is not None
docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs)

EVERY = {name: of for name, of in docs.found().items() if name in registry.names("algo")}
by_algorithm = pytest.mark.parametrize("name", EVERY)

ADAPTS = {"maml", "mbmpo"}
"""algorithms that need tasks, or rewards of imagined observations, of which the matrix's world has none"""

FAMILIES = ("dqn", "iql", "impala", "linucb", "marwil", "ppo", "sac", "td3")
"""one of each family; every pair of levels that any of them has is in a run of one, in every run of the tests"""


def by_cell(cells: list[Cell], quick: Collection[Cell]) -> pytest.MarkDecorator:
    """Make those that are not ``quick`` slow."""
    every = [pytest.param(cell, marks=() if cell in quick else pytest.mark.slow) for cell in cells]
    return pytest.mark.parametrize("cell", every, ids=lambda cell: str(cell).replace(" ", "-"))


def few(runs: list[Cell], size: int = 1) -> list[Cell]:
    """So few that every combination of ``size`` levels is in one of them."""
    held = {run: {frozenset(some) for some in combinations(run.levels, size)} for run in runs}
    left = set().union(*held.values())
    chosen: list[Cell] = []
    while left:
        chosen.append(max(runs, key=lambda run: len(held[run] & left)))
        left -= held[chosen[-1]]
    return chosen


def restorable(cell: Cell) -> Any:
    """The state of this native vector cannot be read: a run with it goes on with new episodes, and says so."""
    return replace(cell, vector="list")


def test_the_page_shows_what_was_found():
    ours = {name for (kind, name), by in registry.owners().items() if kind == "algo" and by[0].distribution == "rlplug"}
    assert {"ppo", "sac", "dqn"} <= ours
    for name in ours - set(docs.found()) - ADAPTS:  # it needs an environment of its own
        with pytest.raises(AssertionError, match=r"supports no action space: .*(no simulator|needs observations)"):
            base(name)
    page = docs.page(docs.found())
    assert re.findall(r'<section data-name="(\w+)">', page) == list(docs.found())
    assert page.count("✓") > 2_000
    for name, of in docs.found().items():  # every refusal is on the page, in its words
        assert [note for note in of.notes if docs.code(note) not in page] == [], name
        assert [one for one in of.altogether if docs.code(docs._words(of, frozenset([one]))) not in page] == [], name


@by_algorithm
def test_every_pair_is_known(name: str):
    of, pairs = EVERY[name], tuples(2)
    assert len(pairs) > 400
    unknown = [sorted(some) for some in pairs if not any(some <= run.levels for run in of.runs)]
    unknown = [some for some in unknown if not holds(frozenset(some), list(of.refused))]
    assert not unknown, f"run {GENERATOR}"
    assert not [str(run) for run in of.runs if holds(run.levels, list(of.refused))]


ALL = [run for of in EVERY.values() for run in of.runs]
FEW = {name: few(of.runs) for name, of in EVERY.items()}
FEW |= {name: runs[:2] for name, runs in FEW.items() if for_agents(name)}
QUICK = {
    *few([run for name in FAMILIES for run in EVERY[name].runs], 2),
    *(run for some in FEW.values() for run in some),
}


@by_cell(ALL, QUICK)
def test_a_cell_runs(cell: Cell):
    check_cell(cell)


@by_algorithm
def test_what_is_refused_is_refused_in_these_words(name: str):
    start = base(name)
    for some, words in EVERY[name].refused.items():
        assert replace(start, **dict(some)).refusal() == words[0]


@pytest.mark.slow
@by_algorithm
def test_every_refused_pair_is_refused(name: str):
    start, refused = base(name), list(EVERY[name].refused)
    pairs = [some for some in tuples(2) if holds(some, refused)]
    assert pairs
    for some in pairs:
        assert replace(start, **dict(some)).refusal() is not None, sorted(some)


@by_cell(
    ALL, [run for name in EVERY for run in FEW[name][: None if name in FAMILIES else 1 if for_agents(name) else 2]]
)
def test_a_cell_resumes_exactly(cell: Cell):
    resume.check_resumes(restorable(cell))


@by_cell(FEW["dqn"], FEW["dqn"])
def test_rainbow_crosses(cell: Cell):
    check_cell(cell, "algo.double_q=true", "algo.dueling=true", "algo.noisy=true", "algo.num_atoms=5")


@by_cell(FEW["dqn"], FEW["dqn"])
def test_r2d2_crosses(cell: Cell):
    check_cell(cell, "algo.double_q=true", "algo.value_rescaling=0.001", "algo.burn_in=0")


@by_algorithm
def test_a_cell_is_its_command_line(name: str):
    cell = max(FEW[name], key=lambda cell: len(cell.words))
    assert compose(cell.words).raw == cell.config().raw


def test_in_worker_processes():
    cell = next(run for run in EVERY["ppo"].runs if (run.observation, run.action) == ("dict", "discrete+mask"))
    check_cell(replace(cell, vector="subprocess"), "env.workers=1")


@pytest.mark.slow
@by_algorithm
def test_every_three_features(name: str):
    check_matrix(name, strength=3)


# ---- the tests themselves --------------------------------------------------------------------------------------------


def test_a_world_takes_no_wrong_action():
    world = World(action="multi_discrete", mask=True)
    _, info = world.reset(seed=0)
    with pytest.raises(ValueError, match="outside of"):
        world.step([3, 0])
    for first, second in product(range(3), range(2)):
        if not (info["action_mask"][first] and info["action_mask"][3 + second]):
            with pytest.raises(ValueError, match="forbidden"):
                world.step([first, second])


def test_an_algorithm_that_does_not_heed_masks_is_noticed(monkeypatch: pytest.MonkeyPatch):
    heeding = distributions._log_softmax
    monkeypatch.setattr(distributions, "_log_softmax", lambda logits, mask: heeding(logits, None))
    with pytest.raises(RunError, match="forbidden by the mask") as caught:
        check_cell(Cell("ppo", action="discrete+mask"))
    assert "python -m rlplug algo=ppo" in caught.value.__notes__[0]
