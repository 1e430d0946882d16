"""The folder of compiled functions, whose libraries are run: nobody else may write to it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._inductor import codecache  # noqa: F401  another user may not be able to read it

from rlplug.compiler.artifact import VARIABLE, own_folder

VICTIM, OTHER = 23_001, 23_002  # users
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A temporary folder that everybody can write to, as /tmp."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_user(user: int, function: Callable[[], object]) -> str:
    """Return what a function returns in a process of another user, or its error."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.umask(0o022)
            said = f"{function()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        return file.read()


def asked(monkeypatch: pytest.MonkeyPatch, user: int = VICTIM, **variables: object) -> str:
    for name in (VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return as_user(user, own_folder)


def test_it_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    old = os.umask(0o002)  # as it is where every user has a group
    try:
        folder = own_folder()
    finally:
        os.umask(old)
    assert folder == tmp_path / "new" / "cache" / "rlplug"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert os.environ[VARIABLE] == str(folder)
    assert own_folder() == folder


def test_torchs_default_is_not_taken_for_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(VARIABLE, f"{tempfile.gettempdir()}/torchinductor_somebody")
    assert own_folder() == tmp_path / ".cache" / "rlplug"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert own_folder() == tmp_path / "mine"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o755, 0o1777])
def test_a_folder_that_is_open_to_others_is_refused(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "open"))
    with pytest.raises(OSError, match=r"no folder is safe for compiled functions: .*open.* others|other users"):
        own_folder()


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_so_is_one_below_a_folder_that_others_can_write_to(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "open" / "own").mkdir(parents=True, mode=0o700)
    (tmp_path / "open").chmod(mode)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "open" / "own" / "x"))
    with pytest.raises(OSError, match=r"open can be written by other users; set TORCHINDUCTOR_CACHE_DIR"):
        own_folder()


@pytest.mark.parametrize("there", ["a loop", "a dangling link", "a file", "nothing that can be made"])
def test_what_is_no_folder_is_an_error_of_the_system(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "x"
    if there == "a loop":
        place.symlink_to(place)
    elif there == "a dangling link":
        place.symlink_to("nowhere")
    elif there == "a file":
        place.touch()
        place.chmod(0o600)
    else:
        place = Path("/proc/nowhere")
    monkeypatch.setenv(VARIABLE, str(place / "y"))
    with pytest.raises(OSError, match="no folder is safe for compiled functions: "):
        own_folder()


@as_root
def test_another_users_folder_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch):
    forged = shared / "forged"
    assert as_user(OTHER, lambda: forged.mkdir(0o700)) == "None"
    said = asked(monkeypatch, **{VARIABLE: forged})
    assert said.startswith(f"OSError: no folder is safe for compiled functions: {forged} belongs to another user; set ")
    assert f"{forged} belongs to another user" in asked(monkeypatch, 0, **{VARIABLE: forged})  # by root, too
    assert as_user(OTHER, lambda: forged.chmod(0o777)) == "None"
    for variable in (VARIABLE, "XDG_CACHE_HOME", "HOME"):
        assert f"{forged} belongs to another user" in asked(monkeypatch, **{variable: forged / "below"})
    assert not list(forged.iterdir())


@as_root
@pytest.mark.parametrize("where", ["at the end", "above"])
def test_another_users_link_is_refused_though_it_leads_to_ones_own_folder(
    where: str, shared: Path, monkeypatch: pytest.MonkeyPatch
):
    own, link = shared / "own", shared / "link"
    assert as_user(VICTIM, lambda: own.mkdir(0o700)) == "None"
    assert as_user(OTHER, lambda: link.symlink_to(own)) == "None"
    said = asked(monkeypatch, **{VARIABLE: link if where == "at the end" else link / "below"})
    assert f"{link} belongs to another user" in said
    assert asked(monkeypatch, **{VARIABLE: own / "below"}) == str(own / "below")


@as_root
def test_ones_own_link_is_followed_and_what_it_leads_to_is_checked(shared: Path, monkeypatch: pytest.MonkeyPatch):
    own, links = shared / "own", [shared / name for name in ("first", "second")]
    for user, folder in ((VICTIM, own), (OTHER, shared / "other")):
        assert as_user(user, lambda folder=folder: folder.mkdir(0o700)) == "None"
    assert as_user(VICTIM, lambda: links[0].symlink_to("own")) == "None"
    assert as_user(VICTIM, lambda: links[1].symlink_to("own/../other")) == "None"
    assert asked(monkeypatch, **{VARIABLE: links[0] / "x"}) == str(links[0] / "x")
    assert (own / "x").stat().st_uid == VICTIM
    assert "belongs to another user" in asked(monkeypatch, **{VARIABLE: links[1]})


@as_root
def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch):
    assert "no folder is safe for compiled functions: this user has no home directory" in asked(monkeypatch)
    assert "Permission denied: '/nowhere'" in asked(monkeypatch, HOME="/nowhere")


EVIL = """
#include <fcntl.h>
__attribute__((constructor)) static void run(void) { open("%s", O_CREAT | O_WRONLY, 0666); }
"""
COMPILES = """
import torch
from rlplug.compiler.artifact import Artifact
x = torch.arange(3.0)
print(Artifact(lambda batch: batch["x"] * 2 + 1, {"x": x})({"x": x}).tolist())
"""


@pytest.mark.slow
def test_what_lies_in_the_shared_temporary_folder_is_not_loaded(shared: Path, tmp_path: Path):
    """A library of another user, under the name that torch's default and the key of the function give it."""

    def run(home: str) -> str:
        variables = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "XDG_CACHE_HOME")}
        variables |= {"HOME": str(tmp_path / home), "TMPDIR": str(shared), "USER": "victim", "LOGNAME": "victim"}
        done = subprocess.run([sys.executable, "-c", COMPILES], env=variables, capture_output=True, text=True)
        assert done.stdout == "[1.0, 3.0, 5.0]\n", done.stderr
        return done.stderr

    assert "compiling takes about ten seconds" in run("first")
    (known,) = (tmp_path / "first" / ".cache" / "rlplug" / "rlplug").glob("?" * 64)
    assert Path(known.read_text()).is_relative_to(tmp_path / "first" / ".cache" / "rlplug")
    assert "compiling" not in run("first")
    assert not [path for path in shared.rglob("*") if path.is_file()]  # no header, which is code, too

    marker, source = tmp_path / "marker", tmp_path / "evil.c"
    source.write_text(EVIL % marker)
    forged = shared / "torchinductor_victim" / "rlplug"
    forged.mkdir(parents=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", forged / "evil.so", source], check=True)
    (forged / known.name).write_text(str(forged / "evil.so"))
    assert "compiling takes about ten seconds" in run("second")
    assert not marker.exists()
