"""Episodes as a run would record them."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gymnasium import spaces

from rlplug import testing, tree
from rlplug.data import json_lines, parquet
from rlplug.envs.spec_json import to_json
from rlplug.types import Batch, EnvSpec

IMAGE = spaces.Box(0, 255, (6, 6, 3), np.uint8)
SPEC = testing.spec(spaces.Dict({"image": IMAGE, "goal": spaces.Discrete(5)}), 2)


def episode(steps: int, seed: int, terminated: bool = True) -> Batch:
    """Rows of a dict observation with an image, a mask of actions, log-probabilities and a recurrent state."""
    rng, n = np.random.default_rng(seed), steps + 1
    valid, over = np.arange(n) < steps, np.arange(n) == steps - 1
    obs = {"image": rng.integers(0, 256, (n, 6, 6, 3), dtype=np.uint8), "goal": rng.integers(0, 5, n)}
    return {
        "obs": obs,
        "action": np.where(valid, rng.integers(0, 2, n), 0),
        "reward": np.where(valid, rng.standard_normal(n, np.float32), np.float32(0)),
        "terminated": over & terminated,
        "truncated": over & (not terminated),
        "is_first": np.arange(n) == 0,
        "valid": valid,
        "logp": np.where(valid, -rng.random(n, np.float32), np.float32(0)),
        "action_mask": rng.random((n, 2)) > 0.5,
        "carry": {"policy": {"h": rng.standard_normal((n, 2, 4), np.float32)}},
    }


def plain(steps: int, number: int, terminated: bool = False) -> Batch:
    """Rows that say where they are from: observation and reward are (number, row)."""
    n = steps + 1
    valid, over = np.arange(n) < steps, np.arange(n) == steps - 1
    return {
        "obs": np.stack([np.full(n, number), np.arange(n)], 1).astype(np.float32),
        "action": np.where(valid, np.arange(n) % 2, 0),
        "reward": np.where(valid, np.arange(n, dtype=np.float32) + 1, np.float32(0)),
        "terminated": over & terminated,
        "truncated": over & (not terminated),
        "is_first": np.arange(n) == 0,
        "valid": valid,
    }


def about(spec: EnvSpec, **more: Any) -> dict[str, Any]:
    return {"spec": to_json(spec), "versions": {}, "compress": False, **more}


def write_parquet(path: Path, episodes: list[Batch], spec: EnvSpec = SPEC) -> Path:
    parquet.write(path, episodes, about(spec))
    return path


def write_json(path: Path, episodes: list[Batch], spec: EnvSpec = SPEC, compress: bool = False) -> Path:
    json_lines.write(path, episodes, about(spec, compress=compress))
    return path


Columns = dict[str, np.ndarray]


def as_npz(folder: Path, columns: Columns) -> Path:
    np.savez(folder / "a.npz", **columns)  # type: ignore[arg-type]
    return folder / "a.npz"


def as_hdf5(folder: Path, columns: Columns) -> Path:
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, leaf in columns.items():
            file[name] = leaf
    return folder / "a.hdf5"


def as_table(folder: Path, columns: Columns) -> Path:
    pq.write_table(pa.table({name: leaf.tolist() for name, leaf in columns.items()}), folder / "a.parquet")
    return folder / "a.parquet"


def as_lines(folder: Path, columns: Columns) -> Path:
    """Lines of up to 10 transitions, as RLlib writes them."""
    names = {"observations": "obs", "next_observations": "new_obs", "terminals": "terminateds"}
    names |= {"timeouts": "truncateds", "episode": "eps_id"}
    lines = []
    for low in range(0, len(columns["rewards"]), 10):
        part = {names.get(name, name): leaf[low : low + 10].tolist() for name, leaf in columns.items()}
        lines.append(json.dumps({"type": "SampleBatch", **part}) + "\n")
    (folder / "a.json").write_text("".join(lines))
    return folder / "a.json"


def same(a: Batch, b: Batch) -> None:
    """Check that rows are equal, bit for bit, and of the same types."""
    assert {path for path, _ in tree.items(a)} == {path for path, _ in tree.items(b)}

    def check(x: np.ndarray, y: np.ndarray) -> None:
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

    tree.map(check, a, b)
