"""Recordings that were damaged or forged: one line that names the file, and nothing is executed."""

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from glob import glob
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import h5py
import lz4.frame
import numpy as np
import pytest

from rlplug.cli import main
from rlplug.data import files, packed
from rlplug.data.recording import Recording
from rlplug.data.source import MOST_NOTES, Reading
from rlplug.types import ConfigError
from tests.data.episodes import plain, write_json, write_parquet
from tests.tools.recordings import SPEC, columns, lines, minari, npz

# ---- packed columns -------------------------------------------------------------------------------------------------

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {
    "rows": ARRAY,
    "columns first": np.asfortranarray(ARRAY),
    "a part": ARRAY[:, ::-1],
    "another order of bytes": ARRAY.astype(">f8"),
    "flags": ARRAY > 2,
    "images": np.zeros((2, 4, 4, 3), np.uint8),
    "half": ARRAY.astype(np.float16),
    "no rows": ARRAY[:0],
    "one number": np.array(3),
}


def pack(raw: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(raw)).decode()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_read_as_they_were_pickled(array, protocol):
    if protocol == 2 and not array.size:
        return  # bytes of nothing are a call there, which RLlib never wrote
    found = packed.unpack(pack(pickle.dumps(array, protocol)))
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.shape) == (array.dtype.newbyteorder("="), array.shape)


@pytest.mark.parametrize("core", ["core", "_core"])
def test_parts_and_rows_of_every_numpy(core):
    """NumPy 1 and 2 call their modules by other names."""
    nested = {"a": ARRAY, "b": (ARRAY, ARRAY[0]), "c": [ARRAY, ARRAY + 1], "d": {"e": np.float32(1)}}
    raw = pickle.dumps(nested, 2).replace(b"numpy._core.", f"numpy.{core}.".encode())  # texts of no fixed length
    found = packed.unpack(pack(raw))
    np.testing.assert_array_equal(found["b"]["1"], ARRAY[0])
    np.testing.assert_array_equal(found["c"], np.stack(nested["c"]))
    assert found["d"]["e"] == 1


