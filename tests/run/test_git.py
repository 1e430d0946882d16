"""The commit of a checkout that somebody else configured: real repositories, whose programs would leave a mark."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlplug.tracking import checkout

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder outside of any checkout, and git without a user's own configuration."""
    folder = Path(tempfile.mkdtemp(dir="/tmp")).resolve()
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "x")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "x@y")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(folder / "gitconfig"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def repository(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean checkout, in a folder of which the process is."""
    path = place / "repository"
    (path / "inside").mkdir(parents=True)
    git(path, "init", "-q")
    (path / "file").write_text("one\n")
    (path / "inside" / "file").write_text("one\n")
    git(path, "add", ".")
    git(path, "commit", "-qm", "x")
    monkeypatch.chdir(path / "inside")
    return path


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda path: None, False),
        (lambda path: os.utime(path / "file", (1, 1)), False),  # git has to look into the file
        (lambda path: (path / "file").write_text("two\n"), True),
        (lambda path: (path / "file").unlink(), True),
        (lambda path: (path / "new").touch(), True),
        (lambda path: git(path, "mv", "file", "other"), True),
        (lambda path: [(path / "new").touch(), (path / ".git" / "info" / "exclude").write_text("new\n")], False),
        (lambda path: git(path, "pack-refs", "--all"), False),
        (lambda path: git(path, "checkout", "-q", "--detach"), False),
        (lambda path: git(path, "gc", "-q"), False),
    ],
)
def test_the_commit_and_whether_it_has_changes(change: Callable[[Path], object], changed: bool, repository: Path):
    commit = git(repository, "rev-parse", "HEAD")
    change(repository)
    index = (repository / ".git" / "index").read_bytes()
    assert checkout() == {"commit": commit, "changed": changed}
    assert (repository / ".git" / "index").read_bytes() == index


def test_a_second_worktree_has_its_own(repository: Path, monkeypatch: pytest.MonkeyPatch):
    git(repository, "worktree", "add", "-q", "../second")
    monkeypatch.chdir(repository.parent / "second")
    (repository.parent / "second" / "file").write_text("two\n")
    git(repository.parent / "second", "commit", "-qam", "y")
    assert checkout() == {"commit": git(repository.parent / "second", "rev-parse", "HEAD"), "changed": False}
    assert checkout()["commit"] != git(repository, "rev-parse", "HEAD")


def test_outside_of_a_repository_there_is_none(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    assert checkout() is None
    git(place, "init", "-q")  # and where nothing is committed
    assert checkout() is None
    monkeypatch.setenv("PATH", str(place))
    assert checkout() is None


def trap(repository: Path, mark: Path) -> None:
    """Have every program of a configuration that git may run leave a mark."""
    program = repository / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    hooks = repository / ".git" / "their_hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "reference-transaction", "post-checkout", "fsmonitor-watchman"):
        shutil.copy(program, hooks / hook)
        shutil.copy(program, repository / ".git" / "hooks" / hook)
    git(repository, "config", "core.hooksPath", str(hooks))
    keys = "core.fsmonitor filter.x.clean filter.x.smudge filter.x.process diff.x.textconv diff.x.command core.pager {}"
    for key in keys.format("core.sshCommand core.editor credential.helper core.alternateRefsCommand").split():
        git(repository, "config", key, str(program))
    (repository / ".git" / "info" / "attributes").write_text("* filter=x diff=x\n")
    (repository / ".gitattributes").write_text("* filter=x diff=x\n")
    os.utime(repository / "file", (1, 1))


def strangers_submodule(repository: Path, mark: Path) -> None:
    (repository / "module").mkdir()
    git(repository / "module", "init", "-q")
    (repository / "module" / "file").touch()
    git(repository / "module", "add", ".")
    git(repository / "module", "commit", "-qm", "x")
    git(repository, "add", "module")
    git(repository, "commit", "-qm", "with a module")
    trap(repository / "module", mark)


@pytest.mark.parametrize("forge", [trap, strangers_submodule])
def test_no_program_of_the_repository_is_run(forge: Callable[[Path, Path], None], repository: Path):
    mark = repository.parent / "mark"
    forge(repository, mark)
    mark.unlink(missing_ok=True)
    found = checkout()
    assert found is not None
    assert len(found["commit"]) == 40
    assert found["changed"] is (forge is trap)  # it has a new .gitattributes
    assert not mark.exists()
    subprocess.run(["git", "status"], cwd=repository, capture_output=True)
    assert mark.exists(), "the trap does not work"


def test_a_worktree_that_is_the_whole_disk_is_not_walked(repository: Path):
    git(repository, "config", "core.worktree", "/")
    begin = time.monotonic()
    assert checkout() is not None
    assert time.monotonic() - begin < 60


@as_root
@pytest.mark.parametrize("trusted", [False, True])
def test_a_repository_of_another_user_is_not_asked_or_harmless(trusted: bool, repository: Path):
    mark = repository.parent / "mark"
    commit = git(repository, "rev-parse", "HEAD")
    trap(repository, mark)
    mark.unlink(missing_ok=True)
    for path in (repository.parent, *repository.parent.rglob("*")):
        os.lchown(path, 65534, 65534)
    if trusted:
        (repository.parent / "gitconfig").write_text("[safe]\n\tdirectory = *\n")
    assert checkout() == ({"commit": commit, "changed": True} if trusted else None)
    assert not mark.exists()
