"""The packages that show how plugins are written: laid out as ``new`` does it, in its style, and sound."""

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlplug.cli.new import rendered
from rlplug.registry import Component
from tests.installing import install_project

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("rlplug-*"))
PACKAGES = [*sorted((ROOT / "plugins").glob("rlplug-*")), *EXAMPLES]
STYLE = ["--select", "E,F,I,UP,B,SIM,RUF,PT,C4,RET,PIE,N,TID", "--ignore", "RUF002,RUF003"]

each = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def components(package: Path) -> list[Component]:
    """What its manifest registers; the first has the name of the package."""
    module = package.name.replace("-", "_")
    return runpy.run_path(str(package / module / "__init__.py"))["rlplug_components"]()


def test_there_is_one_for_each_kind_that_most_authors_write():
    kinds = {component.kind for package in PACKAGES for component in components(package)}
    assert kinds == {"algo", "buffer", "env", "exploration", "logger", "loop"}


@each
def test_it_has_what_new_writes(package: Path):
    module, (first, *others) = package.name.replace("-", "_"), components(package)
    assert package.name == f"rlplug-{first.name}"
    files = rendered(first.kind, first.name)
    wanted = {path for path in files if "/conf/tuned/" not in path}
    for other in others:
        own = (f"{module}/{other.kind}.py", f"{module}/conf/{other.kind}/{other.name}.yaml")
        wanted |= {*own}
    assert sorted(path for path in wanted if not (package / path).is_file()) == []
    if first.kind in ("algo", "env"):
        assert list((package / module / "conf" / "tuned").glob(f"*{first.name}*.yaml"))
    for path in (".gitignore", f"tests/test_{first.name}_conformance.py"):
        assert (package / path).read_text() == files[path]
    mine, scaffold = tomllib.loads((package / "pyproject.toml").read_text()), tomllib.loads(files["pyproject.toml"])
    del scaffold["project"]["description"]
    given = {key: mine["project"][key] for key in scaffold["project"]}
    given["dependencies"] = [name for name in given["dependencies"] if name in scaffold["project"]["dependencies"]]
    assert scaffold == mine | {"project": given}
    assert (package / "README.md").is_file()


def test_they_have_the_style_of_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *STYLE, *PACKAGES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("not conformance or streams or learns or ramp-run", id="quick"),  # a kit check of each kind
        pytest.param("test", marks=pytest.mark.slow, id="all"),
    ],
)
def test_the_examples_pass_their_own_tests(chosen: str, site: Path):
    """Installed from their wheels, in one process: the conformance kit, equations, and short runs."""
    for package in EXAMPLES:
        install_project(site, package, site.parent)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *EXAMPLES]
    if chosen == "test":
        command += ["-m", "slow or not slow"]
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