class Forged:
    """Is pickled as the call of a function, and a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def forged_type() -> Any:
    """A type that NumPy believes, and that ends the process when it is used."""
    return Forged(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27))


F4 = np.dtype("f4")


def forged_array(kind: Any = F4, shape: Any = (2,), data: Any = bytes(8)) -> Any:
    return Forged(ARRAY.T.__reduce__()[0], (np.ndarray, (0,), b"b"), (1, shape, kind, False, data))


def references() -> Any:
    value: Any = [ARRAY]
    for _ in range(60):
        value = [value, value]
    return value


FORGED = {
    "a call": (Forged(os.system, ("echo executed",)), "posix.system"),
    "a type": (forged_type(), "the type 'V8'"),
    "objects": (np.array([{}], object), "the type 'O8'"),
    "texts": (np.array(["a"]), "the type 'U1'"),
    "records": (np.zeros(2, [("a", "f4")]), "the type 'V4'"),
    "a type's state": (
        forged_array(Forged(np.dtype, ("f4", False, True), (3, "<", None, None, None, 9, 1, 63))),
        "a state",
    ),
    "too few bytes": (forged_array(shape=(2**20, 2**20)), "has 8 bytes and needs 4398046511104"),
    "a negative shape": (forged_array(shape=(-1,)), "a state that no array has"),
    "a shape of texts": (forged_array(shape=("a",)), "a state that no array has"),
    "a list of objects": (forged_array(data=[ARRAY]), "a state that no array has"),
    "references": (references(), "holds references"),
    "keys": ({1: ARRAY}, "keys that are not text"),
    "a text": ("executed", "holds str"),
    "a class": (np.ndarray, "holds _Name"),
    "an array, called": (Forged(np.ndarray, (2, 3)), "numpy.ndarray, called"),
}


@pytest.mark.parametrize(("value", "said"), FORGED.values(), ids=FORGED)
def test_all_else_is_refused(value, said, tmp_path, capfd):
    line = json.loads(lines(tmp_path, Random(0)).read_text()) | {"obs": pack(pickle.dumps(value))}
    (tmp_path / "a.json").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=rf"a.json, line 1 cannot be read: .*{said}"):
        Recording([str(tmp_path / "a.json")], Reading(SPEC))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "cut off": (pack(pickle.dumps(ARRAY))[:-8], "cut off"),
        "no base64": ("ä", "ASCII"),
        "no LZ4": (base64.b64encode(b"abcdefgh").decode(), "."),
        "no end": (pack(b"\x80\x05"), "."),
        "a deep one": (pack(b"]" * 9999 + b"a" * 9998 + b"."), "nested too deeply"),
        "too many parts": (pack(b"N" * (packed.PARTS + 9) + b"."), "more than 65,536 parts"),
    }.values(),
)
def test_packed_texts_that_are_damaged(text, said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        packed.unpack(text)


@pytest.mark.parametrize("store_size", [False, True])
def test_a_bomb_is_not_unpacked(store_size, monkeypatch):
    monkeypatch.setattr(packed, "MOST", 2**20)
    bomb = lz4.frame.compress(pickle.dumps(np.zeros(2**18)), store_size=store_size)
    with pytest.raises(ValueError, match="is cut off, or holds more than 1 MiB"):
        packed.unpack(base64.b64encode(bomb).decode())


# ---- files ----------------------------------------------------------------------------------------------------------


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        Recording([str(path)], Reading(SPEC, **settings))
    assert refused.value.key == "data.path"
    assert len(str(refused.value).splitlines()) == 1
    return refused.value.message


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".parquet", ".json"])
@pytest.mark.parametrize("device", ["fifo", "/dev/zero", "itself"])
def test_what_is_no_file_is_not_opened(suffix, device, tmp_path):
    path = tmp_path / f"a{suffix}"
    if device == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path if device == "itself" else device)
    assert refusal(path) == f"{path} is not a regular file"


def test_a_fifo_that_says_spaces(tmp_path):

    path = write_json(tmp_path / "a-000000.json", [plain(3, 0)], SPEC)
    (beside := path.with_name(f"{path.name}.spaces")).unlink()
    os.mkfifo(beside)
    assert f"{beside} cannot be read: it is not a regular file" in refusal(path)


def links(group: h5py.Group, folder: Path) -> dict[str, Any]:
    with h5py.File(folder / "other.h5x", "w") as other:
        other["a"] = np.zeros(3, np.float32)
    return {
        "external link": lambda: group.__setitem__("rewards", h5py.ExternalLink("other.h5x", "/a")),
        "soft link": lambda: group.__setitem__("rewards", h5py.SoftLink(f"{group.name}/actions")),
        "a circle": lambda: group.__setitem__("rewards", group),
        "external storage": lambda: group.create_dataset("rewards", (3,), "f4", external=[("/dev/zero", 0, 12)]),
        "a bomb": lambda: group.create_dataset("rewards", (2**40,), "f4", chunks=(2**10,)),
        "texts": lambda: group.create_dataset("rewards", data=["a"] * 3, dtype=h5py.string_dtype()),
    }


LINKS = {
    "external link": "has an external link at 'rewards'",
    "soft link": "has an external link at 'rewards'",
    "a circle": "has groups in groups|has no numbers",
    "external storage": "keeps 'rewards' in another file",
    "a bomb": "it declares 4,194,304.0 MiB in",
    "texts": "has no numbers in 'rewards'",
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("episodes", [False, True], ids=["arrays", "minari"])
def test_hdf5_that_is_kept_elsewhere(episodes, kind, tmp_path):

    if episodes:
        path = minari(tmp_path, Random(0))
    else:
        with h5py.File(path := tmp_path / "a.hdf5", "w") as file:
            for name, leaf in columns(Random(0)).items():
                file[name] = leaf
    with h5py.File(path, "a") as file:
        group = file["episode_0"] if episodes else file
        del group["rewards"]  # type: ignore[attr-defined]
        links(group, tmp_path)[kind]()  # type: ignore[arg-type]
    assert re.search(LINKS[kind], refusal(path))


@pytest.mark.parametrize("name", ["infos", "episode_0", "observations"])
def test_data_sets_in_place_of_groups(name, tmp_path):
    """To look for a name in a data set is to read all of it."""
    with h5py.File(path := tmp_path / "a.hdf5", "w") as file:
        for key, leaf in columns(Random(0)).items():
            if key != name:
                file[key] = leaf
        file.create_dataset(name, (2**40,), "f4", chunks=(2**20,), compression="gzip")
    if name == "infos":  # from which nothing is needed
        assert len(Recording([str(path)], Reading(SPEC)).lengths)
    else:
        assert re.search("a dataset where a group is expected|it declares", refusal(path))


@pytest.mark.parametrize("name", ["observations", "rewards"])
def test_numbers_that_are_infinite_in_32_bits(name, tmp_path):
    values = columns(Random(0))
    values[name] = values[name].astype(np.float64)
    values[name][1] = 1e300
    np.savez(tmp_path / "a.npz", **values)  # type: ignore[arg-type]
    assert "that is not a finite number, in row 1" in refusal(tmp_path / "a.npz")


def test_zip_files_that_unpack_to_more_than_they_can_hold(tmp_path, monkeypatch):
    monkeypatch.setattr("rlplug.data.source.ALWAYS", 2**20)
    path = npz(tmp_path, Random(0))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("logp.npy", bytes(2**22))
    assert re.search(r"4\.0 MiB in a file of 0\.0 MiB", refusal(path))


@pytest.mark.parametrize("damaged", ["refuse", "skip"])
def test_lines_without_an_end(damaged, tmp_path, monkeypatch):
    path = lines(tmp_path, Random(0))
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert refusal(path, damaged=damaged) == f"{path} cannot be read: line 2 is not text"
    monkeypatch.setattr("rlplug.data.json_lines.LINE", 2**12)
    path.write_bytes(whole + b"1" * 2**13)
    assert refusal(path, damaged=damaged) == f"{path} cannot be read: line 2 is longer than 0 MiB"


def test_arrays_that_do_not_fit_into_memory(tmp_path, monkeypatch):
    path = npz(tmp_path, Random(0))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    assert "of memory, of which 0.0 GiB are free" in refusal(path)


def test_letters_that_a_terminal_obeys_are_not_shown(tmp_path, capsys):
    path = npz(tmp_path, Random(0), **{"\x1b[2J": np.zeros(3)})
    values = dict(np.load(path))
    del values["rewards"]
    np.savez(path, **values)  # type: ignore[arg-type]
    assert r"\x1b[2J" in refusal(path)
    assert main(["data", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_any_error_of_a_library_names_the_file(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", [plain(3, 0)], SPEC)
    for error, said in ((ZeroDivisionError("x"), "cannot be read: x"), (MemoryError(), "does not fit into memory")):
        monkeypatch.setattr("rlplug.data.parquet._check_meta", lambda *_, e=error: (_ for _ in ()).throw(e))
        assert said in refusal(path)


def test_many_parts_that_are_left_out_are_few_lines(tmp_path):
    path = write_json(tmp_path / "a-000000.json", [plain(3, i) for i in range(99)], SPEC)
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], *["{"] * 98]) + "\n")
    reading = Reading(SPEC, damaged="skip")
    Recording([str(path)], reading)
    assert len(reading.notes) == MOST_NOTES + 1
    assert reading.notes[-1] == f"and {98 - MOST_NOTES} more such lines"
    assert reading.counts["damaged"] == 98


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder of recordings in a folder of too much else."""
    monkeypatch.setattr(files, "MOST", 200)
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "a.parquet", [plain(3, 0)], SPEC)
    for i in range(300):
        (tmp_path / "other" / str(i)).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("words", ["", "**/a.parquet", "**", "*/*/*", "data/../../{}"])
