"""RLlib's packed columns: base64 of LZ4 of a pickle, parsed without loading the pickle.

``pickletools`` lists the operations of a pickle. A small interpreter supports those by which NumPy writes arrays, also
in dicts, lists and tuples. It knows five functions of NumPy by name and calls none of them, allows certain dtypes, and
rejects everything else.
"""

from __future__ import annotations

import base64
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplug.data.source import needs_package

MOST = 2**29  # maximum bytes of a column
PARTS = 2**16  # maximum number of operations in a pickle
DEPTH = 16  # maximum nesting depth
FOLDS = 256  # maximum compression ratio of LZ4
DTYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})
MODULES = frozenset(
    {"numpy", "_codecs", *(f"numpy.{core}.{of}" for core in ("core", "_core") for of in ("multiarray", "numeric"))}
)
MARK = object()


def unpack(text: str) -> Any:
    """Unpack a column to an array, or dicts and lists of arrays; a tuple becomes a dict with numbered keys.

    Raises:
        ConfigError: LZ4 is not installed.
        ValueError, RuntimeError: it is damaged, too large, or has values other than arrays.
    """
    lz4 = needs_package("lz4.frame", "a compressed value")
    packed = base64.b64decode(text, validate=True)
    most = min(MOST, FOLDS * len(packed) + 2**16)
    reader, declared = lz4.LZ4FrameDecompressor(), lz4.get_frame_info(packed)["content_size"]
    raw = reader.decompress(packed, max_length=most) if declared <= most else b""
    if not reader.eof:
        raise ValueError(f"a compressed value is cut off, or holds more than {MOST >> 20:,} MiB")
    return plain(parse(raw))


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a parsed value to arrays, and dicts and lists of arrays."""
    if depth > DEPTH:
        raise ValueError("a compressed value is nested too deeply")
    match value:
        case _Array(value=np.ndarray() as array):
            return array
        case tuple():
            return {str(i): plain(part, depth + 1) for i, part in enumerate(value)}
        case dict() if all(isinstance(key, str) for key in value):
            return {key: plain(part, depth + 1) for key, part in value.items()}
        case list():
            return [plain(part, depth + 1) for part in value]
        case bool() | int() | float():
            return value
    raise _refusal(type(value).__name__)


@dataclass(frozen=True)
class _Name:
    """Name of a function or class of NumPy, which is never called."""

    name: str


@dataclass
class _Type:
    dtype: np.dtype[Any]


@dataclass
class _Array:
    value: np.ndarray | None = None


def parse(raw: bytes) -> Any:
    """Parse a pickle of arrays.

    Raises:
        ValueError: it is damaged, or has other values.
    """
    return _Machine().run(raw)


class _Machine:
    """Interprets the operations of a pickle; see https://docs.python.org/3/library/pickletools.html."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.size = 0

    def run(self, raw: bytes) -> Any:
        for count, (operation, argument, _) in enumerate(pickletools.genops(raw)):
            if count > PARTS:
                raise ValueError(f"a compressed value has more than {PARTS:,} parts")
            if operation.name == "STOP":
                break
            if operation.name in VALUES:
                self.stack.append(argument)
            elif (do := OPERATIONS.get(operation.name)) is None:
                raise _refusal(f"the operation {operation.name}")
            else:
                do(self, argument)
        if len(self.stack) != 1:
            raise ValueError("a compressed value is damaged")
        return self.pop()

    def pop(self, kind: type | tuple[type, ...] = object) -> Any:
        """Pop the top of the stack."""
        if not self.stack or not isinstance(value := self.stack.pop(), kind) or value is MARK:
            raise ValueError("a compressed value is damaged")
        return value

    def since_mark(self) -> list[Any]:
        """Pop the values above the last mark."""
        values = list[Any]()
        while self.stack:
            if (value := self.stack.pop()) is MARK:
                return values[::-1]
            values.append(value)
        raise ValueError("a compressed value is damaged")

    def put(self, place: int) -> None:
        if not self.stack or not 0 <= place <= PARTS:
            raise ValueError("a compressed value is damaged")
        self.memo[place] = self.stack[-1]

    def get(self, place: int) -> None:
        """Push a memoized array, shape, dtype or string; references to dicts and lists could expand to any size."""
        value = self.memo.get(place)
        plain = not isinstance(value, tuple) or all(isinstance(part, int) for part in value)
        if isinstance(value, _Array) and value.value is not None:
            self.count(value.value.nbytes)
        elif not plain or not isinstance(value, str | bytes | tuple | _Name | _Type):
            raise _refusal("references")
        self.stack.append(value)

    def count(self, size: int) -> None:
        """Add the bytes of an array to the total."""
        self.size += size
        if self.size > MOST:
            raise ValueError(f"a compressed value holds more than {MOST >> 20:,} MiB")

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(values[::-1]))

    def name(self, module: Any, name: Any) -> None:
        if module not in MODULES or name not in CALLS:
            raise _refusal(f"{module}.{name}")
        self.stack.append(_Name(name))

    def reduce(self) -> None:
        arguments, name = self.pop(tuple), self.pop(_Name).name
        if not 2 <= len(arguments) <= 4:
            raise _refusal("a state that no array has")
        self.stack.append(CALLS[name](self, *arguments, *[None] * (4 - len(arguments))))

    def build(self) -> None:
        """Set the byte order of a dtype, or the content of an array."""
        state, target = self.pop(tuple), self.stack[-1] if self.stack else None
        match target, state:
            case _Type(), (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                target.dtype = target.dtype.newbyteorder(order)
            case _Array(value=None), (1, tuple() as shape, _Type() as kind, bool() as columns_first, bytes() as data):
                target.value = self.array(data, kind, shape, "F" if columns_first else "C").value
            case _:
                raise _refusal("a state that no array has")

    def append(self, values: list[Any]) -> None:
        if not self.stack or not isinstance(self.stack[-1], list):
            raise ValueError("a compressed value is damaged")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not self.stack or not isinstance(target := self.stack[-1], dict) or len(values) % 2:
            raise ValueError("a compressed value is damaged")
        if not all(isinstance(key, str) for key in keys):
            raise _refusal("keys that are not text")
        target.update(zip(keys, values[1::2], strict=True))

    # ---- functions of NumPy ------------------------------------------------------------------------------------------

    def array(self, data: Any, kind: Any, shape: Any, order: Any) -> _Array:
        sizes = isinstance(shape, tuple) and all(type(side) is int and 0 <= side <= MOST for side in shape)
        if (
            not sizes
            or len(shape) > DEPTH
            or not isinstance(kind, _Type)
            or not isinstance(data, bytes | bytearray)
            or order not in ("C", "F")
        ):
            raise _refusal("a state that no array has")
        self.count(len(data))
        needed = kind.dtype.itemsize
        for side in shape:  # Python integers do not overflow
            needed *= side
        if needed != len(data):
            raise ValueError(f"an array of shape {[*shape]} has {len(data)} bytes and needs {needed}")
        array = np.ndarray(shape, kind.dtype, bytes(data), order=order)
        return _Array(array.astype(kind.dtype.newbyteorder("=")))

    def empty(self, of: Any, shape: Any, code: Any, _: Any) -> _Array:
        if (of, shape, code) != (_Name("ndarray"), (0,), b"b"):
            raise _refusal("a state that no array has")
        return _Array()

    def scalar(self, kind: Any, data: Any, *_: Any) -> _Array:
        return self.array(data, kind, (), "C")

    def type(self, code: Any, *_: Any) -> _Type:
        if not isinstance(code, str) or code not in DTYPES:
            raise _refusal(f"the type {str(code)[:20]!r}")
        return _Type(np.dtype(code))

    def encode(self, text: Any, code: Any, *_: Any) -> bytes:
        if not isinstance(text, str) or code != "latin1":
            raise _refusal("an encoding that no array has")
        return text.encode("latin1")


CALLS: dict[str, Callable[..., Any]] = {
    "_reconstruct": _Machine.empty,
    "_frombuffer": _Machine.array,
    "scalar": _Machine.scalar,
    "dtype": _Machine.type,
    "encode": _Machine.encode,
    "ndarray": lambda *_: _not_called(),  # only used as an argument
}
VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
    | {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(value)


OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(MARK),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*[machine.pop(str), machine.pop(str)][::-1]),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
}


def _not_called() -> Any:
    raise _refusal("numpy.ndarray, called")


def _refusal(what: str) -> ValueError:
    return ValueError(f"a compressed value holds {what}, and only arrays are read")
