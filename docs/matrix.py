"""Find out which features work together, and format the tables of the page that shows it, docs/matrix.md.

    python docs/matrix.py            # build thousands of runs to find out (minutes), and write matrix.json

tests/contract/test_matrix.py makes the runs of matrix.json. The site has the tables at the marker ``<!-- matrix -->``
(see pages.py), with a filter by algorithm and feature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlplug import registry
from rlplug.testing.checks.covering import discover
from rlplug.testing.checks.matrix import FACTORS, Cell, Levels, levels

FOUND = Path(__file__).with_name("matrix.json")
OURS = ("rlplug", "rlplug-reinforce")
APART = ("alphazero", "slateq")
"""algorithms that need environments of their own: a simulator, slates of documents"""
SPACES = ("observation", "action")
FEATURES = tuple(factor for factor in FACTORS if factor not in SPACES)
SAID = {
    "n_step": "n-step {}",
    "priorities": "priorities",
    "normalization": "normalize {}",
    "vector": "{} vector",
}
SCRIPT = """<script>
(() => {
  const [algorithm, feature] = document.querySelectorAll(".matrix-filter select")
  const show = () => {
    document.querySelectorAll(".matrix > section").forEach((section) => {
      section.hidden = ![section.dataset.name, "all"].includes(algorithm.value)
      section.querySelectorAll("table").forEach((table) => {
        const chosen = feature.value, heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent)
        const column = heads.indexOf(chosen)
        for (const row of table.tBodies[0].rows) {
          const all = chosen === "any" || row.cells[0].textContent === chosen
          for (const cell of row.cells) cell.hidden = !all && ![0, column].includes(cell.cellIndex)
          row.hidden = chosen !== "any" && ![...row.cells].slice(1).some((cell) => !cell.hidden && cell.textContent)
        }
        for (const cell of table.tHead.rows[0].cells) {
          const shown = [...table.tBodies[0].rows].some((row) => !row.hidden && !row.cells[cell.cellIndex].hidden)
          cell.hidden = !shown
        }
        table.hidden = [...table.tBodies[0].rows].every((row) => row.hidden)
      })
    })
  }
  for (const [select, key] of [[algorithm, "algorithm"], [feature, "feature"]]) {
    const given = new URLSearchParams(location.search).get(key)
    if ([...select.options].some((option) => option.value === given)) select.value = given
    select.addEventListener("change", show)
  }
  show()
})()
</script>"""


class Found:
    """What matrix.json holds of an algorithm."""

    def __init__(self, algorithm: str, found: dict[str, Any]) -> None:
        self.algorithm = algorithm
        self.runs = [Cell(algorithm, *run.split()) for run in found["runs"]]
        self.refused = {_levels(levels): words.split("\n") for levels, words in found["refused"].items()}

    @property
    def altogether(self) -> list[tuple[str, str]]:
        """Levels that are refused with all others."""
        return [one for some in self.refused if len(some) == 1 for one in some]

    @property
    def notes(self) -> list[str]:
        """The messages that refuse combinations of levels."""
        return list(dict.fromkeys(_words(self, some) for some in self.refused if len(some) > 1))

    def served(self, *factors: str) -> list[tuple[str, str]]:
        every = [(factor, level) for factor in factors for level in levels(factor)]
        features = [(f, level) for f, level in every if f in SPACES or level != levels(f)[0]]
        return [one for one in features if one not in self.altogether]


def found() -> dict[str, Found]:
    """Read matrix.json, by algorithm."""
    return {name: Found(name, of) for name, of in json.loads(FOUND.read_text(encoding="utf-8")).items()}


def page(every: dict[str, Found]) -> str:
    """Return the HTML of all tables, with their filter."""
    features = dict.fromkeys(label(*one) for of in every.values() for one in of.served("action", *FEATURES))
    return "\n".join(
        [
            '<div class="matrix-filter">',
            _select("algorithm", ["all", *every]),
            _select("feature", ["any", *levels("observation"), *features]),
            "</div>",
            '<div class="matrix" data-search-exclude>',
            *(line for of in every.values() for line in _section(of)),
            "</div>",
            SCRIPT,
        ]
    )


def _select(name: str, options: Sequence[str]) -> str:
    return (
        f"<label>{name} <select>{''.join(f'<option>{escape(option)}</option>' for option in options)}</select></label>"
    )


def _section(of: Found) -> Iterator[str]:
    yield f'<section data-name="{of.algorithm}"><h2 id="{of.algorithm}">{of.algorithm}</h2>'
    yield from _table(of, of.served("action", *FEATURES), of.served("observation"))
    yield from _table(of, of.served(*FEATURES), of.served("action"))
    yield from _table(of, of.served(*FEATURES), of.served(*FEATURES))
    if of.notes:
        yield "<ol>" + "".join(f"<li>{code(words)}</li>" for words in of.notes) + "</ol>"
    if of.altogether:
        refused = (f"<li>{label(*one)}: {code(_words(of, frozenset([one])))}</li>" for one in of.altogether)
        yield f"<p>Refused with everything:</p><ul>{''.join(refused)}</ul>"
    yield "</section>"


def _table(of: Found, rows: Sequence[tuple[str, str]], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a table; if rows and columns are the same features, only the half below the diagonal."""
    if rows == columns:
        rows, columns = rows[1:], columns[:-1]
    if not rows or not columns:
        return
    yield f"<table><thead><tr><th></th>{''.join(f'<th>{label(*one)}</th>' for one in columns)}</tr></thead><tbody>"
    for one in rows:
        before = columns[: columns.index(one)] if one in columns else columns
        cells = [_cell(of, frozenset([one, other])) if other in before else ("", "") for other in columns]
        said = (
            f'<td class="no" title="{escape(why)}">{cell}</td>' if why else f"<td>{cell}</td>" for cell, why in cells
        )
        yield f"<tr><th>{label(*one)}</th>{''.join(said)}</tr>"
    yield "</tbody></table>"


