"""What can happen to a run folder: bytes, names and values, by accident or on purpose."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from rlplug.checkpointing.format import FOLDER, MANIFEST, folder_of
from rlplug.checkpointing.reading import checkpoints
from rlplug.checkpointing.serialize import encode
from rlplug.run import run_dir as run_folder

OWN_FILES = ("config.yaml", run_folder.MANIFEST, run_folder.SUMMARY, run_folder.LOCK, "metrics.csv")
"""what stands in a run folder beside its checkpoints"""
NONSENSE: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**18, 10**30, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\x00", "\ud800"),
    *("../../../etc/passwd", "/etc/passwd", "step_000000000001", [], {}, [1, "a"], {"a": 1}, [[[]]], {"name": {}}),
)
NESTED = b"[" * 100_000


# ---- where damage is done --------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """A copy of a run: what is altered is its own, the rest are hard links."""

    run: Path
    other: Path
    """another run of the same configuration, which nobody alters"""
    marker: Path
    """would be made by code that stands in a file"""
    rng: Random

    def checkpoint(self) -> Path:
        """One of them, the newest more often than not."""
        found = [path for path in candidates(self.run) if path.is_dir()]
        if not found:
            raise LookupError
        return found[0] if self.rng.random() < 0.6 else self.rng.choice(found)

    def file(self, suffix: str = "") -> Path:
        """Of a checkpoint."""
        found = sorted(path for path in self.checkpoint().glob(f"*{suffix}") if path.is_file())
        if not found:
            raise LookupError
        return self.rng.choice(found)

    def own(self, path: Path) -> Path:
        """Let go of the original. Checkpoints that share the file still do, as on a real disk."""
        inode, copy = path.stat().st_ino, self.run / "copy"
        shutil.copyfile(path, copy)
        for twin in [path, *(self.run / FOLDER).glob("*/*")]:
            if twin.is_file() and twin.stat().st_ino == inode:
                twin.unlink()
                os.link(copy, twin)
        copy.unlink()
        return path

    def write(self, path: Path, data: bytes) -> None:
        remove(path)
        path.write_bytes(data)

    def forge(self, folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Alter a manifest, and make its checksum right again."""
        with suppress(ValueError, RecursionError):
            manifest = json.loads((folder / MANIFEST).read_bytes())
            if not isinstance(manifest, dict):
                return
            manifest.pop("checksum", None)
            manifest = change(manifest) or manifest
            text = json.dumps(manifest, sort_keys=True).encode()
            manifest = json.dumps({**manifest, "checksum": hashlib.sha256(text).hexdigest()})
            self.write(folder / MANIFEST, manifest.encode())

    def plant(self, path: Path, data: bytes) -> None:
        """Put a file into a checkpoint whose manifest vouches for it."""
        self.write(path, data)
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        def vouch(manifest: dict[str, Any]) -> None:
            if isinstance(files := manifest.get("files"), dict):
                files[path.name] = record

        self.forge(path.parent, vouch)


def candidates(run: Path) -> list[Path]:
    """What bears the name of a checkpoint, the newest first."""
    return sorted((path for path in (run / FOLDER).glob("step_*") if not path.suffix), reverse=True)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copied(run: Path, to: Path) -> Path:
    """A copy whose checkpoints are hard links, and whose other files are not."""
    to.mkdir()
    for path in run.iterdir():
        if path.name == FOLDER:
            shutil.copytree(path, to / path.name, symlinks=True, copy_function=os.link)
        elif path.is_file():
            shutil.copyfile(path, to / path.name)
    return to


# ---- damage ----------------------------------------------------------------------------------------------------------


