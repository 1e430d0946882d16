"""Bad checkpoints and run folders on the command line: one clear error, and the last good checkpoint stays."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rlplug
from rlplug.checkpointing.format import FORMAT, checkpoints, find, folder_of
from rlplug.cli import main
from rlplug.run import launch
from tests.checkpointing.runs import OVERRIDES, copy_of, fingerprint, steps, trained
from tests.installing import Install, install, manifest, site  # noqa: F401  fixtures
from tests.tools.damage import Scene

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def sac(sac_run: Path, tmp_path: Path) -> Path:
    return copy_of(sac_run, tmp_path / "run")


@pytest.fixture
def ppo(ppo_run: Path, tmp_path: Path) -> Path:
    return copy_of(ppo_run, tmp_path / "ppo")


def said(capsys: Capture, *arguments: Any, code: int) -> list[str]:
    """What a command line prints to stderr, without its name in front."""
    assert main([str(argument) for argument in arguments]) == code
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert "Traceback" not in printed.err
    assert all(line.startswith("rlplug: ") for line in lines)
    return [line.removeprefix("rlplug: ") for line in lines]


def refused(capsys: Capture, run: Path, *arguments: Any) -> str:
    """The one message of a refusal, which alters nothing in the run folder."""
    before = fingerprint(run)
    (message,) = said(capsys, *arguments, code=2)
    assert fingerprint(run) == before
    return message


def goes_on(capsys: Capture, run: Path, *overrides: str) -> list[str]:
    """What a resume says that works; the run has finished, and its last checkpoint is good."""
    lines = said(capsys, "resume", run, *overrides, code=0)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    find(run)
    return lines


LONGER = "total_steps=220"

# ---- one checkpoint that is not what it should be --------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def newer(folder: Path) -> None:
    Scene(folder, folder, folder, None).forge(folder, lambda manifest: manifest.update(format=99))  # type: ignore[arg-type]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: cut(path / "weights.pt"), "is damaged or was altered: weights.pt: it has"),
    "altered": (lambda path: flip(path / "rank0.pt"), "altered: rank0.pt: its checksum does not match"),
    "without a file": (lambda path: (path / "learner.pt").unlink(), "altered: learner.pt: No such file or directory"),
    "with an altered manifest": (lambda path: flip(path / "manifest.json"), "altered: manifest.json: it"),
    "newer": (newer, f"by a newer rlplug, in format 99; this one reads format {FORMAT}: upgrade rlplug"),
    "foreign": (
        lambda path: (path / "manifest.json").write_text('{"name": "a web app"}'),
        "is not a run or checkpoint of rlplug: manifest.json: it has no format number",
    ),
    "empty": (
        lambda path: [file.unlink() for file in path.iterdir()],
        "is not a run or checkpoint of rlplug: manifest.json: No such file or directory",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_the_newest_is_damaged_so_the_one_before_is_used(how: str, sac: Path, capsys: Capture):
    newest, before, *_ = steps(sac)
    damage, why = DAMAGE[how]
    damage(newest)
    lines = goes_on(capsys, sac, LONGER)
    assert lines[0].startswith(str(newest))
    assert why in lines[0]
    assert lines[0].endswith("; trying the previous one")
    assert f"continuing from step {int(before.name[5:])}" in lines
    assert newest.with_name(newest.name + ".damaged").is_dir()
    rows = (sac / "metrics.csv").read_text().splitlines()[1:]
    made = [int(row.partition(",")[0]) for row in rows]
    assert made == [*range(40, 201, 40), 220, 220]


@pytest.mark.parametrize("how", ["newer", "foreign"])
def test_a_damaged_checkpoint_by_its_path(how: str, sac: Path, capsys: Capture):
    damage, why = DAMAGE[how]
    damage(newest := steps(sac)[0])
    message = refused(capsys, sac, "evaluate", newest)
    assert message.startswith(str(newest))
    assert why in message


def test_all_are_damaged(sac: Path, capsys: Capture):
    damaged = steps(sac)
    for path, how in zip(damaged, ("truncated", "newer", "foreign", "altered"), strict=True):
        DAMAGE[how][0](path)
    before = fingerprint(sac)
    lines = said(capsys, "resume", sac, LONGER, code=2)
    *tried, head = lines[:5]
    assert [line.partition(" ")[0] for line in tried] == [str(path) for path in damaged]
    assert head == f"{sac} holds no good checkpoint:"
    assert lines[5:] == [line.removesuffix("; trying the previous one") for line in tried]
    assert fingerprint(sac) == before


def test_code_in_a_file_is_not_run(sac: Path, tmp_path: Path, capsys: Capture):
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "marker"),)

    torch.save({"algorithm": Planted()}, tmp_path / "evil.pt")
    newest = steps(sac)[0]
    Scene(sac, sac, sac, None).plant(newest / "weights.pt", (tmp_path / "evil.pt").read_bytes())  # type: ignore[arg-type]
    why = f"{newest} is damaged or was altered: weights.pt: it is not a tree of plain values and tensors"
    assert refused(capsys, sac, "evaluate", newest) == why
    assert goes_on(capsys, sac, LONGER)[0] == f"{why}; trying the previous one"
    assert not (tmp_path / "marker").exists()


# ---- a checkpoint of something else ----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["the same", "another"])
def test_a_checkpoint_of_another_run(algorithm: str, sac: Path, ppo: Path, tmp_path: Path, capsys: Capture):
    other = trained("sac", tmp_path / "other", ["seed=7", "total_steps=240"]) if algorithm == "the same" else ppo
    foreign = sac / "checkpoints" / steps(other)[0].name
    assert foreign > steps(sac)[0], "it would not be the newest"
    shutil.copytree(steps(other)[0], foreign)
    message = refused(capsys, sac, "resume", sac, "total_steps=300")
    assert message == f"{foreign} is a checkpoint of another run"
    shutil.rmtree(foreign)
    goes_on(capsys, sac, LONGER)


def test_a_checkpoint_under_another_name(sac: Path, capsys: Capture):
    steps(sac)[0].rename(folder_of(sac, 900))
    lines = goes_on(capsys, sac, LONGER)
    assert lines[0] == f"{folder_of(sac, 900)} was renamed: it is of step 200; trying the previous one"
    assert "continuing from step 150" in lines
    assert folder_of(sac, 900).with_name("step_000000000900.damaged").is_dir()


OTHERS = {  # another run, by overrides; whether its configuration is forged, too; and what is said
    "an algorithm": (None, False, "it changes what is learned"),
    "spaces": (None, True, "{} is of another environment: the observation space was Box("),
    "a network": (
        ["model.hidden=[9]", "total_steps=60"],
        True,
        "{} does not fit what is installed and configured now: ",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_thing_under_the_runs_own_name(what: str, sac: Path, ppo: Path, tmp_path: Path, capsys: Capture):
    overrides, config, why = OTHERS[what]
    other = ppo if overrides is None else trained("sac", tmp_path / "other", overrides)
    mine, foreign = find(sac).manifest, folder_of(sac, 900)
    shutil.copytree(steps(other)[0], foreign)

    def change(manifest: dict[str, Any]) -> None:
        manifest |= {"run": mine["run"], "env_steps": 900} | ({"config": mine["config"]} if config else {})

    Scene(sac, sac, sac, None).forge(foreign, change)  # type: ignore[arg-type]
    assert why.format(foreign) in refused(capsys, sac, "resume", sac, "total_steps=1000")


# ---- a path that leads to something else -----------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with things that are no run, and no checkpoint."""
    folder = tmp_path / "foreign"
    for name, text in {"app": "{}", "broken": "{"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text(text)
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("x")
    with zipfile.ZipFile(folder / "sb3.zip", "w") as file:  # as Stable-Baselines3 saves a model
        for name in ("data", "pytorch_variables.pth", "policy.pth", "_stable_baselines3_version"):
            file.writestr(name, "2.7.0")
    return folder


@pytest.mark.parametrize("verb", ["resume", "evaluate"])
@pytest.mark.parametrize("name", ["empty", "notes.txt", "app", "broken", "sb3.zip", "nowhere"])
def test_a_path_that_leads_to_something_else(verb: str, name: str, foreign: Path, capsys: Capture):
    message = refused(capsys, foreign, verb, foreign / name)
    assert message.startswith(str(foreign / name))
    if name == "nowhere":
        assert message == f"{foreign / name} does not exist"
    elif verb == "resume":
        assert re.search("no run|cannot be read|is a file, not a run folder", message)
    else:
        assert re.search("holds no run|is not a run|is damaged or was altered|is a file, not a run folder", message)


def test_resume_of_a_checkpoint_folder(sac: Path, capsys: Capture):
    assert "is a checkpoint; resume needs the run folder" in refused(capsys, sac, "resume", steps(sac)[0])


# ---- what resume is asked for ----------------------------------------------------------------------------------------


def test_resume_without_a_folder(capsys: Capture):
    (line,) = said(capsys, "resume", "total_steps=9", code=2)
    assert line.startswith("resume takes a run folder, then settings written key=value")


FORBIDDEN = {  # the other words are in tests/config/test_overrides.py
    "algo.gamma=0.5": "algo.gamma: cannot be changed: it changes what is learned; a resumed run keeps its settings",
    "total_steps=150": "total_steps: 150 is less than the 200 steps that the run has made already",
    "total_steps=-1": "total_steps: -1 is ",
    "checkpoint.every=soon": "checkpoint.every: 'soon' has the wrong type: should be steps, or minutes",
    "hardware=1gpu": "hardware: needs a CUDA device",
    "--multirun": "unknown flag --multirun",
    "300": "cannot read '300': write key=value",
}


@pytest.mark.parametrize("argument", FORBIDDEN)
def test_what_a_resume_may_not_change(argument: str, sac: Path, capsys: Capture):
    others = [] if argument.startswith("total_steps") else [LONGER]
    assert refused(capsys, sac, "resume", sac, *others, argument).startswith(FORBIDDEN[argument])


def test_a_run_that_has_finished(sac: Path, capsys: Capture):
    before = fingerprint(sac)
    (line,) = said(capsys, "resume", sac, code=0)
    assert line.startswith(f"{sac} has finished: 200 steps, evaluation -")
    assert line.endswith(". To continue, raise total_steps above 200")
    assert fingerprint(sac) == before


def test_a_configuration_that_was_edited(sac: Path, capsys: Capture):
    text = (sac / "config.yaml").read_text()
    (sac / "config.yaml").write_text(text.replace("  gamma: 0.99", "  gamma: 0.5"))
    message = refused(capsys, sac, "resume", sac, LONGER)
    assert message.startswith("algo.gamma: was 0.99, and is 0.5 in config.yaml now, but it changes what is learned")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("config.yaml", text) for text in ("a: [", "", "- a", "[" * 5000)),
        *(("manifest.json", text) for text in ("{", "[]", "[" * 100_000)),
        ("manifest.json", '{"run": 3, "plugins": {}}'),
        ("manifest.json", '{"run": "x", "plugins": {"algo": 3}, "resumed": []}'),
        ("manifest.json", '{"run": "x", "plugins": {}, "resumed": 3}'),
        ("manifest.json", '{"format": 1, "run": "x", "plugins": {}, "versions": {}, "resumed": [{"changed": 3}]}'),
    ],
    ids=lambda value: value[:40],
)
def test_a_run_whose_own_files_are_damaged(name: str, text: str, sac: Path, capsys: Capture):
    (sac / name).write_text(text)
    assert refused(capsys, sac, "resume", sac, LONGER).startswith(str(sac))


