"""What a user gets: the wheels, built, installed in an empty environment, and run in an empty folder."""

import csv
import email
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


SLIM = "logger.only=[progress]"  # the default loggers without TensorBoard, which is an extra


def succeed(*command: str | Path, **options) -> str:
    """Run a command.

    Returns:
        What it printed on stdout.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def requirements(wheel: Path) -> list[Requirement]:
    """Return what a wheel says it needs, without extras."""
    (metadata,) = [name for name in contents(wheel) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        said = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    found = map(Requirement, said)
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def required(words: set[str]) -> list[Distribution]:
    """Return the distributions of this environment that requirements name, and those that these require in turn."""
    found, left = dict[str, Distribution](), [Requirement(word) for word in words if not word.startswith("rlplug")]
    seen = set[str]()
    while left:
        one = left.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        there = found[canonicalize_name(one.name)] = distribution(one.name)
        assert there.version in one.specifier, one
        for further in map(Requirement, there.requires or []):
            if further.marker is None or any(further.marker.evaluate({"extra": x}) for x in ("", *one.extras)):
                left.append(further)
    return [*found.values()]


def link(one: Distribution, site: Path) -> None:
    """Link the packages of a distribution into a folder; of a namespace that several share, its parts."""
    for file in one.files or []:
        top, *rest = file.parts
        if top in ("..", "__pycache__"):
            continue
        source = Path(str(one.locate_file(top)))
        shared = source.is_dir() and not (source / "__init__.py").exists() and "." not in top
        name = Path(top, rest[0]) if shared else Path(top)
        (site / name).parent.mkdir(exist_ok=True)
        if not os.path.lexists(site / name):
            (site / name).symlink_to(str(one.locate_file(str(name))))


@dataclass
class Empty:
    """A virtual environment with nothing of this one that is not required, and an empty folder to work in."""

    home: Path

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    def install(self, *wheels: Path) -> None:
        """Install wheels; what they require is linked, as unpacking a gigabyte again takes a minute."""
        (site,) = self.home.glob("venv/lib/python*/site-packages")
        for one in required({str(parsed) for wheel in wheels for parsed in requirements(wheel)}):
            link(one, site)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--no-index")
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
        "algo=ppo", "env=cartpole", "tuned=none", "total_steps=4096", "log.every=1024", "eval.every=0", SLIM
    )
    assert folder.parent.name == "ppo-cartpole"
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "manifest.json",
        "metrics.csv",
        "run.lock",
        "summary.json",
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


def test_what_is_not_installed_is_named_with_its_extra_before_work_starts(empty: Empty):
    lines = {
        "algo=ppo": "logger.tensorboard.name: needs the package tensorboard, which is not installed",
        f"algo=ppo {SLIM} logger=[wandb]": "logger.wandb.name: needs the package wandb, which is not installed",
        f"algo=ppo {SLIM} num_envs=2 hardware=2cpu hardware.devices=1 hardware.actors.count=2": (
            "hardware.actors.count: Ray, which starts the processes, is not installed"
        ),
        "-m sweeper=optuna algo.gamma=0.9,0.99": "sweeper: 'optuna' is not installed (No module named 'optuna')",
    }
    extras = ("tensorboard", "wandb", "ray", "optuna")
    code = "import sys; from rlplug.cli import main; print([main(line.split()) for line in sys.argv[1:]])"
    done = subprocess.run([empty.python, "-c", code, *lines], cwd=empty.home / "work", capture_output=True, text=True)
    assert done.stdout == f"{[2] * len(lines)}\n"
    said = [
        f"rlplug: {line}: pip install 'rlplug[{extra}]'" for line, extra in zip(lines.values(), extras, strict=True)
    ]
    assert done.stderr.splitlines() == said
    assert not list((empty.home / "work").glob("runs/multirun/*"))


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
