"""Style, spelling, types and the dependency rule: every hook of .pre-commit-config.yaml passes on the whole tree."""

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
HOOKS = {
    hook["id"]: shlex.split(hook["entry"])
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hook(hook):
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ.get("PATH", "")])
    done = subprocess.run(
        HOOKS[hook],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{shlex.join(HOOKS[hook])}\n{done.stdout}"


ARCHITECTURE = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
"""the drawing of the house reads the same budgets, and counts the same lines"""
BUDGETS, files, lines = (ARCHITECTURE[name] for name in ("BUDGETS", "files", "lines"))


@pytest.mark.parametrize("what", [name for name in BUDGETS if "rooms" in BUDGETS[name]])
def test_rooms_keep_within_their_budget(what):
    assert sum(lines(files(room)) for room in BUDGETS[what]["rooms"]) <= BUDGETS[what]["limit"]


def test_a_class_of_the_core_has_few_methods():
    counts = {name: methods for room in BUDGETS["core"]["rooms"] for methods, _, name in ARCHITECTURE["classes"](room)}
    assert {name: n for name, n in counts.items() if n > BUDGETS["methods"]["limit"]} == {}


def test_an_algorithm_is_one_short_file():
    sizes = {path.name: lines([path]) for path in ARCHITECTURE["ALGORITHMS"]}
    assert {name: n for name, n in sizes.items() if n > BUDGETS["algorithm"]["limit"]} == {}


def test_lines_of_code_are_counted_without_what_explains_them():
    text = '''"""A docstring
    of two lines."""

# a comment
x = """text
that counts"""  # as it is a value


def f():
    """Return."""
    return (
        x
    )
'''
    assert ARCHITECTURE["code_lines"](text) == 2 + 1 + 3


def test_no_module_is_long():
    modules = {str(file.relative_to(ROOT / "rlplug")): file for file in (ROOT / "rlplug").rglob("*.py")}
    assert [name for name, file in modules.items() if lines([file]) > 300] == []
