"""Write docs/matrix.md: which features work together, and which combinations are refused.

    python docs/matrix.py            # build thousands of runs to find out (minutes), and write matrix.json too
    python docs/matrix.py --page     # write the page alone, from matrix.json
    python docs/matrix.py --check    # exit code 1 if the page is out of date

tests/contract/test_matrix.py makes the runs of matrix.json, and compares the page with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlplug import registry
from rlplug.testing.checks.covering import discover
from rlplug.testing.checks.matrix import FACTORS, Cell, Levels, levels

PAGE, FOUND = (Path(__file__).with_name(f"matrix.{end}") for end in ("md", "json"))
OURS = ("rlplug", "rlplug-reinforce")
SPACES = ("observation", "action")
FEATURES = tuple(factor for factor in FACTORS if factor not in SPACES)
SAID = {
    "n_step": "n-step {}",
    "priorities": "priorities",
    "normalization": "normalize {}",
    "vector": "{} vector",
}
INTRO = """# What goes together

Every pair of the features below either runs with an algorithm, or is refused before anything is collected.

- ✓: a test makes a short run with both, and evaluates it: losses are finite, every part learns, no action is forbidden
  or outside of its space. Each run combines many features, so few runs cover all pairs.
- A number: the run is refused, and a test compares the message with the one of that number below the tables.

Both tests are in `tests/contract/test_matrix.py`. Runs are also interrupted and resumed, and end with the same bits.
Every run of the tests has the runs of one algorithm of each family, and some of the others; `pytest -m slow` has all of
them, and covers every three features. `docs/matrix.py` writes this page.

| | what it is |
|---|---|
| +mask | the environment forbids some actions; only Discrete and MultiDiscrete actions have masks |
| lstm, gru | `model=lstm`; with a replay also `buffer=sequence` |
| n-step 3 | `algo.n_step=3` |
| priorities | `buffer=prioritized`, or the priorities of `buffer=sequence` |
| icm, rnd | `exploration=[icm]`: an intrinsic reward |
| other names | `exploration=[gaussian]`: noise |
| normalize reward | `preprocess.normalize_reward=true` |
| normalize all | `preprocess.normalize_obs=true` as well |
| native vector | the environment's own vector, which resets within the step that ends an episode |
"""


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
    return "\n".join([INTRO, *(line for of in every.values() for line in _section(of))])


def _section(of: Found) -> Iterator[str]:
    yield from (f"## {of.algorithm}", "")
    yield from _table(of, of.served("action", *FEATURES), of.served("observation"))
    yield from _table(of, of.served(*FEATURES), of.served("action"))
    yield from _table(of, of.served(*FEATURES), of.served(*FEATURES))
    yield from (f"{number}. {words}" for number, words in enumerate(of.notes, 1))
    yield ""
    if of.altogether:
        yield from ("Refused with everything:", "")
        yield from (f"- {label(*one)}: {_words(of, frozenset([one]))}" for one in of.altogether)
        yield ""


def _table(of: Found, rows: Sequence[tuple[str, str]], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A table; where rows and columns are the same features, only the half below the diagonal."""
    if rows == columns:
        rows, columns = rows[1:], columns[:-1]
    yield f"| | {' | '.join(label(*one) for one in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for one in rows:
        before = columns[: columns.index(one)] if one in columns else columns
        cells = [_cell(of, frozenset([one, other])) if other in before else "" for other in columns]
        yield f"| {label(*one)} | {' | '.join(cells)} |"
    yield ""


def _cell(of: Found, pair: Levels) -> str:
    if len(dict(pair)) < len(pair):
        return ""
    if words := [_words(of, some) for some in of.refused if some <= pair]:
        return ", ".join(str(of.notes.index(said) + 1) for said in words)
    assert any(pair <= run.levels for run in of.runs), f"{of.algorithm}: no run has {sorted(pair)}"
    return "✓"


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
        if kind == "algo" and by[0].distribution in OURS:
            cells, refused = discover(name)
            said = {_text(some): "\n".join(refused[some]) for some in sorted(refused, key=_order)}
            every[name] = {"runs": [str(cell).partition(" ")[2] for cell in cells], "refused": said}
    return dict(sorted(every.items()))


def main() -> int:
    check = "--check" in sys.argv[1:]
    if not {"--page", "--check"} & set(sys.argv[1:]):
        FOUND.write_text(json.dumps(find(), indent=1) + "\n", encoding="utf-8")
    fresh = page(found())
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != fresh
    if stale and not check:
        PAGE.write_text(fresh, encoding="utf-8")
    if stale:
        print("out of date, run `python docs/matrix.py`:" if check else "rewritten:", PAGE.name)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
