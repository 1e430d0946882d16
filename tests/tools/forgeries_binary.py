"""Ways to forge recordings: parquet, HDF5 and npz."""

import io
import json
import os
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.tools.recordings import Executed, columns, forged, forgery, hdf5, minari, npz, own_parquet

# ---- parquet --------------------------------------------------------------------------------------------------------


@forgery
def a_forged_footer(folder: Path, rng: Random, marker: Path) -> Path:
    """Metadata of rlplug's own that does not fit the table."""
    path = own_parquet(folder, rng)
    whole = pq.read_table(path)
    meta = json.loads(whole.schema.metadata[b"rlplug"])
    texts = [b"", b"1", b"[]", b"\xff", b"[" * 10**5, json.dumps(forged(meta, rng)).encode()]
    text = rng.choice([texts[-1], texts[-1], texts[-1], *texts])
    pq.write_table(whole.replace_schema_metadata({b"rlplug": text}), path)
    return path


@forgery
def other_columns_under_a_footer(folder: Path, rng: Random, marker: Path) -> Path:
    path = own_parquet(folder, rng)
    whole = pq.read_table(path)
    i, n = rng.randrange(whole.num_columns), whole.num_rows
    others = [pa.array([value] * n) for value in ("a", None, [1.0], 2**62, 0.5, {"a": 1}, True)]
    other = rng.choice([*others, pa.array([b"12345678"] * n, pa.binary(8))])
    column = pa.field(rng.choice([whole.column_names[i], "b"]), other.type)
    pq.write_table(rng.choice([whole.set_column(i, column, other), whole.remove_column(i)]), path)
    return path


@forgery
def other_rows_under_a_footer(folder: Path, rng: Random, marker: Path) -> Path:
    path = own_parquet(folder, rng)
    whole = pq.read_table(path)
    order = [rng.randrange(whole.num_rows) for _ in range(whole.num_rows)]
    taken = [whole.take(order), whole.slice(1), pa.concat_tables([whole, whole])]
    pq.write_table(rng.choice(taken), path, row_group_size=rng.choice([1, 3, 10**6]))
    return path


@forgery
def tables_of_other_types(folder: Path, rng: Random, marker: Path) -> Path:
    values: dict[str, Any] = {name: leaf.tolist() for name, leaf in columns(rng).items()}
    n, name = len(values["rewards"]), rng.choice([*values, "episode"])
    every: tuple[Any, ...] = ("a", None, [None, 1.0], [[1.0]], {"a": 1}, b"a", [], 2**63 - 1, [["a"]])
    others = [*([value] * n for value in every), [[1.0], [2.0, 3.0]] * n, [None, *values["rewards"][1:]]]
    values[name] = pa.array(rng.choice(others)[:n])
    if rng.random() < 0.3:
        kind = rng.choice([pa.timestamp("s"), pa.decimal128(22, 2), pa.time64("us"), pa.int8()])
        values[name] = pa.array([1] * n).cast(kind)
    if rng.random() < 0.2:
        values[name] = pa.array(["a"] * n).dictionary_encode()
    try:
        made = pa.table(values)
    except (pa.ArrowException, ValueError, TypeError):  # of other lengths
        made = pa.table({"rewards": [1.0]})
    pq.write_table(made, folder / "a.parquet")
    return folder / "a.parquet"


@forgery
def a_parquet_bomb(folder: Path, rng: Random, marker: Path) -> Path:
    """Equal values, which take no room in the file."""
    n = rng.choice([10**6, 3 * 10**7])
    zeros, lists = pa.array(np.zeros(n, np.float32)), pa.FixedSizeListArray.from_arrays(np.zeros(2 * n, np.float32), 2)
    made = pa.table({"obs": lists, "actions": zeros.cast(pa.int64()), "rewards": zeros, "dones": zeros.cast(pa.int8())})
    with pq.ParquetWriter(folder / "a.parquet", made.schema, compression="zstd") as file:
        for _ in range(1 if n < 10**7 else rng.choice([1, 4])):
            file.write_table(made, row_group_size=n)
    return folder / "a.parquet"


# ---- HDF5 -----------------------------------------------------------------------------------------------------------


