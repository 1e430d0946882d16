"""Serialization of trees of plain values, arrays and tensors to files without code."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlplug.checkpointing import atomic
from rlplug.types import CheckpointError, Tree

Entry: TypeAlias = dict[str, int | str]  # ``bytes`` and ``sha256`` of a file
PLAIN = (bool, int, float, str, type(None))
ARRAY, BYTES = "__array__", "__bytes__"  # keys of dicts that encode a NumPy array and bytes


def copy_to_host(tree: Tree) -> Tree:
    """Return a copy on the host that shares no memory with ``tree``.

    Raises:
        TypeError: it has values other than dicts, lists, tuples, numbers, strings, bytes, arrays and tensors.
    """
    return _map(tree, {Tensor: lambda x: x.detach().to("cpu", copy=True), np.ndarray: np.copy})


def encode(tree: Tree) -> bytes:
    """Serialize a tree in the format of ``torch.save``. Raises as ``copy_to_host``."""
    file = io.BytesIO()
    arrays = {np.ndarray: lambda x: {ARRAY: torch.from_numpy(x)}}
    strings = {bytes: lambda x: {BYTES: torch.tensor(list(x), dtype=torch.uint8)}}
    torch.save(_map(tree, arrays | strings), file)
    return file.getvalue()


def decode(data: bytes) -> Tree:
    """Return the tree of ``encode``, on the host, without executing code; raise an error at any other bytes."""
    tree = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    parts, seen = [tree], set[int]()
    for part in parts:
        if isinstance(part, Tensor):  # kernels may read its memory from its first value
            end = part.storage_offset() * part.element_size() + part.nbytes
            if part.is_meta or part.is_quantized or end > part.untyped_storage().nbytes():
                raise ValueError("a tensor has less memory than values")
        if isinstance(part, dict | list | tuple) and part:
            if id(part) in seen:  # shared parts could expand to more than fits into memory, or to infinite size
                raise ValueError("a part occurs twice")
            seen.add(id(part))
            parts += part.values() if isinstance(part, dict) else part
    return _map(tree, {dict: _unpack})


def write_tree(path: Path, tree: Tree) -> Entry:
    """Write a tree to a new file, and return its entry."""
    data = encode(tree)
    atomic.write(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_tree(path: Path, entry: Entry) -> Tree:
    """Return the tree in a file, on the host.

    Raises:
        CheckpointError: the file is missing, truncated, altered, or not from ``write_tree``.
    """
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            raise damaged(path, f"it has {size} bytes, not {entry['bytes']}")
        data = atomic.read(path)
    except OSError as error:
        raise damaged(path, str(error.strerror)) from None
    except MemoryError:
        raise damaged(path, f"its {size:,} bytes do not fit into memory") from None
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise damaged(path, "its checksum does not match")
    try:
        return decode(data)
    except Exception:
        raise damaged(path, "it is not a tree of plain values and tensors") from None


def damaged(file: Path, why: str) -> CheckpointError:
    """Return the error for a file of a checkpoint or of a run."""
    return CheckpointError(f"{file.parent} is damaged or was altered: {file.name}: {why}")


def _unpack(value: dict[Any, Any]) -> Any:
    if value.keys() == {ARRAY}:
        return value[ARRAY].numpy()
    return bytes(value[BYTES].tolist()) if value.keys() == {BYTES} else value


def _map(tree: Tree, changes: Mapping[type, Callable[[Any], Any]], path: str = "") -> Tree:
    """Apply ``changes[type]`` to the values of a tree, and to a dict after its values."""
    if isinstance(tree, list | tuple):
        parts = [_map(value, changes, f"{path}[{i}]") for i, value in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, Mapping):
        if odd := [key for key in tree if type(key) not in PLAIN]:
            raise TypeError(f"a checkpoint cannot hold a key of type {type(odd[0]).__name__}, found at {path}")
        kind, tree = dict, {key: _map(value, changes, f"{path}.{key}".lstrip(".")) for key, value in tree.items()}
    elif isinstance(tree, np.ndarray | np.generic) and tree.dtype.kind in "biufc":
        kind, tree = np.ndarray, np.asarray(tree)
    else:
        kind = Tensor if isinstance(tree, Tensor) else type(tree)
        # a subclass of a plain type would be pickled by name, and loading it would execute its code
        if kind not in (Tensor, bytes, *PLAIN):
            raise TypeError(f"a checkpoint cannot hold a value of type {kind.__name__}, found at {path}")
    return changes[kind](tree) if kind in changes else tree
