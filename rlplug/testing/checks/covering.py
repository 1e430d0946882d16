"""Covering arrays: few cells of the matrix that together cover every pair or triple of levels that is not refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

from rlplug.testing.checks.matrix import FACTORS, Cell, Levels, check_cell, levels
from rlplug.testing.checks.runs import require


def tuples(of: int) -> list[Levels]:
    """Return every combination of levels of ``of`` factors."""
    return [
        frozenset(zip(some, chosen, strict=True))
        for some in combinations(FACTORS, of)
        for chosen in product(*map(levels, some))
    ]


def base(algorithm: str) -> Cell:
    """Return the cell of the algorithm's first supported action space, without other features."""
    cells = [Cell(algorithm, action=action) for action in levels("action")]
    served = next((cell for cell in cells if cell.refusal() is None), None)
    require(served, f"{algorithm} supports no action space: {'; '.join(str(cell.refusal()) for cell in cells)}")
    return served or cells[0]


def cover(algorithm: str, refused: Sequence[Levels], strength: int) -> Iterator[Cell]:
    """Yield cells that cover every combination of ``strength`` levels that is not refused.

    ``refused`` may grow during iteration: a yielded cell that is then refused does not count.
    """
    todo, seen = dict.fromkeys(tuples(strength)), list[Levels]()
    while todo:
        if seen != refused:
            seen = list(refused)
            todo = {some: None for some in todo if not holds(some, seen)}
            continue
        first = next(iter(todo))
        row = _complete(dict(first), [f for f in FACTORS if f not in dict(first)], todo, refused)
        if row is None:  # refusals of more factors leave no level to add
            del todo[first]
            continue
        cell = Cell(algorithm, **row)
        yield cell
        if not holds(cell.levels, refused):
            for some in combinations(sorted(cell.levels), strength):
                todo.pop(frozenset(some), None)


def _complete(
    row: dict[str, str], left: Sequence[str], todo: dict[Levels, None], refused: Sequence[Levels]
) -> dict[str, str] | None:
    """Complete a row greedily by the allowed level that covers most."""
    if holds(frozenset(row.items()), refused):
        return None
    if not left:
        return row
    factor, *others = left
    strength = len(next(iter(todo)))

    def gain(level: str) -> int:
        return sum(frozenset((*some, (factor, level))) in todo for some in combinations(row.items(), strength - 1))

    for level in sorted(levels(factor), key=gain, reverse=True):
        if found := _complete(row | {factor: level}, others, todo, refused):
            return found
    return None


def holds(some: Levels, refused: Sequence[Levels]) -> bool:
    """Return whether these levels include a refused combination."""
    return any(one <= some for one in refused)


def discover(algorithm: str, strength: int = 2) -> tuple[list[Cell], dict[Levels, list[str]]]:
    """Return covering cells, and the refused combinations: minimal levels and their overrides."""
    start, cells = base(algorithm), list[Cell]()
    known: list[Levels] = []
    found: dict[Levels, list[str]] = {}
    for cell in cover(algorithm, known, strength):
        if cell.refusal() is None:
            cells.append(cell)
            continue
        found |= _why(cell, start)
        if not holds(cell.levels, list(found)):  # the cause is not known yet
            found[cell.levels] = [str(cell.refusal())]
        known[:] = [some for some in found if not holds(some, [other for other in found if other != some])]
    return cells, {some: found[some] for some in known}


def _why(cell: Cell, start: Cell) -> dict[Levels, list[str]]:
    """Return the minimal levels that cause a refusal, with all others as in ``start``."""
    for factor in FACTORS:
        simpler = replace(cell, **{factor: getattr(start, factor)})
        if simpler.refusal() is not None:
            cell = simpler
    blamed = cell.levels - start.levels
    words = [str(cell.refusal())]
    for factor in FACTORS:
        if factor in dict(blamed):
            continue
        others = {level: replace(cell, **{factor: level}).refusal() for level in levels(factor)}
        if None in others.values():
            return {blamed | {(factor, level)}: [said] for level, said in others.items() if said is not None}
        served = [said for level, said in others.items() if replace(start, **{factor: level}).refusal() is None]
        words += [str(said) for said in served]
    return {blamed: list(dict.fromkeys(words))}


def check_matrix(algorithm: str, strength: int = 2) -> None:
    """Check that an algorithm runs with every combination of ``strength`` features that is not refused.

    Raises:
        AssertionError, RunError: see ``check_cell``.
    """
    for cell in discover(algorithm, strength)[0]:
        check_cell(cell)
