"""Trees of plain values, arrays and tensors: copied to the host, and encoded as bytes that contain no code."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.types import CheckpointError, Tree

PLAIN = (bool, int, float, str, type(None))
ARRAY, BYTES = "__array__", "__bytes__"  # keys of dicts that stand for a NumPy array and for bytes


def copy_to_host(tree: Tree) -> Tree:
    """Return a copy on the host that shares no memory with ``tree``.

    Raises:
        TypeError: it holds something other than dicts, lists, tuples, numbers, strings, bytes, arrays and tensors.
    """
    return _mapped(tree, lambda x: x.detach().to("cpu", copy=True), np.copy, lambda x: x)


def encode(tree: Tree) -> bytes:
    """Return the bytes of a tree, in the format of ``torch.save``.

    Raises:
        TypeError: as ``copy_to_host``.
    """
    file = io.BytesIO()
    tensors = _mapped(
        tree,
        lambda x: x,
        lambda x: {ARRAY: torch.from_numpy(x)},
        lambda x: {BYTES: torch.tensor(list(x), dtype=torch.uint8)},
    )
    torch.save(tensors, file)
    return file.getvalue()


def decode(data: bytes) -> Tree:
    """Return the tree that ``encode`` was given, on the host, without executing any code.

    Raises:
        CheckpointError: ``encode`` did not write these bytes.
    """
    try:
        return _unmapped(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception:  # foreign bytes can make the parser raise anything
        raise CheckpointError("it is not a tree of plain values and tensors") from None


def _mapped(
    tree: Tree,
    tensor: Callable[[Tensor], Any],
    array: Callable[[np.ndarray], Any],
    data: Callable[[bytes], Any],
    path: str = "",
) -> Tree:
    if isinstance(tree, Tensor):
        return tensor(tree)
    if isinstance(tree, np.ndarray | np.generic) and tree.dtype.kind in "biufc":
        return array(np.asarray(tree))
    if type(tree) in PLAIN:  # a subclass would be pickled by name, and reading it would run its code
        return tree
    if type(tree) is bytes:
        return data(tree)
    if isinstance(tree, Mapping):
        if odd := [key for key in tree if type(key) not in PLAIN]:
            raise TypeError(f"a checkpoint cannot hold a key of type {type(odd[0]).__name__}, found at {path}")
        return {key: _mapped(value, tensor, array, data, f"{path}.{key}".lstrip(".")) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_mapped(value, tensor, array, data, f"{path}[{i}]") for i, value in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    raise TypeError(f"a checkpoint cannot hold a value of type {type(tree).__name__}, found at {path}")


def _unmapped(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        if tree.keys() == {ARRAY}:
            return tree[ARRAY].numpy()
        if tree.keys() == {BYTES}:
            return bytes(tree[BYTES].tolist())
        return {key: _unmapped(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_unmapped(value) for value in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return tree
