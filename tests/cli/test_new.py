"""``rlplug new``: packages of new components are written, installed, checked by the kit, and trained."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import rlplug
from rlplug.cli import main
from rlplug.cli.new import TEMPLATES, class_name, rendered
from rlplug.registry import KINDS
from rlplug.testing import conformance
from tests.installing import Install, install_project, manifest

SHORT = ["total_steps=512", "eval.episodes=1", "eval.every=0"]


@pytest.fixture(autouse=True)
def work(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "work").mkdir()
    monkeypatch.chdir(here / "work")


def new(kind: str) -> Path:
    assert main(["new", kind, f"my_{kind}"]) == 0
    return Path(f"rlplug-my-{kind}")


# ---- what is written -------------------------------------------------------------------------------------------------


def test_there_is_a_template_for_every_kind():
    assert {path.name for path in TEMPLATES.iterdir()} == {"common", *KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_to_fill_in(kind):
    files = rendered(kind, "my_own")
    assert not [path for path, text in files.items() if "{{" in path + text]
    for path, text in files.items():
        if path.endswith(".py"):
            ast.parse(text, path)
        elif path.endswith(".yaml"):
            assert yaml.safe_load(text)
    assert f"class MyOwn{'' if kind in ('env', 'logger') else '('}" in files[f"rlplug_my_own/{kind}.py"]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert (project["name"], project["entry-points"]) == ("rlplug-my-own", {"rlplug": {"my_own": "rlplug_my_own"}})
    assert "readme" not in project
    assert [class_name(name) for name in ("sac", "my_algo", "td3_bc")] == ["Sac", "MyAlgo", "Td3Bc"]


def test_the_code_has_the_style_of_ruff():
    for kind in KINDS:
        new(kind)
    rules = ["--select", "E,F,I,UP,B,SIM,RUF,PT,C4,RET,PIE,N,TID"]
    for command in (["check", *rules], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# ---- what is refused -------------------------------------------------------------------------------------------------

NO_NAME = "not a name: use up to 40 lowercase letters, digits and _"
TAKEN = (("algo", "sac"), ("env", "pendulum"))
USAGE = "new takes a kind and a name, as in `rlplug new algo mine`; see rlplug new --help"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((words, USAGE) for words in ("", "algo", "algo mine more", "algo name=mine")),
        ("algos mine", "unknown kind 'algos'; did you mean algo? There are: algo, buffer, curriculum, env, "),
        *((f"algo {name}", f"{name!r} is {NO_NAME}") for name in ("my-algo", "MyAlgo", "../x", "3", "a" * 300)),
        ("algo my-algo", f"'my-algo' is {NO_NAME}, as in my_algo"),
        *((f"algo {word}", f"'{word}' has another meaning in Python or YAML") for word in ("lambda", "off", "none")),
        *((f"{kind} {name}", f"{kind} '{name}' is taken by rlplug 0.1.0") for kind, name in TAKEN),
        ("env box", "'box' needs a class Box, which it imports; choose another name"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["new", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"rlplug: {message}")
    assert list(Path().iterdir()) == []


def test_the_name_of_another_package_is_refused(install: Install, capsys: pytest.CaptureFixture[str]):
    install("rlplug-moon", "rlplug_moon", {"rlplug_moon/__init__.py": manifest(("env", "moon", "rlplug_moon:Moon"))})
    assert main(["new", "env", "moon"]) == 2
    assert main(["new", "algo", "moon"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rlplug: env 'moon' is taken by rlplug-moon 1.2; choose another name",
        "rlplug: a package rlplug_moon is installed already (rlplug-moon 1.2); choose another name",
    ]
    assert list(Path().iterdir()) == []


def test_a_folder_that_is_there_stays_as_it_is(capsys: pytest.CaptureFixture[str]):
    Path("rlplug-mine").mkdir()
    assert main(["new", "algo", "mine"]) == 2
    assert capsys.readouterr().err.startswith(f"rlplug: {Path('rlplug-mine').absolute()} exists; choose another name")
    assert list(Path().rglob("*")) == [Path("rlplug-mine")]


def test_a_place_that_takes_no_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir("/proc")  # nobody can make a folder there, whoever runs the tests
    assert main(["new", "algo", "mine"]) == 2
    assert capsys.readouterr().err.startswith("rlplug: /proc/rlplug-mine cannot be written: ")


# ---- that it runs ----------------------------------------------------------------------------------------------------


def test_all_kinds_in_one_environment(site: Path, capsys: pytest.CaptureFixture[str]):
    """Installed from their wheels, they are listed, the lines that were printed are right, and they train."""
    lines = list[list[str]]()
    for kind in KINDS:
        install_project(site, new(kind))
        told = [line.partition("#")[0].strip() for line in capsys.readouterr().out.splitlines() if "#" in line]
        assert told[0] == f"pip install -e 'rlplug-my-{kind}[test]'"
        assert told[-1] == f"python -m pytest rlplug-my-{kind}"
        listing, check, train = (shlex.split(line)[3:] for line in told[1:-1])
        assert (listing, check) == (["plugins", kind, f"my_{kind}"], ["check", *train])
        lines += [listing, train]
    assert main(["plugins"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for kind in KINDS:
        assert [kind, f"my_{kind}", f"rlplug-my-{kind}", "0.1.0"] in rows
    for arguments in lines:
        if arguments[0] == "plugins":
            assert main(arguments) == 0
        else:
            rlplug.compose(arguments)
    together = ["algo=my_algo", "env=my_env", "model=my_model", "loop=my_loop", "hardware=my_hardware"]
    assert rlplug.train([*together, "logger.only=[my_logger]", *SHORT, "hydra.run.dir=run"]) >= 0
    assert Path("run/my_logger.jsonl").stat().st_size > 0
    drawn = ["algo=dqn", "buffer=my_buffer", "exploration=[my_exploration]", "env=cartpole", "logger.only=[]"]
    assert rlplug.train([*drawn, *SHORT, "num_steps_sampled_before_learning_starts=480", "hydra.run.dir=drawn"]) > 0


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [(("algo",), "not conformance or learns or resumes"), pytest.param(KINDS, "test", marks=pytest.mark.slow)],
)
def test_their_own_tests_pass(kinds: tuple[str, ...], chosen: str, site: Path):
    """Those of the component and those of the kit, by the line that was printed."""
    folders = [new(kind) for kind in kinds]
    for folder in folders:
        install_project(site, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([*command, *folders], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout  # as the kit is where it finds no component
    found = sum(int(number) for number in re.findall(r"(\d+) (?:passed|deselected)", done.stdout))
    assert found > sum(len(conformance.checks(folder.name)) for folder in folders) > len(folders)
