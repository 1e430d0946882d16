"""The folder of a checkpoint: trees without code, rows written once, there whole or not at all."""

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from rlplug.checkpointing import atomic, format
from rlplug.checkpointing.atomic import NO_LINKS
from rlplug.checkpointing.format import (
    Checkpoint,
    CheckpointManifest,
    FileRowLog,
    Snapshot,
    checkpoints,
    find,
    folder_of,
    note_score,
    read_manifest,
    remove,
    sealed,
    tidy,
    write,
)
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.checkpointing.serialize import copy_to_host, decode, encode, read_tree
from rlplug.config.schema import Checkpoint as Settings
from rlplug.types import CheckpointError, RunError
from tests.tools.fuzz import digest

# ---- trees -----------------------------------------------------------------------------------------------------------

SIZES = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
DTYPES = ["bool", *(f"{kind}{bits}" for kind, sizes in SIZES.items() for bits in sizes)]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(
        [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 99),
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
TREES = st.recursive(
    PLAIN | ARRAYS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(tree=TREES)
@settings(max_examples=200, deadline=None)
def test_a_tree_comes_back_as_it_was(tree: Any):
    assert digest(decode(encode(tree))) == digest(tree)
    assert digest(copy_to_host(tree)) == digest(tree)


def test_generators_come_back():
    def drawn(generators: Any) -> list[float]:
        return [generators[0].normal(), generators[1].normal(), generators[2].random()]

    one, other = ((np.random.default_rng(n), np.random.RandomState(n), Random(n)) for n in (3, 0))
    one[0].normal(size=5)
    state = decode(
        encode(copy_to_host([one[0].bit_generator.state, one[1].get_state(legacy=False), one[2].getstate()]))
    )
    assert state[0]["state"]["state"] > 2**64
    other[0].bit_generator.state = state[0]
    other[1].set_state(state[1])
    other[2].setstate(state[2])
    assert drawn(other) == drawn(one)


def test_a_snapshot_shares_no_memory():
    layer, array = nn.Linear(2, 2), np.zeros((4, 2))
    tree = copy_to_host({"w": layer.weight, "part": layer.weight.data[0], "a": array, "view": array[::-2]})
    before = digest(tree)
    layer.weight.data.add_(1)
    array += 1
    assert digest(tree) == before
    assert type(tree["w"]) is torch.Tensor
    assert not tree["w"].requires_grad
    assert digest(decode(encode(tree))) == before


class Mode(IntEnum):
    FAST = 1


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [{"b": object()}]}, r"a value of type object, found at a\[0\]\.b"),
        ({"a": (1, {2})}, r"a value of type set, found at a\[1\]"),
        ([lambda: 0], r"a value of type function, found at \[0\]"),
        ({"env": torch.Generator()}, "a value of type Generator, found at env"),
        ({"mode": Mode.FAST}, "a value of type Mode, found at mode"),
        ({"per": {Mode.FAST: 1}}, "a key of type Mode, found at per"),
        ({"per": {np.int64(3): 1}}, "a key of type int64, found at per"),
    ],
    ids=["object", "set", "function", "generator", "enum", "enum-key", "numpy-key"],
)
def test_what_could_not_be_read_back_is_refused_when_it_is_written(tree: Any, place: str):
    with pytest.raises(TypeError, match=place):
        copy_to_host(tree)