def test_a_configuration_that_lacks_a_key(sac: Path, capsys: Capture):
    raw = yaml.safe_load((sac / "config.yaml").read_text())
    del raw["total_steps"]
    (sac / "config.yaml").write_text(yaml.safe_dump(raw))
    assert refused(capsys, sac, "resume", sac) == "total_steps: is missing"


@pytest.mark.parametrize("how", ["bytes", "long", "folder"])
def test_metrics_that_are_damaged(how: str, sac: Path, capsys: Capture):
    path = sac / "metrics.csv"
    if how == "folder":
        path.unlink()
        path.mkdir()
        assert main(["resume", str(sac), LONGER]) in (1, 2)
        assert str(path) in capsys.readouterr().err
        return
    path.write_bytes(path.read_bytes() + (b"\xff\x00,\n" if how == "bytes" else b"x" * 200_000 + b"\n"))
    goes_on(capsys, sac, LONGER)


# ---- a folder that cannot be written ---------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Where permissions do not bind (root), a bind mount of the folder onto itself does."""
    before = folder.stat().st_mode
    folder.chmod(0o555)
    try:
        if os.geteuid() == 0:
            for options in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
                if (done := subprocess.run(["mount", *options], capture_output=True, text=True)).returncode:
                    pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True)
        folder.chmod(before)


