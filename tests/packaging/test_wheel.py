"""What a user gets: the wheels, built, installed in an empty environment, and run in an empty folder."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent.parent
BUILT_IN = ", ".join(sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml")))
SOURCES = {
    "rlplug": ROOT,
    "rlplug_reinforce": ROOT / "plugins" / "rlplug-reinforce",
    "rlplug_deepsea": ROOT / "plugins" / "rlplug-deepsea",
    "rlplug_bitflip": ROOT / "plugins" / "rlplug-bitflip",
}
VERSION = {
    name: tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"]
    for name, source in SOURCES.items()
}


def succeed(*command: str | Path, **options) -> str:
    """Run a command.

    Returns:
        What it printed on stdout.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Empty:
    """A virtual environment with nothing of this one, and an empty folder to work in."""

    home: Path

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    def install(self, *wheels: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
        succeed(*pip, *wheels, env=environment, cwd=self.home)

    def rlplug(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``python -m rlplug`` in ``work/``; of the surrounding environment it sees the search path for programs."""
        return subprocess.run(
            [str(self.python), "-m", "rlplug", *arguments],
            cwd=self.home / "work",
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
            capture_output=True,
            text=True,
        )

    def trained(self, *arguments: str) -> Path:
        """The folder of a run that finished."""
        done = self.rlplug(*arguments)
        assert done.returncode == 0, done.stderr
        folders = (self.home / "work" / "runs").glob("*/*")
        return max(folders, key=lambda folder: folder.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    for source in SOURCES.values():
        list(WheelBuilder(str(source)).build(directory=str(out), versions=["standard"]))
    return {name: next(out.glob(f"{name}-*.whl")) for name in SOURCES}


@pytest.fixture(scope="module")
def empty(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Empty]:
    """With rlplug's wheel installed."""
    environment = Empty(tmp_path_factory.mktemp("empty"))
    (environment.home / "work").mkdir()
    succeed(sys.executable, "-m", "venv", environment.home / "venv")
    environment.install(wheels["rlplug"])
    yield environment
    shutil.rmtree(environment.home)


@pytest.fixture(scope="module")
def refused(empty: Empty, wheels: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    """``algo=reinforce`` before its wheel, and that of an environment, were installed; afterwards they are."""
    done = empty.rlplug("algo=reinforce")
    empty.install(wheels["rlplug_reinforce"], wheels["rlplug_deepsea"])
    return done


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_code_and_configuration_once(wheels: dict[str, Path]):
    names = contents(wheels["rlplug"])
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {"rlplug", f"rlplug-{VERSION['rlplug']}.dist-info"}
    code = {path.relative_to(ROOT) for path in (ROOT / "rlplug").rglob("*.*") if path.suffix != ".pyc"}
    conf = {Path("rlplug") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    shipped = {Path(name) for name in names if name.startswith("rlplug/")}
    assert shipped == code | conf
    assert [name for name in names if name.endswith("/config.yaml")] == ["rlplug/conf/config.yaml"]
    assert f"rlplug-{VERSION['rlplug']}.dist-info/licenses/LICENSE" in names


def test_the_index_would_accept_them(wheels: dict[str, Path], tmp_path: Path):
    succeed(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT)
    succeed(sys.executable, "-m", "twine", "check", "--strict", *wheels.values(), *tmp_path.glob("*.tar.gz"))


@pytest.mark.parametrize("name", ["rlplug_reinforce", "rlplug_deepsea", "rlplug_bitflip"])
def test_the_plugins_wheel_holds_its_configuration_and_no_tests(name: str, wheels: dict[str, Path]):
    names = [file for file in contents(wheels[name]) if ".dist-info/" not in file]
    package = SOURCES[name] / name
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".yaml")]
    assert sorted(names) == sorted(str(path.relative_to(package.parent)) for path in files)


def test_ppo_trains_in_an_empty_folder(empty: Empty):
    folder = empty.trained(
        "algo=ppo", "env=cartpole", "tuned=none", "total_steps=4096", "log.every=1024", "eval.every=0"
    )
    assert folder.parent.name == "ppo-cartpole"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "manifest.json",
        "metrics.csv",
        "run.lock",
        "summary.json",
        "tensorboard",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert 3072 < summary["env_steps"] <= 4096
    assert summary["updates"] == 4
    assert summary["eval/return_mean"] > 0
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert int(rows[-1]["step"]) == summary["env_steps"]
    assert float(rows[-1]["eval/return_mean"]) == summary["eval/return_mean"]
    assert any(row["episode/return"] and row["train/policy"] for row in rows)
    plugins = json.loads((folder / "manifest.json").read_text())["plugins"]
    assert plugins["algo"] == {"kind": "algo", "name": "ppo", "distribution": "rlplug", "version": VERSION["rlplug"]}


def test_what_was_installed_fits_together(empty: Empty):
    assert "No broken requirements" in succeed(empty.python, "-m", "pip", "check")


def test_an_algorithm_that_is_not_installed_is_refused(refused: subprocess.CompletedProcess[str]):
    assert refused.returncode == 2
    assert refused.stderr == f"rlplug: algo: unknown option 'reinforce'; there are: {BUILT_IN}\n"


def test_an_installed_plugin_is_listed(refused: subprocess.CompletedProcess[str], empty: Empty):
    options = ", ".join(sorted([*BUILT_IN.split(", "), "reinforce"]))
    assert f"algo: {options}" in empty.rlplug("--help").stdout.splitlines()
    rows = [line.split() for line in empty.rlplug("plugins").stdout.splitlines()]
    assert ["algo", "reinforce", "rlplug-reinforce", VERSION["rlplug_reinforce"]] in rows


def test_installed_plugins_train_together(refused: subprocess.CompletedProcess[str], empty: Empty):
    words = (
        "algo=reinforce",
        "env=deepsea",
        "exploration=[counts]",
        "tuned=none",
        "total_steps=2048",
        "logger.only=[]",
    )
    folder = empty.trained(*words)
    assert folder.parent.name == "reinforce-deepsea"
    assert json.loads((folder / "summary.json").read_text())["updates"] == 4
    plugins = json.loads((folder / "manifest.json").read_text())["plugins"]
    assert plugins["algo"]["distribution"] == "rlplug-reinforce"
    assert {plugins[key]["distribution"] for key in ("env", "exploration.counts")} == {"rlplug-deepsea"}
