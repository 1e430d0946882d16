"""The table of exports: every algorithm of the matrix with every kind of model that it serves."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from rlplug import registry
from rlplug.results.export import LIMIT

DOCS = runpy.run_path(str(Path(__file__).parent.parent.parent / "docs" / "exports.py"))
CELLS = {name: of for name, of in DOCS["cells"]().items() if name in registry.names("algo")}


def test_the_page_is_that_of_the_figures():
    found = json.loads(DOCS["FOUND"].read_text(encoding="utf-8"))
    for name, of in DOCS["cells"]().items():
        if name not in found:
            continue
        assert {model: str(cell) for model, cell in of.items()} == {
            model: row["run"] for model, row in found[name].items()
        }
        assert max(row[format] for row in found[name].values() for format in DOCS["FORMATS"]) <= LIMIT
    assert DOCS["page"](found) == DOCS["PAGE"].read_text(encoding="utf-8"), "run docs/exports.py --page"


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_exports_of_every_model(name):
    assert name in json.loads(DOCS["FOUND"].read_text(encoding="utf-8")), "run docs/exports.py"
    found = DOCS["differences"](list(CELLS[name].values()), steps=200)
    assert max(max(figures) for figures in found) <= LIMIT