def test_a_read_only_run_folder(sac: Path, capsys: Capture):
    with read_only(sac):
        message = refused(capsys, sac, "resume", sac, LONGER)
        assert message.startswith(f"{sac} cannot be written: ")
        assert main(["evaluate", str(sac), "eval.episodes=1"]) == 0, "which needs no writing"
        capsys.readouterr()
    goes_on(capsys, sac, LONGER)


def test_training_into_a_read_only_folder(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with read_only(tmp_path / "there"):
        (line,) = said(capsys, *OVERRIDES["ppo"], f"hydra.run.dir={tmp_path / 'there'}", code=2)
        assert line.startswith(f"hydra.run.dir: {tmp_path / 'there'} cannot be written: ")
        (line,) = said(capsys, *OVERRIDES["ppo"], f"hydra.run.dir={tmp_path / 'there' / 'run'}", code=2)
        assert line.startswith(f"hydra.run.dir: {tmp_path / 'there' / 'run'} cannot be made: ")


# ---- two processes ---------------------------------------------------------------------------------------------------


def started(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlplug", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)


@contextmanager
def writing(run: Path, *arguments: Any) -> Iterator[None]:
    """A process that writes into a new folder all the while."""
    process = started(*arguments)
    try:
        deadline = time.monotonic() + 120
        while not (run / "manifest.json").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_two_processes_that_train(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    line = [*OVERRIDES["ppo"], "total_steps=100000000", f"hydra.run.dir={run}"]
    with writing(run, *line):
        (message,) = said(capsys, *line, code=2)
        assert message == f"hydra.run.dir: {run} already contains a run; choose another folder, or resume it"
        (message,) = said(capsys, "resume", run, code=2)
        assert message.startswith(f"{run} is being written by process ")
    told: list[str] = []
    last = find(run).manifest["env_steps"] if checkpoints(run) else 0
    launch.resume(run, [f"total_steps={last + 128}"], tell=told.append)
    assert any("continuing from" in line for line in told)


def test_two_processes_that_resume_at_once(sac: Path):
    both = [started("resume", sac, LONGER) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 2], [0, 0]), errors  # the second may come when the first has finished
    assert sum("continuing from step 200" in error for error in errors) == 1
    find(sac)
    rows = (sac / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.partition(",")[0]) for row in rows] == [*range(40, 201, 40), 220, 220]


# ---- a plugin that is gone -------------------------------------------------------------------------------------------

LOGGER = """
from rlplug import hookimpl
from rlplug.settings import settings

class Gone:
    @settings
    class Config:
        pass

    def __init__(self, cfg, ctx):
        pass

    @hookimpl
    def rlplug_started(self, run):
        pass
"""


def test_a_logger_that_is_no_longer_installed_can_be_left_out(
    site: Path,  # noqa: F811
    install: Install,  # noqa: F811
    tmp_path: Path,
    capsys: Capture,
):
    """The words for other components are in ``tests/registry/test_installed.py``."""
    files = {
        "rlplug_gone/__init__.py": manifest(("logger", "gone", "rlplug_gone.logger:Gone"), conf="rlplug_gone.conf"),
        "rlplug_gone/logger.py": LOGGER,
        "rlplug_gone/conf/logger/gone.yaml": "# @package logger.gone\nname: gone\n",
    }
    install("rlplug-gone", "rlplug_gone", files, version="3.1")
    run = trained("ppo", tmp_path / "run", ["logger.only=[gone]", "total_steps=128"])
    shutil.rmtree(site)
    site.mkdir()
    rlplug.registry.refresh()
    message = refused(capsys, run, "resume", run, "total_steps=192")
    assert message.startswith("logger.gone: the run used logger 'gone' of rlplug-gone 3.1, which is not installed")
    lines = goes_on(capsys, run, "logger.only=[]", "total_steps=192")
    assert lines[:2] == ["total_steps: 128 -> 192", "- logger.gone"]
