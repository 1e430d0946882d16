"""Trees of plain values, arrays and tensors: copied in memory, and as bytes that hold no code."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplug.types import CheckpointError, Tree

PLAIN = (bool, int, float, str, type(None))
ARRAY, BYTES = "__array__", "__bytes__"  # how NumPy arrays and bytes are written, as tensors


def copy_to_host(tree: Tree) -> Tree:
    """A copy on the host that shares no memory with ``tree``.

    Raises:
        TypeError: it holds something beside dicts, lists, tuples, numbers, texts, arrays and tensors.
    """
    return _mapped(tree, lambda x: x.detach().to("cpu", copy=True), np.copy, lambda x: x)


def encode(tree: Tree) -> bytes:
    """As ``torch.save`` writes it; what ``copy_to_host`` takes."""
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
    """The tree back, on the host. Executes nothing.

    Raises:
        CheckpointError: the bytes are not what ``encode`` wrote.
    """
    try:
        return _unmapped(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception:  # whatever a parser makes of bytes that somebody else wrote
        raise CheckpointError("it is no tree of numbers and tensors that can be read without executing code") from None


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
    if type(tree) in PLAIN:  # a subclass would be written by its name, and its code run on reading
        return tree
    if type(tree) is bytes:
        return data(tree)
    if isinstance(tree, Mapping):
        if odd := [key for key in tree if type(key) not in PLAIN]:
            raise TypeError(f"a checkpoint cannot hold a key that is a {type(odd[0]).__name__}, as stands at {path}")
        return {key: _mapped(value, tensor, array, data, f"{path}.{key}".lstrip(".")) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_mapped(value, tensor, array, data, f"{path}[{i}]") for i, value in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    raise TypeError(f"a checkpoint cannot hold a {type(tree).__name__}, as stands at {path}")


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
