"""Honest recordings of every format, which are forged, and what they are forged with."""

import base64
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import lz4.frame
import numpy as np
from gymnasium import spaces

from rlplug import testing
from rlplug.types import Batch
from tests.data.episodes import as_npz, as_table, plain, write_json, write_parquet
from tests.tools.damage import chosen

SPEC = testing.spec(spaces.Box(-10.0, 10.0, (2,)), 3)
Forgery = Callable[[Path, Random, Path], Path]
FORGERIES: dict[str, Forgery] = {}
"""(folder, generator, a file that executed code would make) -> the forged recording"""


def forgery(make: Forgery) -> Forgery:
    FORGERIES[make.__name__.replace("_", " ")] = make
    return make


def altered(alter: Callable[[bytearray, Random], Any]) -> Forgery:
    """Forge by altering the bytes of an honest recording of any format."""

    def make(folder: Path, rng: Random, marker: Path) -> Path:
        path = rng.choice(HONEST)(folder, rng)
        data = bytearray(path.read_bytes())
        data = alter(data, rng) or data
        path.write_bytes(data)
        return path

    make.__name__ = alter.__name__
    return forgery(make)


# ---- honest ones ----------------------------------------------------------------------------------------------------


def rows(rng: Random, steps: int) -> Batch:
    """Rows of an episode that terminates."""
    draw = np.random.default_rng(rng.getrandbits(32))
    made = plain(steps, 0, terminated=True)
    valid, n = made["valid"], steps + 1
    made |= {
        "obs": draw.uniform(-9, 9, (n, 2)).astype(np.float32),
        "action": np.where(valid, draw.integers(0, 3, n), 0),
    }
    made["reward"] = np.where(valid, draw.standard_normal(n, np.float32), np.float32(0))
    return made | {"logp": np.where(valid, np.float32(-1), np.float32(0))}


def episodes(rng: Random) -> list[Batch]:
    return [rows(rng, rng.randint(1, 9)) for _ in range(rng.randint(1, 5))]


def columns(rng: Random) -> dict[str, np.ndarray]:
    """Transitions as others write them."""
    found = episodes(rng)
    acted = {key: np.concatenate([one[key][:-1] for one in found]) for key in ("obs", "action", "reward", "terminated")}
    return {
        "observations": acted["obs"],
        "next_observations": np.concatenate([one["obs"][1:] for one in found]),
        "actions": acted["action"],
        "rewards": acted["reward"],
        "terminals": acted["terminated"],
        "timeouts": np.zeros(len(acted["reward"]), np.bool_),
    }


def own_parquet(folder: Path, rng: Random) -> Path:
    return write_parquet(folder / "a.parquet", episodes(rng), SPEC)


def own_json(folder: Path, rng: Random) -> Path:
    return write_json(folder / "a-000000.json", episodes(rng), SPEC, compress=rng.random() < 0.5)


def npz(folder: Path, rng: Random, **more: Any) -> Path:
    return as_npz(folder, columns(rng) | more)


def hdf5(folder: Path, rng: Random, **options: Any) -> Path:
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, leaf in columns(rng).items():
            file.create_dataset(name, data=leaf, **options)
    return folder / "a.hdf5"


def minari(folder: Path, rng: Random) -> Path:
    with h5py.File(folder / "a.hdf5", "w") as file:
        for i, one in enumerate(episodes(rng)):
            leaves = {"observations": one["obs"], "actions": one["action"][:-1], "rewards": one["reward"][:-1]}
            leaves |= {"terminations": one["terminated"][:-1], "truncations": one["truncated"][:-1]}
            for name, leaf in leaves.items():
                file[f"episode_{i}/{name}"] = leaf
    return folder / "a.hdf5"


def table(folder: Path, rng: Random) -> Path:
    return as_table(folder, columns(rng))


def lines(folder: Path, rng: Random, packed: bool = True) -> Path:
    """Lines as RLlib writes them."""
    names = {"observations": "obs", "next_observations": "new_obs", "terminals": "terminateds"}
    line: dict[str, Any] = {"type": "SampleBatch"}
    for name, leaf in columns(rng).items():
        line[names.get(name, name)] = pack(leaf) if packed and name.endswith("observations") else leaf.tolist()
    (folder / "a.json").write_text(json.dumps(line) + "\n")
    return folder / "a.json"


HONEST = (own_parquet, own_json, npz, hdf5, minari, table, lines)


# ---- what they are forged with ---------------------------------------------------------------------------------------


def pack(value: Any) -> str:
    return pack_bytes(pickle.dumps(value))


def pack_bytes(raw: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(raw)).decode()


class Executed:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path, rng: Random) -> None:
        written = f"open({str(marker)!r}, 'w').close()"
        calls = [(os.system, (f"touch {marker}",)), (exec, (written,)), (Path.touch, (marker,))]
        self.call = rng.choice([*calls, (os.mkdir, (str(marker),))])

    def __reduce__(self) -> Any:
        return self.call


def forged(node: Any, rng: Random) -> Any:
    """Return JSON with a few of its values replaced."""
    things = [None, -1, 0, 2**63, 10**30, 1e300, "", "O", "\x1b[31m", [], {}, [2**40, 2**40], True, ["a"], "float64"]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if (place := chosen(node, rng)) is not None:
            part, last = place
            if rng.random() < 0.2:
                del part[last]
            else:
                part[last] = rng.choice(things)
    return node
