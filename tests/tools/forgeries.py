"""Ways to damage or forge recordings: of any format, and JSON lines."""

import base64
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.episodes import as_hdf5, as_npz
from tests.tools.recordings import (
    HONEST,
    Executed,
    altered,
    columns,
    forged,
    forgery,
    hdf5,
    lines,
    npz,
    own_json,
    own_parquet,
    pack,
    pack_bytes,
    table,
)

# ---- damage of any format -------------------------------------------------------------------------------------------


@altered
def bytes_flipped(data: bytearray, rng: Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 5, 20, 100])):
        data[rng.randrange(len(data))] = rng.randrange(256)


@altered
def heads_and_tails_flipped(data: bytearray, rng: Random) -> None:
    """Where formats keep what they say of themselves."""
    for _ in range(rng.choice([1, 2, 5])):
        place = min(int(rng.expovariate(1 / 60)), len(data) - 1)
        data[rng.choice([place, len(data) - 1 - place])] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])


@altered
def numbers_made_huge(data: bytearray, rng: Random) -> None:
    for _ in range(rng.choice([1, 3])):
        value, place = rng.choice([2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 2**40, 0]), rng.randrange(len(data))
        data[place : place + 8] = struct.pack("<Q", value)


@altered
def cut_off(data: bytearray, rng: Random) -> None:
    del data[rng.randrange(len(data)) :]


@altered
def a_part_missing_or_twice(data: bytearray, rng: Random) -> bytearray:
    low, high = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:low] + data[high:] if rng.random() < 0.5 else data[:high] + data[low:]


