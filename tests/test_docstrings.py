"""Functions of tensors name the shapes of their tensors, and their docstrings begin with a verb."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlplug.functional
import rlplug.nn
from rlplug import tree

SHAPE = re.compile(r"\[(\.\.\.|\*?[A-Za-z])[^\[\]]*\]|\b0-d\b")
VERB = re.compile(r"[A-Z][a-z]*(ss|[a-rt-z])")  # not "The", "A", "Returns" or a formula
NO_VERBS = {"A", "An", "All", "The", "What", "Which", "Where", "From", "How", "In", "On", "One", "Of", "This", "Not"}


def modules() -> Iterator[ModuleType]:
    yield tree
    for package in (rlplug.functional, rlplug.nn):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(module.name)


def functions() -> Iterator[tuple[str, Any, str]]:
    """Name, function and docstrings (those of its class, too) of all that is public."""
    for module in modules():
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(thing):
                yield f"{module.__name__}.{name}", thing, inspect.getdoc(thing) or ""
            elif inspect.isclass(thing):
                for key in vars(thing):
                    method = getattr(thing, key)
                    if inspect.isfunction(method) and (not key.startswith("_") or key == "__call__"):
                        docs = f"{inspect.getdoc(method) or ''}\n{inspect.getdoc(thing) or ''}"
                        yield f"{module.__name__}.{name}.{key}", method, docs


FUNCTIONS = list(functions())


def test_tensors_have_shapes():
    with_tensors = [(name, docs) for name, f, docs in FUNCTIONS if "Tensor" in str(f.__annotations__)]
    assert len(with_tensors) > 80
    assert [name for name, docs in with_tensors if not SHAPE.search(docs)] == []


def test_docstrings_begin_with_a_verb():
    first = {name: f.__doc__.split(maxsplit=1)[0] for name, f, _ in FUNCTIONS if f.__doc__}
    assert [name for name, word in first.items() if word in NO_VERBS or not VERB.fullmatch(word.rstrip(":"))] == []


@pytest.mark.parametrize("text", ["``[...]``", "``x [T+1, B]``", "``[*shape]``", "0-d"])
def test_what_is_a_shape(text: str):
    assert SHAPE.search(text)


@pytest.mark.parametrize("text", ["in [-1, 1]", "x[0]", "[0, 1)"])
def test_what_is_no_shape(text: str):
    assert not SHAPE.search(text)


# ---- words -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
IDIOM = re.compile(r"\b(anew|nobody|beside|is told|are told|wanted (is|are)|last word|in words)\b", re.IGNORECASE)
QUOTES = {"matrix.md", "mistakes.md", "options.md", "probes.md"}  # messages and texts of the code


def prose(path: Path) -> str:
    """Comments, docstrings and messages of a module; a page as it is."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return "\n".join(comments + [value for value in constants if isinstance(value, str)])


def test_pages_docstrings_and_messages_use_the_words_of_the_field():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "adr").glob("*.md")]
    files = [*(ROOT / "rlplug").rglob("*.py"), *(page for page in pages if page.name not in QUOTES)]
    assert len(files) > 300
    found = {(str(path.relative_to(ROOT)), said[0]) for path in files for said in IDIOM.finditer(prose(path))}
    assert found == set()
    assert IDIOM.search("# it is made Anew")


def test_messages_are_prose(tmp_path: Path):
    (module := tmp_path / "x.py").write_text('raise ValueError(f"nobody gives {key}")  # beside it\n')
    assert [said[0] for said in IDIOM.finditer(prose(module))] == ["beside", "nobody"]
