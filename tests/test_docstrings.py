"""Functions of tensors name the shapes of their tensors, and their docstrings begin with a verb."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
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