def _cell(of: Found, pair: Levels) -> tuple[str, str]:
    """Return the text of a cell, and why the pair is refused."""
    if len(dict(pair)) < len(pair):
        return "", ""
    if words := [_words(of, some) for some in of.refused if some <= pair]:
        return ", ".join(str(of.notes.index(said) + 1) for said in words), "; ".join(words)
    assert any(pair <= run.levels for run in of.runs), f"{of.algorithm}: no run has {sorted(pair)}"
    return "✓", ""


def code(words: str) -> str:
    """Return HTML of a text with code in backticks."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(words, quote=False))


def _words(of: Found, some: Levels) -> str:
    return "; ".join(f"`{words}`" for words in of.refused[some])


def label(factor: str, level: str) -> str:
    return SAID.get(factor, "{}").format(level)


def _levels(text: str) -> Levels:
    return frozenset((factor, level) for factor, _, level in (word.partition("=") for word in text.split()))


def _text(some: Levels) -> str:
    return " ".join(f"{factor}={level}" for factor, level in sorted(some, key=lambda one: FACTORS.index(one[0])))


def _order(some: Levels) -> list[int]:
    known = dict(some)
    return [len(some), *(levels(f).index(known[f]) if f in known else -1 for f in FACTORS)]


def find() -> dict[str, Any]:
    """Build the content of matrix.json."""
    every: dict[str, Any] = {}
    for (kind, name), by in registry.owners().items():
        if kind == "algo" and by[0].distribution in OURS and name not in APART:
            cells, refused = discover(name)
            said = {_text(some): "\n".join(refused[some]) for some in sorted(refused, key=_order)}
            every[name] = {"runs": [str(cell).partition(" ")[2] for cell in cells], "refused": said}
    return dict(sorted(every.items()))


if __name__ == "__main__":
    FOUND.write_text(json.dumps(find(), indent=1) + "\n", encoding="utf-8")
