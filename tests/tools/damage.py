"""Ways to damage a run folder, by accident or on purpose: its bytes, its names and its values."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from rlplug.checkpointing.atomic import delete
from rlplug.checkpointing.format import FOLDER, MANIFEST, checkpoints, folder_of
from rlplug.checkpointing.serialize import encode
from rlplug.run import run_dir as run_folder

OWN_FILES = ("config.yaml", run_folder.MANIFEST, run_folder.SUMMARY, run_folder.LOCK, "metrics.csv")
"""files of a run folder beside its checkpoints"""
NONSENSE: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**18, 10**30, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\x00", "\ud800"),
    *("../../../etc/passwd", "/etc/passwd", "step_000000000001", [], {}, [1, "a"], {"a": 1}, [[[]]], {"name": {}}),
)
NESTED = b"[" * 100_000


# ---- where damage is done --------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """A copy of a run, in which unaltered files are hard links to the original."""

    run: Path
    other: Path
    """another run of the same configuration, which is only read"""
    marker: Path
    """a folder that exists only if code in a file was executed"""
    rng: Random

    def checkpoint(self) -> Path:
        """Choose a checkpoint, the newest more often than not."""
        found = [path for path in candidates(self.run) if path.is_dir()]
        if not found:
            raise LookupError
        return found[0] if self.rng.random() < 0.6 else self.rng.choice(found)

    def file(self, suffix: str = "") -> Path:
        """Choose a file of a checkpoint."""
        found = sorted(path for path in self.checkpoint().glob(f"*{suffix}") if path.is_file())
        if not found:
            raise LookupError
        return self.rng.choice(found)

    def own(self, path: Path) -> Path:
        """Replace links to the original by a copy, which the checkpoints that shared the file go on to share."""
        inode, copy = path.stat().st_ino, self.run / "copy"
        shutil.copyfile(path, copy)
        for twin in [path, *(self.run / FOLDER).glob("*/*")]:
            if twin.is_file() and twin.stat().st_ino == inode:
                twin.unlink()
                os.link(copy, twin)
        copy.unlink()
        return path

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file."""
        delete(path)
        path.write_bytes(data)

    def forge(self, folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Alter a manifest and correct its checksum."""
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
        """Put a file into a checkpoint and its record into the manifest."""
        self.write(path, data)
        record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        def add(manifest: dict[str, Any]) -> None:
            if isinstance(files := manifest.get("files"), dict):
                files[path.name] = record

        self.forge(path.parent, add)


def candidates(run: Path) -> list[Path]:
    """Return what has the name of a checkpoint, the newest first."""
    return sorted((path for path in (run / FOLDER).glob("step_*") if not path.suffix), reverse=True)


def copied(run: Path, to: Path) -> Path:
    """Copy a run; files of checkpoints become hard links, other files are copied."""
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
    if how == "grown":
        data += rng.randbytes(rng.randint(1, 100))
    elif how == "bits flipped":
        for _ in range(rng.randint(1, 8) if data else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "overwritten":
        data[place : place + 20] = rng.randbytes(rng.randint(1, 40))
    else:
        data = {"truncated": data[:place], "emptied": b"", "nested": NESTED}[how]
    path.write_bytes(data)


def _entry(scene: Scene, path: Path, how: str) -> None:
    """Put something else in the place of a file or a folder."""
    delete(path)
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
    same, alike = (sorted((scene.other / FOLDER).glob(f"step_*/{name}")) for name in (path.name, f"*{path.suffix}"))
    scene.write(path, scene.rng.choice(same or alike).read_bytes())


def _checkpoint_of_another_run(scene: Scene) -> None:
    path = scene.checkpoint()
    delete(path)
    shutil.copytree(scene.rng.choice(checkpoints(scene.other)), path)


def _renamed(scene: Scene) -> None:
    path = scene.checkpoint()
    name = scene.rng.choice([folder_of(scene.run, scene.rng.randrange(10**6)).name, "step_x", "step_", "old"])
    if not path.with_name(name).exists():
        path.rename(path.with_name(name))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested dicts and lists."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def chosen(node: Any, rng: Random) -> tuple[Any, Any] | None:
    """Return a dict or list inside a node, and a key of it; each depth is equally likely. None: all is empty."""
    found = list(places(node))
    if not found:
        return None
    depth = rng.choice(sorted({len(path) for path in found}))
    *parents, last = rng.choice([path for path in found if len(path) == depth])
    for key in parents:
        node = node[key]
    return node, last


def garbled(node: Any, rng: Random) -> Any:
    """Replace, delete or rename one value."""
    place, what = chosen(node, rng), rng.random()
    if place is None or rng.random() < 0.02:
        return rng.choice(NONSENSE)
    inner, last = place
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
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _pickle(scene: Scene) -> None:
    """Plant a file whose unpickling runs code, as torch's archive or bare, with the right size and checksum."""
    path = scene.file(".pt")
    data = pickle.dumps({"algorithm": Planted(scene.marker)}, protocol=scene.rng.randrange(6))
    if scene.rng.random() < 0.5:
        torch.save({"algorithm": Planted(scene.marker)}, path := scene.own(path))
        data = path.read_bytes()
    scene.plant(path, data)


def _foreign_tree(scene: Scene) -> None:
    """Plant a file that can be read and holds something else, with the right size and checksum."""
    path = scene.file(".pt")
    siblings = sorted(file for file in path.parent.glob("*.pt") if file.stem.split("_")[0] != path.stem.split("_")[0])
    trees = [None, 5, "x", [], {}, {"algorithm": 5}, torch.zeros(2), {"policy": torch.zeros(3)}, [[1, 2], {"a": None}]]
    own = scene.rng.random() < 0.4 and siblings
    scene.plant(path, scene.rng.choice(siblings).read_bytes() if own else encode(scene.rng.choice(trees)))


CONTENT = ("truncated", "emptied", "grown", "bits flipped", "overwritten", "nested")
PLACE = ("deleted", "a folder", "a dangling link", "a link to itself")
Kinds = dict[str, Callable[[Scene], None]]


def _kinds(
    name: str, path: Callable[[Scene], Path], places: Sequence[str] = PLACE, content: Sequence[str] = CONTENT
) -> Kinds:
    """Damage of the content of a file, and things in its place."""
    made = {f"{name} {how}": lambda scene, how=how: _bytes(scene, path(scene), how) for how in content}
    return made | {f"{name}: {how}": lambda scene, how=how: _entry(scene, path(scene), how) for how in places}


PLAIN: Kinds = {
    **_kinds("file", Scene.file),
    **_kinds("manifest", lambda scene: scene.checkpoint() / MANIFEST, ()),
    **_kinds("checkpoint", Scene.checkpoint, (*PLACE, "a file"), ()),
    "files swapped": lambda scene: _swap(scene, scene.file(), scene.file()),
    "file of another run": lambda scene: _of_another_run(scene, scene.file(".pt")),
    "manifest garbled": lambda scene: _garbled_json(scene, scene.checkpoint() / MANIFEST),
}
"""damage that checksums show: the newest undamaged checkpoint must be loaded"""

SLY: Kinds = {
    "checkpoints swapped": lambda scene: _swap(scene, scene.checkpoint(), scene.checkpoint()),
    "checkpoint renamed": _renamed,
    "checkpoint of another run": _checkpoint_of_another_run,
    "manifest forged": _forged,
    "manifest forged much": lambda scene: _forged(scene, times=4),
    "pickle with code": _pickle,
    "foreign tree": _foreign_tree,
}
"""damage with right checksums: one of the run's states must be loaded, or the run refused"""

OWN: Kinds = {
    **{
        key: kind for name in OWN_FILES for key, kind in _kinds(name, lambda scene, name=name: scene.run / name).items()
    },
    **_kinds(FOLDER, lambda scene: scene.run / FOLDER, content=()),
    "config.yaml garbled": _garbled_config,
    "manifest.json garbled": lambda scene: _garbled_json(scene, scene.run / run_folder.MANIFEST),
    "summary.json garbled": lambda scene: _garbled_json(scene, scene.run / run_folder.SUMMARY),
    "metrics.csv: a file": lambda scene: _entry(scene, scene.run / "metrics.csv", "a file"),
}
"""damage outside of the checkpoints"""