def test_bytes_that_are_something_else_are_refused(tmp_path: Path):
    rng, good = Random(0), encode({"a": torch.arange(9), "b": [np.arange(3), 2**100, "x"]})
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            data[place : place + rng.choice([1, 1, 1, 50])] = rng.randbytes(rng.choice([0, 1, 1, 30]))
        path = tmp_path / "x.pt"
        path.write_bytes(data)
        with suppress(CheckpointError):  # and nothing else
            read_tree(path, {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows(start: int, end: int) -> dict[str, Any]:
    obs = torch.arange(start, end, dtype=torch.float32)
    return {"obs": {"x": obs[:, None].repeat(1, 3)}, "valid": obs.bool()}


def held(store: FileRowLog) -> list[tuple[int, list[float]]]:
    return [(start, batch["obs"]["x"][:, 0].tolist()) for start, batch in store.rows()]


def test_chunks_are_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format, "CHUNK", 2 * (3 * 4 + 1))  # bytes of two rows
    store = FileRowLog()
    store.append(10, rows(10, 15))
    assert held(store) == [(10, [10.0, 11.0]), (12, [12.0, 13.0]), (14, [14.0])]
    assert [(chunk.start, chunk.end) for chunk in store.chunks] == [(10, 12), (12, 14), (14, 15)]
    monkeypatch.setattr(format, "CHUNK", 1)  # less than a row: one row each
    store.append(15, rows(15, 17))
    assert held(store)[3:] == [(15, [15.0]), (16, [16.0])]
    assert store.end == 17


def test_chunks_are_forgotten_when_none_of_their_rows_is_needed():
    store = FileRowLog()
    for start in (0, 3, 6):
        store.append(start, rows(start, start + 3))
    store.append(9, rows(9, 9))  # rows of nothing are nothing
    for end, kept in ((3, [3, 6]), (5, [3, 6]), (99, [])):  # of the first chunk, a row still is
        store.trim(end)
        assert [start for start, _ in held(store)] == kept
    assert store.end == 9


# ---- the folder ------------------------------------------------------------------------------------------------------


MANIFEST = {
    "rlplug": "0", "run": "a run", "written": "now", "unit": "env_steps", "updates": 0, "episodes": 0, "version": 0,
    "wall_s": 1.5, "since_logged_s": 0.5, "rollout_length": 1, "batch_size": 1, "spent": {}, "not_restored": [],
    "spec": {},
    "plugins": {kind: dict.fromkeys(("kind", "name", "distribution", "version"), "a") for kind in ("algo", "env")},
    "config": {"total_steps": 1} | {kind: {"name": "a"} for kind in ("algo", "env", "hardware", "model")},
}  # fmt: skip


def snapshot(env_steps: int, store: FileRowLog | None = None, score: float | None = None) -> Snapshot:
    trees = {"weights": {"w": torch.full((50,), env_steps)}, "learner": {"n": env_steps}, "rank0": {"buffer": None}}
    manifest = MANIFEST | {"env_steps": env_steps, "score": score}
    return Snapshot(manifest, trees, list(store.chunks) if store is not None else [])


def saved(run: Path, env_steps: int, store: FileRowLog | None = None) -> Path:
    return write(folder_of(run, env_steps), snapshot(env_steps, store))


def test_what_is_written_is_found(tmp_path: Path):
    store = FileRowLog()
    store.append(0, rows(0, 4))
    path = saved(tmp_path, 7, store)
    for where in (tmp_path, path):
        found = find(where)
        assert found.path == path
        assert found.manifest["env_steps"] == 7
        assert found.tree("weights")["w"].tolist() == [7] * 50
        assert held(FileRowLog(found.chunks())) == [(0, [0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env_steps", True),
        ("score", "high"),
        ("spent", {"update": None}),
        ("not_restored", {}),
        ("plugins", {"algo": {"kind": "algo", "name": "sac"}}),
        ("plugins", {"algo": MANIFEST["plugins"]["algo"]}),
        ("config", MANIFEST["config"] | {"total_steps": "1"}),
        ("files", {"weights.pt": {"bytes": 1.5, "sha256": ""}}),
        ("files", {"../weights.pt": {"bytes": 1, "sha256": ""}}),
        ("files", {"weights.pt\n": {"bytes": 1, "sha256": ""}}),
    ],
)
def test_a_manifest_with_an_invalid_value_is_refused(key: str, value: Any, tmp_path: Path):
    one = snapshot(3)
    one.manifest |= {key: value} if key != "files" else {}
    path = write(folder_of(tmp_path, 3), one)
    if key == "files":
        manifest = read_manifest(path, CheckpointManifest)
        (path / "manifest.json").write_bytes(sealed(manifest | {"files": value}))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(path)
    assert str(refused.value) == f"{path} is damaged or was altered: manifest.json: it has no valid {key}"


def test_a_number_of_steps_in_scientific_notation(tmp_path: Path):
    one = snapshot(3)
    one.manifest |= {"config": MANIFEST["config"] | {"total_steps": 1e7}}
    assert Checkpoint(write(folder_of(tmp_path, 3), one)).manifest["config"]["total_steps"] == 1e7


def test_rows_lie_on_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, written = FileRowLog(), []
    plain = atomic.write
    monkeypatch.setattr(atomic, "write", lambda path, data: written.append((path.name, len(data))) or plain(path, data))
    store.append(0, rows(0, 1000))
    first = saved(tmp_path, 1, store)
    assert all(not chunk.rows and chunk.file is not None for chunk in store.chunks), "they are still in memory"
    store.append(1000, rows(1000, 1010))
    written.clear()
    second = saved(tmp_path, 2, store)
    shared = "rank0_rows_0_1000.pt"
    assert (first / shared).stat().st_ino == (second / shared).stat().st_ino
    assert {name for name, _ in written} == {
        *("weights.pt", "learner.pt", "rank0.pt", "rank0_rows_1000_1010.pt", "manifest.json")
    }
    assert sum(size for _, size in written) < (first / shared).stat().st_size
    remove(first)
    find(second).verify()


def test_rows_stored_again_come_later_and_have_a_file_of_their_own(tmp_path: Path):
    store = FileRowLog()
    for value in (0, 10, 20):
        store.append(0, batch := rows(value, value + 3))
        batch["obs"]["x"].zero_()  # they are copied
    saved(tmp_path, 1, store)
    again = FileRowLog(find(tmp_path).chunks())
    assert held(again) == [(0, [value, value + 1, value + 2]) for value in (0, 10, 20)]
    again.append(0, rows(30, 33))
    saved(tmp_path, 2, again)
    assert [values[0] for _, values in held(FileRowLog(find(tmp_path).chunks()))] == [0, 10, 20, 30]
    assert again.end == 3


def test_without_hard_links_rows_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*paths: Any) -> None:
        raise OSError(NO_LINKS[0], "no links here")

    store = FileRowLog()
    store.append(0, rows(0, 5))
    first = saved(tmp_path, 1, store)
    monkeypatch.setattr(os, "link", refuse)
    second = saved(tmp_path, 2, store)
    name = "rank0_rows_0_5.pt"
    assert (first / name).read_bytes() == (second / name).read_bytes()
    assert (first / name).stat().st_ino != (second / name).stat().st_ino
    find(second).verify()


# ---- killed at every moment ------------------------------------------------------------------------------------------

CALLS = {"open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate"}


def killed_at(call: int, work: Callable[[], Any]) -> bool:
    """Do ``work`` in a process that dies just before its ``call``-th system call on files. Did it come that far?"""
    child = os.fork()
    if child == 0:
        left = call

        def count(event: str, args: Any) -> None:
            nonlocal left
            if event in CALLS:
                left -= 1
                if left <= 0:
                    os._exit(9)

        flush = os.fsync
        os.fsync = lambda descriptor: (count("open", None), flush(descriptor))  # type: ignore[assignment]
        sys.addaudithook(count)
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"call {call}: exit code {code}"
    return code == 9


def every_death(work: Callable[[], Any], check: Callable[[int], None]) -> int:
    """``check`` after each moment at which ``work`` can die, and once it was done; how many there were."""
    for call in range(1, 200):
        died = killed_at(call, work)
        check(call)
        if not died:
            return call - 1
    raise AssertionError("it never ends")


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path):
    store = FileRowLog()
    store.append(0, rows(0, 4))
    saved(tmp_path, 1, store)
    store.append(4, rows(4, 6))
    seen = []

    def check(call: int) -> None:
        for path in checkpoints(tmp_path):
            Checkpoint(path).verify()
        seen.append(find(tmp_path).manifest["env_steps"])
        tidy(tmp_path, None)
        assert not list((tmp_path / "checkpoints").glob("*.partial"))
        if seen[-1] == 2:
            remove(folder_of(tmp_path, 2))

    moments = every_death(lambda: saved(tmp_path, 2, store), check)
    assert moments > 15
    assert seen == sorted(seen), "it was there before it was renamed"
    assert {*seen} == {1, 2}


