"""Functions of trees: nested dicts whose leaves are tensors or arrays. A single leaf is a tree, too.

Import the module, not its names: ``tree.map(torch.clone, batch)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from rlplug.types import Tree

Path = tuple[str, ...]


@overload  # type checkers infer the argument type of a lambda from this
def map(function: Callable[[Any], Any], tree: Tree) -> Tree: ...
@overload
def map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree: ...
def map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return the tree of ``function(leaf, *other_leaves)``; extra keys of the others are ignored."""
    if not isinstance(tree, dict):
        return function(tree, *others)
    if others:
        return {key: map(function, part, *(other[key] for other in others)) for key, part in tree.items()}
    return {key: map(function, part) if isinstance(part, dict) else function(part) for key, part in tree.items()}


def leaves(tree: Tree) -> Iterator[Any]:
    """Iterate over the leaves, depth first."""
    if isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    else:
        yield tree


def items(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterate over pairs of path and leaf, depth first."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from items(part, (*path, key))
    else:
        yield path, tree


def take(tree: Tree, index: Any) -> Tree:
    """Return ``leaf[index]`` of every leaf."""
    if isinstance(tree, dict):
        return {key: take(part, index) if isinstance(part, dict) else part[index] for key, part in tree.items()}
    return tree[index]


def put(tree: Tree, index: Any, values: Tree) -> None:
    """Assign ``leaf[index] = value`` for every leaf of ``values``; the tree may have more leaves."""
    if not isinstance(values, dict):
        tree[index] = values
        return
    for key, value in values.items():
        if isinstance(value, dict):
            put(tree[key], index, value)
        else:  # same, without a call per leaf
            tree[key][index] = value


def cat(trees: Sequence[Tree], axis: int = 0) -> Tree:
    """Concatenate leaf by leaf along ``axis``."""
    if isinstance(next(leaves(trees[0]), None), np.ndarray):
        return map(lambda *parts: np.concatenate(parts, axis), *trees)
    import torch  # here, because environment processes import this module without torch

    return map(lambda *parts: torch.cat(parts, axis), *trees)


def only(tree: Tree, keys: Container[str], nested: Collection[str] = ()) -> Tree:
    """Return the entries of ``tree`` with these ``keys``, also within its groups ``nested``."""
    kept = {key: leaf for key, leaf in tree.items() if key in keys or key in nested}
    return kept | {name: only(tree[name], keys) for name in nested}


def chosen(like: Tree, tree: Tree) -> Tree:
    """Return the leaves of ``tree`` that ``like`` has, too."""
    return map(lambda _, x: x, like, tree)


def merged(tree: Tree, more: Tree) -> Tree:
    """Return ``tree`` with missing entries from ``more``, also in nested dicts."""
    both = {key: merged(tree[key], x) for key, x in more.items() if isinstance(x, dict) and key in tree}
    return tree | {key: x for key, x in more.items() if key not in tree} | both


def check_like(own: Any, loaded: Any, path: str = "", exact: bool = False) -> None:
    """Check that a loaded state has the structure of the one that it replaces.

    Args:
        path: path of both, for messages.
        exact: compare all keys, lists, shapes and dtypes. Otherwise lists, the length of the first axis of leaves, keys
            on one side only and dtypes may differ, and anything may replace None.

    Raises:
        ValueError: they differ.
    """
    if isinstance(own, Mapping) and isinstance(loaded, Mapping):
        if exact and own.keys() != loaded.keys():
            raise ValueError(f"{path} should have the keys {', '.join(own)}, but has others")
        for key in own.keys() & loaded.keys():
            check_like(own[key], loaded[key], f"{path}.{key}".lstrip("."), exact)
    elif exact and isinstance(own, list) and isinstance(loaded, list) and len(own) == len(loaded):
        check_like(dict(enumerate(own)), dict(enumerate(loaded)), path, exact)
    elif (exact or own is not None) and (one := _kind(own, exact)) != (two := _kind(loaded, exact)):
        raise ValueError(f"{path} should be {one}, and is {two}")


def numbers(loaded: Any) -> dict[str, float]:
    """Return loaded numbers by name.

    Raises:
        AttributeError, TypeError, ValueError: it is something else.
    """
    return {str(name): x if type(x) is int else float(x) for name, x in loaded.items()}


def _kind(value: Any, exact: bool) -> str:
    if not isinstance(value, int | float) and not hasattr(value, "shape"):
        several = f"a list of {len(value)}" if exact and isinstance(value, list | tuple) else "a list"
        return several if isinstance(value, list | tuple) else f"of type {type(value).__name__}"
    shape = [*getattr(value, "shape", ())]
    if exact:
        return f"{str(getattr(value, 'dtype', type(value).__name__)).removeprefix('torch.')} of shape {shape}"
    return f"a number of shape {['n', *shape[1:]] if shape else []}"


def what(x: Any) -> str:
    """Describe a value: ``a tensor of shape [2, 8]``, ``a tuple of 2``, ``Needs``."""
    if x is None:
        return "None"
    if hasattr(x, "shape") and not isinstance(x, type):
        return f"{article(type(x).__name__.lower())} of shape {[*x.shape]}"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else article(type(x).__name__)


def article(name: str) -> str:
    """Return a class name with its article; capitalized names have none."""
    return name if name[0].isupper() else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