def _bytes(scene: Scene, path: Path, how: str) -> None:
    """Alter a file's content."""
    rng = scene.rng
    if not path.is_file():
        raise LookupError
    data = bytearray(scene.own(path).read_bytes())
    place = rng.randrange(len(data) + 1)
    if how == "truncated":
        data = data[:place]
    elif how == "emptied":
        data.clear()
    elif how == "grown":
        data += rng.randbytes(rng.randint(1, 100))
    elif how == "nested":
        data = bytearray(NESTED)
    elif how == "bits flipped":
        for _ in range(rng.randint(1, 8) if data else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "overwritten":
        data[place : place + 20] = rng.randbytes(rng.randint(1, 40))
    path.write_bytes(data)


def _entry(scene: Scene, path: Path, how: str) -> None:
    """Put something else in the place of a file or a folder."""
    remove(path)
    if how == "a folder":
        path.mkdir()
        (path / "x").write_bytes(b"x")
    elif how == "a file":
        path.write_bytes(b"no folder")
    elif how == "a dangling link":
        path.symlink_to("nowhere")
    elif how == "a link to itself":
        path.symlink_to(path.name)


def _swap(scene: Scene, one: Path, two: Path) -> None:
    between = one.with_name("between")
    if one != two:
        one.rename(between)
        two.rename(one)
        between.rename(two)


def _of_another_run(scene: Scene, path: Path) -> None:
    found = sorted((scene.other / FOLDER).glob(f"step_*/{path.name}")) or sorted(
        (scene.other / FOLDER).glob(f"step_*/*{path.suffix}")
    )
    scene.write(path, scene.rng.choice(found).read_bytes())


def _checkpoint_of_another_run(scene: Scene) -> None:
    path = scene.checkpoint()
    remove(path)
    shutil.copytree(scene.rng.choice(checkpoints(scene.other)), path)


def _renamed(scene: Scene) -> None:
    path = scene.checkpoint()
    name = scene.rng.choice([folder_of(scene.run, scene.rng.randrange(10**6)).name, "step_x", "step_", "old"])
    if not path.with_name(name).exists():
        path.rename(path.with_name(name))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in nested dicts and lists."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def garbled(node: Any, rng: Random) -> Any:
    """A value is replaced, taken out or renamed somewhere; shallow ones as often as deep ones."""
    found = list(places(node))
    if not found or rng.random() < 0.02:
        return rng.choice(NONSENSE)
    depth = rng.choice(sorted({len(path) for path in found}))
    *parents, last = rng.choice([path for path in found if len(path) == depth])
    inner = node
    for key in parents:
        inner = inner[key]
    what = rng.random()
    if what < 0.15:
        del inner[last]
    elif what < 0.3 and isinstance(inner, dict):
        inner[rng.choice(["../../../x.pt", "/x.pt", "", "x", "rank0_rows_x.pt", "\x00"])] = inner.pop(last)
    else:
        inner[last] = rng.choice(NONSENSE)
    return node


def _garbled_json(scene: Scene, path: Path) -> None:
    with suppress(ValueError, RecursionError):
        scene.write(path, json.dumps(garbled(json.loads(path.read_bytes()), scene.rng)).encode())


def _garbled_config(scene: Scene) -> None:
    path = scene.run / "config.yaml"
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        node = garbled(yaml.safe_load(path.read_bytes()), scene.rng)
        scene.write(path, yaml.safe_dump(node, sort_keys=False).encode("utf-8", "surrogatepass"))


def _forged(scene: Scene, times: int = 1) -> None:
    def change(manifest: dict[str, Any]) -> dict[str, Any] | None:
        found = garbled(manifest, scene.rng)
        return found if isinstance(found, dict) else None

    for _ in range(times):
        scene.forge(scene.checkpoint(), change)


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _pickle(scene: Scene) -> None:
    """A file whose unpickling runs code, as torch's archive or bare; its size and checksum are right."""
    path = scene.file(".pt")
    data = pickle.dumps({"algorithm": Planted(scene.marker)}, protocol=scene.rng.randrange(6))
    if scene.rng.random() < 0.5:
        torch.save({"algorithm": Planted(scene.marker)}, path := scene.own(path))
        data = path.read_bytes()
    scene.plant(path, data)


def _foreign_tree(scene: Scene) -> None:
    """A file that can be read, and holds something else; its size and checksum are right."""
    path = scene.file(".pt")
    siblings = sorted(file for file in path.parent.glob("*.pt") if file.stem.split("_")[0] != path.stem.split("_")[0])
    trees = [None, 5, "x", [], {}, {"algorithm": 5}, torch.zeros(2), {"policy": torch.zeros(3)}, [[1, 2], {"a": None}]]
    own = scene.rng.random() < 0.4 and siblings
    scene.plant(path, scene.rng.choice(siblings).read_bytes() if own else encode(scene.rng.choice(trees)))


CONTENT = ("truncated", "emptied", "grown", "bits flipped", "overwritten", "nested")
PLACE = ("deleted", "a folder", "a dangling link", "a link to itself")

PLAIN: dict[str, Callable[[Scene], None]] = {
    **{f"file {how}": lambda scene, how=how: _bytes(scene, scene.file(), how) for how in CONTENT},
    **{f"manifest {how}": lambda scene, how=how: _bytes(scene, scene.checkpoint() / MANIFEST, how) for how in CONTENT},
    **{f"file: {how}": lambda scene, how=how: _entry(scene, scene.file(), how) for how in PLACE},
    **{
        f"checkpoint: {how}": lambda scene, how=how: _entry(scene, scene.checkpoint(), how)
        for how in (*PLACE, "a file")
    },
    "files swapped": lambda scene: _swap(scene, scene.file(), scene.file()),
    "file of another run": lambda scene: _of_another_run(scene, scene.file(".pt")),
    "manifest garbled": lambda scene: _garbled_json(scene, scene.checkpoint() / MANIFEST),
}
"""what checksums show: the newest checkpoint that it left alone must be loaded"""

SLY: dict[str, Callable[[Scene], None]] = {
    "checkpoints swapped": lambda scene: _swap(scene, scene.checkpoint(), scene.checkpoint()),
    "checkpoint renamed": _renamed,
    "checkpoint of another run": _checkpoint_of_another_run,
    "manifest forged": _forged,
    "manifest forged much": lambda scene: _forged(scene, times=4),
    "pickle with code": _pickle,
    "foreign tree": _foreign_tree,
}
"""what has right checksums: one of the run's states, or a refusal"""

OWN: dict[str, Callable[[Scene], None]] = {
    **{
        f"{name} {how}": lambda scene, name=name, how=how: _bytes(scene, scene.run / name, how)
        for name in OWN_FILES
        for how in CONTENT
    },
    **{
        f"{name}: {how}": lambda scene, name=name, how=how: _entry(scene, scene.run / name, how)
        for name in (*OWN_FILES, FOLDER)
        for how in PLACE
    },
    "config.yaml garbled": _garbled_config,
    "manifest.json garbled": lambda scene: _garbled_json(scene, scene.run / run_folder.MANIFEST),
    "summary.json garbled": lambda scene: _garbled_json(scene, scene.run / run_folder.SUMMARY),
    "metrics.csv: a file": lambda scene: _entry(scene, scene.run / "metrics.csv", "a file"),
}
"""beside the checkpoints"""