def test_a_deleted_checkpoint_is_gone_or_whole(tmp_path: Path):
    saved(tmp_path, 2)

    def check(call: int) -> None:
        for path in checkpoints(tmp_path):
            Checkpoint(path).verify()
        assert find(tmp_path).manifest["env_steps"] == 2
        tidy(tmp_path, None)
        if not folder_of(tmp_path, 1).exists():
            saved(tmp_path, 1)

    saved(tmp_path, 1)
    assert every_death(lambda: remove(folder_of(tmp_path, 1)), check) > 4
    remove(folder_of(tmp_path, 1))
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000000000002"]


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, 1)
    names = sorted(path.name for path in tmp_path.rglob("*"))
    plain, failed = os.fsync, 0
    for call in range(1, 30):
        left = call

        def flush(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device")
            plain(descriptor)

        monkeypatch.setattr(os, "fsync", flush)
        try:
            saved(tmp_path, 2)
            break
        except OSError:
            failed += 1
        monkeypatch.undo()
        assert not list(tmp_path.rglob("*.partial"))
        if folder_of(tmp_path, 2).exists():  # the last one comes after the rename
            find(tmp_path).verify()
            remove(folder_of(tmp_path, 2))
        assert sorted(path.name for path in tmp_path.rglob("*")) == names
    assert failed >= 5


# ---- keeping ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def keeper(tmp_path: Path):
    made = []

    def make(every: int | str = 10, keep_last: int = 2, keep_best: int = 1, env_steps: int = 0) -> CheckpointManager:
        settings = Settings(every=every, keep_last=keep_last, keep_best=keep_best, buffer=True)
        made.append(CheckpointManager(tmp_path, settings, env_steps))
        return made[-1]

    yield make
    for one in made:
        one.close()


def written(one: CheckpointManager, *made: tuple[int, float | None]) -> None:
    """Write checkpoints of steps with scores, one after another."""
    for env_steps, score in made:
        one.submit(snapshot(env_steps, score=score))
        one.wait()


def best(run: Path) -> str:
    return os.readlink(run / "checkpoints" / "best")


def kept(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in reversed(checkpoints(run))]


def test_the_last_and_the_best_are_kept(tmp_path: Path, keeper: Callable[..., CheckpointManager]):
    one = keeper(keep_last=2, keep_best=2)
    written(one, (10, 5.0), (20, 9.0), (30, None), (40, 7.0), (50, None), (60, 1.0))
    assert kept(tmp_path) == [20, 40, 50, 60]
    assert best(tmp_path) == "step_000000000020"
    assert find(tmp_path / "checkpoints" / "best").manifest["score"] == 9.0
    second = keeper(env_steps=60)  # another process
    assert [second.is_best(score) for score in (8.0, 10.0)] == [False, True]
    written(second, (70, 10.0))
    assert kept(tmp_path) == [60, 70]
    assert best(tmp_path) == "step_000000000070"


def test_none_is_best_when_none_is_to_be_kept(tmp_path: Path, keeper: Callable[..., CheckpointManager]):
    written(keeper(keep_last=1, keep_best=1), (5, 1.0))
    one = keeper(keep_last=1, keep_best=0)
    assert not one.is_best(1e9)
    written(one, (10, 1.0), (20, 1.0))
    assert kept(tmp_path) == [20]
    assert not os.path.lexists(tmp_path / "checkpoints" / "best")


@pytest.mark.parametrize(
    ("every", "due"), [(10, [10, 21, 30]), (0, []), (25, [25]), (1, [1, 2, 9, 10, 19, 21, 24, 25, 29, 30])]
)
def test_when_it_is_due(every: int, due: list[int], keeper: Callable[..., CheckpointManager]):
    one, made = keeper(every=every), []
    for env_steps in (1, 2, 9, 10, 19, 21, 24, 25, 29, 30):
        if one.due(env_steps):
            made.append(env_steps)
            written(one, (env_steps, None))
    assert made == due


def test_minutes(keeper: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    one = keeper(every="0.5min")
    clock[0] += 29
    assert one.due(5)
    assert not one.idle
    clock[0] += 2
    assert one.due(5)
    assert one.idle
    assert not one.due(0), "nothing was done since"


def test_one_that_falls_due_while_another_is_written_waits(
    tmp_path: Path, keeper: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    on, plain, began = threading.Event(), write, threading.Event()

    def slow(folder: Path, snapshot: Snapshot) -> Path:
        began.set()
        assert on.wait(60)
        return plain(folder, snapshot)

    monkeypatch.setattr(format, "write", slow)
    one = keeper()
    one.submit(snapshot(10))
    assert began.wait(60)
    assert one.poll() is None
    assert not one.idle
    assert kept(tmp_path) == []
    on.set()
    assert one.wait() == folder_of(tmp_path, 10)
    assert one.due(21)
    assert one.idle
    assert one.poll() is None, "it was told already"
    one.submit(snapshot(21))
    one.wait()
    assert kept(tmp_path) == [10, 21]


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path, keeper: Callable[..., CheckpointManager]):
    one, path = keeper(), folder_of(tmp_path, 10)

    def files(pattern: str) -> dict[str, tuple[int, bytes]]:
        return {file.name: (file.stat().st_ino, file.read_bytes()) for file in path.glob(pattern)}

    written(one, (10, None))
    before, trees = files("*"), files("*.pt")
    written(one, (10, None))
    assert files("*") == before
    written(one, (10, 3.0))  # evaluated since
    assert files("*.pt") == trees
    found = find(tmp_path)
    found.verify()
    assert found.manifest["score"] == 3.0
    assert kept(tmp_path) == [10]


def test_a_score_is_written_whole_or_not_at_all(tmp_path: Path):
    path, seen = saved(tmp_path, 1), []

    def check(call: int) -> None:
        found = find(tmp_path)
        found.verify()
        seen.append(found.manifest["score"])

    assert every_death(lambda: note_score(path, 2.5), check) >= 4
    assert seen[0] is None
    assert seen[-1] == 2.5
    assert sorted(file.name for file in path.iterdir()) == ["learner.pt", "manifest.json", "rank0.pt", "weights.pt"]


@pytest.mark.parametrize("ask", ["wait", "poll", "submit"])
def test_a_disk_that_refuses_stops_the_run(tmp_path: Path, keeper: Callable[..., CheckpointManager], ask: str):
    one = keeper()
    (tmp_path / "checkpoints").write_text("in the way")
    one.submit(snapshot(10))
    assert one._writing is not None
    one._writing.exception(60)
    with pytest.raises(RunError, match=r"a checkpoint could not be written to .*: (File exists|Not a directory)"):
        one.submit(snapshot(20)) if ask == "submit" else getattr(one, ask)()


def test_what_is_no_checkpoint_does_not_stop_the_others(tmp_path: Path, keeper: Callable[..., CheckpointManager]):
    for env_steps in (1, 2, 3):
        saved(tmp_path, env_steps)
    one, two, three = (folder_of(tmp_path, env_steps) for env_steps in (1, 2, 3))
    (one / "manifest.json").write_text("{")
    remove(two)
    two.symlink_to("nowhere")
    keep = keeper(keep_last=1, env_steps=3)
    keep.submit(snapshot(10))
    keep.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000000000010"]
    assert not three.exists()