@forgery
def no_recording(folder: Path, rng: Random, marker: Path) -> Path:
    """Random bytes with the head of a format, a pipe, or a link to a device, to itself or to nowhere."""
    path = folder / f"a{rng.choice(['.npz', '.hdf5', '.parquet', '.json'])}"
    heads = [b"", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"PAR1", b'{"type": "SampleBatch", ', b"\x93NUMPY\x01\x00"]
    kind = rng.choice(["bytes", "pipe", "link"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(rng.choice(["/dev/zero", "/dev/urandom", "/dev/tty", path.name, "/nowhere"]))
    else:
        path.write_bytes(rng.choice(heads) + rng.randbytes(rng.choice([0, 1, 100, 5000])))
    return path


@forgery
def of_another_format(folder: Path, rng: Random, marker: Path) -> Path:
    path = rng.choice(HONEST)(folder, rng)
    return path.rename(folder / f"a{rng.choice(['.npz', '.hdf5', '.h5', '.parquet', '.json', '.jsonl'])}")


@forgery
def a_hole(folder: Path, rng: Random, marker: Path) -> Path:
    """A file of a tebibyte without a byte of its own."""
    path = rng.choice([own_parquet, npz, hdf5, table, lines])(folder, rng)
    with path.open("r+b") as file:
        file.truncate(2**40)
    return path


@forgery
def folders_in_circles(folder: Path, rng: Random, marker: Path) -> Path:
    npz(folder, rng)
    for name in ("b", "c"):
        (folder / name).mkdir()
        for link in ("d", "e"):
            (folder / name / link).symlink_to(folder)
    (folder / "a.parquet").mkdir()
    return rng.choice([folder / "*" / "**" / "a.npz", folder / "**" / "a.*"])


@forgery
def numbers_that_are_none(folder: Path, rng: Random, marker: Path) -> Path:
    values = columns(rng)
    name = rng.choice([name for name, leaf in values.items() if leaf.dtype.kind == "f"])
    leaf = values[name].reshape(-1)
    for _ in range(rng.choice([1, len(leaf)])):
        leaf[rng.randrange(len(leaf))] = rng.choice([np.nan, np.inf, -np.inf])
    return rng.choice([as_npz, as_hdf5])(folder, values)


KINDS: dict[str, Callable[[int], Any]] = {
    "texts": lambda n: np.array(["a"] * n),
    "bytes": lambda n: np.array([b"a"] * n),
    "complex numbers": lambda n: np.zeros(n, np.complex64),
    "records": lambda n: np.zeros(n, [("a", "f4")]),
    "too few rows": lambda n: np.zeros(max(n - 1, 0), np.float32),
    "no rows": lambda n: np.zeros(0, np.float32),
    "one number": lambda n: np.float32(1),
    "another shape": lambda n: np.zeros((n, 3, 2), np.float32),
    "no elements": lambda n: np.zeros((n, 0), np.float32),
    "huge numbers": lambda n: np.full(n, 2**63 - 1),
    "unsigned numbers": lambda n: np.full(n, 2**64 - 1, np.uint64),
    "half numbers": lambda n: np.full(n, 0.5),
}


@forgery
def columns_of_other_kinds(folder: Path, rng: Random, marker: Path) -> Path:
    values = columns(rng)
    name = rng.choice([*values, "episode", "logp", "action_mask", "observations/a", "dones", "\x1b[31m"])
    n = len(values["rewards"])
    values[name] = KINDS[rng.choice([*KINDS])](n)
    form = rng.choice(["npz", "hdf5", "parquet"])
    if form == "npz":
        return as_npz(folder, values)
    if form == "hdf5":
        texts = {key: leaf.astype("S") if leaf.dtype.kind == "U" else leaf for key, leaf in values.items()}
        return as_hdf5(folder, {key: leaf for key, leaf in texts.items() if key != "observations/a"})
    sized = {key: leaf for key, leaf in values.items() if leaf.shape[:1] == (n,) and leaf.dtype.kind not in "cV"}
    made = {key: pa.array(leaf) if leaf.ndim == 1 else leaf.tolist() for key, leaf in sized.items()}
    pq.write_table(pa.table(made), folder / "a.parquet")
    return folder / "a.parquet"


@forgery
def columns_missing(folder: Path, rng: Random, marker: Path) -> Path:
    values = columns(rng)
    for name in rng.sample([*values], rng.randint(1, len(values))):
        del values[name]
    return as_npz(folder, values)


# ---- JSON lines -----------------------------------------------------------------------------------------------------


def with_obs(folder: Path, rng: Random, packed: Any) -> Path:
    """Lines whose observations are replaced."""
    path = lines(folder, rng)
    line = json.loads(path.read_text())
    line[rng.choice(["obs", "new_obs", "actions", "rewards"])] = packed
    path.write_text(json.dumps(line) + "\n")
    return path


@forgery
def a_pickle_that_executes(folder: Path, rng: Random, marker: Path) -> Path:
    attack = Executed(marker, rng)
    inside = rng.choice([attack, [attack], {"a": attack}, (np.zeros(3), attack), np.array([attack], object)])
    return with_obs(folder, rng, pack_bytes(pickle.dumps(inside, rng.choice([0, 2, 4, 5]))))


@forgery
def a_forged_pickle(folder: Path, rng: Random, marker: Path) -> Path:
    """An array's own pickle, with other types, shapes, states and operations."""
    array = np.arange(12).astype(rng.choice([np.float32, np.int64, np.bool_])).reshape(6, 2)
    raw = bytearray(pickle.dumps(array, rng.choice([2, 4, 5])))
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.randrange(2, len(raw))
        raw[place] = rng.choice([rng.randrange(256), ord("O"), ord("V"), 0xFF, ord("R"), ord("b"), ord("h"), ord(".")])
    return with_obs(folder, rng, pack_bytes(bytes(raw)))


@forgery
def a_forged_type(folder: Path, rng: Random, marker: Path) -> Path:
    """The state of a type is believed by NumPy: sizes, fields and flags that no type has."""
    states = [
        (3, "<", None, None, None, 2**31 - 1, 1, 0),
        (3, "|", None, None, None, -1, -1, 63),
        (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27),
        (3, "|", (np.dtype("f4"), (2**20, 2**20)), None, None, 4, 4, 0),
        (4, "|", None, ("a", "a"), {"a": (np.dtype("f4"), 2**40)}, 8, 1, 0, {}),
        (-1, "?", 1, 2, 3, 4, 5, 6),
    ]

    class Type:
        def __reduce__(self) -> Any:
            return np.dtype, (rng.choice(["f4", "V8", "O8", "f4,f4", "M8", "U9"]), False, True), rng.choice(states)

    class Array:
        def __reduce__(self) -> Any:
            make = np.zeros(3).__reduce__()[0]
            shape = rng.choice([(6, 2), (2**40,), (-1,), (2**62, 4), (0,) * 40, ("a",), (1.5,)])
            return make, (np.ndarray, (0,), b"b"), (1, shape, Type(), False, rng.choice([b"", bytes(48), [Type()]]))

    return with_obs(folder, rng, pack(rng.choice([Array(), [Array()], {"a": Array()}, Type()])))


@forgery
def nested_references(folder: Path, rng: Random, marker: Path) -> Path:
    """A few bytes that stand for any number of elements."""
    value: Any = rng.choice([[], [np.zeros(2)], (1,), {"a": np.zeros(2)}])
    for i in range(rng.choice([5, 30, 200])):
        value = rng.choice([[value, value], (value, value), {"a": value, "b": value, str(i): value}])
    circle: list[Any] = [value]
    circle.append(circle)
    return with_obs(folder, rng, pack(rng.choice([value, circle])))


@forgery
def a_compressed_bomb(folder: Path, rng: Random, marker: Path) -> Path:
    size = rng.choice([2**28, 2**30 + 1, 2**31])
    raw = lz4.frame.compress(bytes(size)) if rng.random() < 0.5 else lz4.frame.compress(pickle.dumps(bytes(size)))
    return with_obs(folder, rng, base64.b64encode(raw).decode())


@forgery
def packed_texts_that_are_none(folder: Path, rng: Random, marker: Path) -> Path:
    texts = ["", "a", "ä" * 9, base64.b64encode(b"no lz4").decode(), pack_bytes(b""), pack_bytes(b"\x80\x05."), "\x00"]
    texts += [*map(pack_bytes, (b"(" * 10**5 + b".", b"]" * 10**5 + b"a" * 10**5 + b".", b"N.")), "====="]
    return with_obs(folder, rng, rng.choice(texts))


@forgery
def json_of_other_things(folder: Path, rng: Random, marker: Path) -> Path:
    things: list[Any] = [1, "a", None, [], {}, [[1], [1, 2]], [[[]]], {"a": {"b": [1]}}, ["a", "b"], [None], 10**400]
    things += [{"type": "MultiAgentBatch", "policy_batches": []}, [True], [1e308 * 10], -1, [{"a": 1}], [10**30]]
    line = json.loads(lines(folder, rng, packed=False).read_text())
    for _ in range(rng.randint(1, 3)):
        line[rng.choice([*line, "eps_id", "t", "dones", "\x1b[2J"])] = rng.choice(things)
    path = folder / "a.json"
    path.write_text(json.dumps(rng.choice([line, line, line, rng.choice(things)])) + "\n")
    return path


@forgery
def json_that_is_none(folder: Path, rng: Random, marker: Path) -> Path:
    texts = [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe{}", b"\x00" * 100, b"{}\n" * 100, b"\n" * 10**5, b"1" * 10**6]
    texts += [
        b'{"obs": "\xed\xa0\x80"}',
        "\ufeff{}".encode(),
        b'{"type": "SampleBatch"}',
        b"NaN",
        b'{"rewards": [1e999]}',
    ]
    path = folder / "a.json"
    path.write_bytes(rng.choice([b"", lines(folder, rng).read_bytes()]) + rng.choice(texts) + rng.choice([b"", b"\n"]))
    return path


@forgery
def spaces_beside_lines(folder: Path, rng: Random, marker: Path) -> Path:
    path = own_json(folder, rng)
    beside = path.with_name(f"{path.name}.spaces")
    kind = rng.randrange(4)
    if kind == 0:
        beside.unlink()
        os.mkfifo(beside)
    elif kind == 1:
        beside.unlink()
        beside.symlink_to(rng.choice(["/dev/zero", "/nowhere", beside.name]))
    elif kind == 2:
        beside.write_bytes(rng.choice([b"", b"[]", b"1", b"[" * 10**6, b"\xff", b"{}", b'{"leaves": 1, "spec": {}}']))
    else:
        beside.write_text(json.dumps(forged(json.loads(beside.read_text()), rng)))
    return path