@forgery
def hdf5_kept_elsewhere(folder: Path, rng: Random, marker: Path) -> Path:
    path = rng.choice([hdf5, minari])(folder, rng)
    with h5py.File(folder / "other.h5x", "w") as file:
        file["a"] = np.zeros(9, np.float32)
    with h5py.File(path, "a") as file:
        group = next(file[name] for name in file) if "rewards" not in file else file
        name = rng.choice([*group])
        del group[name]
        kind = rng.randrange(6)
        if kind == 0:
            group[name] = h5py.ExternalLink(rng.choice(["other.h5x", str(path), "/dev/zero", "nowhere.h5"]), "/a")
        elif kind == 1:
            group[name] = h5py.SoftLink(rng.choice(["/", "/nowhere", group.name, f"{group.name}/{name}"]))
        elif kind == 2:
            device = rng.choice(["/dev/zero", "/etc/passwd", str(folder / "fifo")])
            if device.endswith("fifo"):
                os.mkfifo(device)
            group.create_dataset(name, (9,), np.float32, external=[(device, 0, h5py.h5f.UNLIMITED)])
        elif kind == 3:
            layout = h5py.VirtualLayout((9,), np.float32)
            layout[:] = h5py.VirtualSource("other.h5x", "a", shape=(9,))
            group.create_virtual_dataset(name, layout)
        elif kind == 4:
            group[name] = group
        else:
            group[name] = file["/"]
    return path


@forgery
def hdf5_of_other_things(folder: Path, rng: Random, marker: Path) -> Path:
    path = hdf5(folder, rng)
    with h5py.File(path, "a") as file:
        name = rng.choice([*columns(rng), "infos", "episode_0"])
        if name in file:
            del file[name]
        things = [
            lambda: file.create_group(name),
            lambda: file.create_dataset(name, (2**40,), np.float32, chunks=(2**20,), compression="gzip"),
            lambda: file.create_dataset(name, data=["a", "b"], dtype=h5py.string_dtype()),
            lambda: file.create_dataset(name, (3,), h5py.vlen_dtype(np.float32)),
            lambda: file.create_dataset(name, data=[file.ref] * 3, dtype=h5py.ref_dtype),
            lambda: file.create_dataset(name, data=h5py.Empty("f4")),
            lambda: file.create_dataset(name, data=np.float32(1)),
            lambda: file.__setitem__(name, np.dtype("f4")),
            lambda: file.create_group(name + "/a" * rng.choice([3, 300])),
        ]
        rng.choice(things)()
    return path


@forgery
def hdf5_filters_damaged(folder: Path, rng: Random, marker: Path) -> Path:
    options = rng.choice([{"compression": "gzip"}, {"compression": "lzf"}, {"fletcher32": True}, {"shuffle": True}])
    path = hdf5(folder, rng, chunks=True, **options)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([5, 50])):
        place = rng.randrange(len(data) // 3, len(data))
        data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path


# ---- npz ------------------------------------------------------------------------------------------------------------


def _entry(shape: str, dtype: str, data: bytes, version: int = 1) -> bytes:
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = struct.pack("<H", len(header)) if version == 1 else struct.pack("<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


@forgery
def npz_with_forged_headers(folder: Path, rng: Random, marker: Path) -> Path:
    path = npz(folder, rng)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    shapes = ["(3,)", "(10**12,)", "(1000000000000,)", "(-1,)", "()", "(2, -3)", "3", "(1.5,)", "(" * 300]
    shapes.append("(0, 4611686018427387904)")
    types = ["'<f4'", "'|O'", "'<U9'", "[('a', '<f4')]", "'<f9'", "'V8'", "1", "'<M8[s]'", "'(1000,1000)f8'"]
    name = rng.choice([*entries])
    entries[name] = _entry(
        rng.choice(shapes), rng.choice(types), rng.randbytes(rng.choice([0, 12, 100])), rng.choice([1, 2, 3, 9])
    )
    with zipfile.ZipFile(path, "w") as file:
        for entry, data in entries.items():
            file.writestr(entry, data)
    return path


@forgery
def npz_of_objects(folder: Path, rng: Random, marker: Path) -> Path:
    name = rng.choice(["observations", "rewards", "actions", "infos", "terminals"])
    return npz(folder, rng, **{name: np.array([Executed(marker, rng)] * 3, object)})


@forgery
def npz_bombs(folder: Path, rng: Random, marker: Path) -> Path:
    path = npz(folder, rng)
    size = rng.choice([2**26, 2**30, 2**31])
    name = rng.choice(["observations.npy", "rewards.npy", "extra.npy"])
    with zipfile.ZipFile(path) as file:
        entries = {entry: file.read(entry) for entry in file.namelist() if entry != name}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for entry, data in entries.items():
            file.writestr(entry, data)
        with file.open(name, "w", force_zip64=True) as stream:
            stream.write(_entry(f"({size // 4},)", "'<f4'", b""))
            for _ in range(size // 2**24):
                stream.write(bytes(2**24))
    return path


@forgery
def npz_of_other_entries(folder: Path, rng: Random, marker: Path) -> Path:
    path = npz(folder, rng)
    with zipfile.ZipFile(path, "a", rng.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_STORED])) as file:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(3))
        others = [b"", b"a", buffer.getvalue(), buffer.getvalue()[:-3]]
        names = ["rewards.npy", "../rewards.npy", "observations/a.npy", "a/b.npy", "rewards", "\x1b[31m.npy", "obs.npy"]
        file.writestr(rng.choice(names), rng.choice(others))
    return path
