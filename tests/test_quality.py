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


@pytest.mark.parametrize(("place", "what"), [(0, "methods"), (1, "attributes")])
def test_a_class_of_the_core_has_few(place, what):
    every = [found for room in BUDGETS["core"]["rooms"] for found in ARCHITECTURE["classes"](room)]
    assert {found[2]: found[place] for found in every if found[place] > BUDGETS[what]["limit"]} == {}


def test_attributes_are_assigned_or_declared_as_fields(tmp_path, monkeypatch):
    (tmp_path / "room.py").write_text("@dataclass\nclass A:\n    x: int\n    def f(self):\n        self.y = 0\n")
    monkeypatch.setitem(ARCHITECTURE["classes"].__globals__, "CODE", tmp_path)
    assert [*ARCHITECTURE["classes"]("room")] == [(1, 2, "A")]


def test_an_algorithm_is_one_short_file():
    sizes = {path.name: lines([path]) for path in ARCHITECTURE["ALGORITHMS"]}
    budget = BUDGETS["algorithm"]
    assert {name: n for name, n in sizes.items() if n > budget["named"].get(name, budget["limit"])} == {}


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