def test_a_folder_of_too_much_is_refused(many, words, monkeypatch, capsys):
    (many / "data").joinpath("deep").mkdir()
    monkeypatch.chdir(many / "data" / "deep")
    path = str(many / words.format(many.name))
    assert main(["data", path]) == 2
    said = "has more than 200 files and folders below it; name the folder of the recordings"
    assert f"data.path: {path} {said}" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["data", "data/*", "d?ta/*.parquet", "data/**/*.parquet", "data/a.parquet"])
def test_the_folder_of_the_recordings_is_read(many, words):
    assert Recording([str(many / words)], Reading()).lengths.tolist() == [3]


def test_patterns_are_those_of_glob(tmp_path, monkeypatch):

    for name in ("a.npz", "b/a.npz", "b/c/a.npz", "b/c/d/e.npz", ".f/a.npz", "b/.g/a.npz", "[h].npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "*.npz",
        "*/a.npz",
        "**/a.npz",
        "b/**/*.npz",
        "**/c/**/*",
        "b/?/*",
        "**/[!a].npz",
        ".*/a.npz",
        "**/**/e.npz",
    ):
        expected = sorted({path for path in map(Path, glob(pattern, recursive=True)) if path.is_file()})
        assert files.find(pattern, "data.path", [".npz"]) == expected, pattern
    assert files.find("[h].npz", "data.path", [".npz"]) == [Path("[h].npz")]


def test_links_in_circles_end(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c", "d", "b/e", "b/f"):
        (tmp_path / name).symlink_to(tmp_path)
    npz(tmp_path, Random(0))
    assert files.find(str(tmp_path / "**" / "a.npz"), "data.path", [".npz"]) == [tmp_path / "a.npz"]
    assert files.find(str(tmp_path), "data.path", [".npz"]) == [tmp_path / "a.npz"]


# ---- all of it ------------------------------------------------------------------------------------------------------


def test_a_sample_of_forged_recordings():
    """Fresh seeds choose kinds and cases; a process without threads forks for each of them."""
    command = [sys.executable, "-m", "tests.tools.forge", "12"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 cases" in done.stdout
