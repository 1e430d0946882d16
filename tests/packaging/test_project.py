"""The files by which others find, cite and report: they agree with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(citation["version"]), citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_classifiers_name_the_versions_of_python():
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    named = [int(n) for line in PROJECT["classifiers"] for n in re.findall(r"Python :: 3\.(\d+)", line)]
    assert named == [*range(int(low), int(high))]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_the_issue_forms_are_complete(form: Path):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(content)
    ids = [field["id"] for field in content["body"]]
    assert len(ids) == len(set(ids)) > 2
    for field in content["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]


def test_the_image_runs_as_a_user_and_copies_files_that_exist():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert int(user) > 0
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE))
    copied = [name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"conf", "rlplug", "pyproject.toml"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists() or name not in allowed] == []


def test_the_first_command_installs_what_its_line_uses():
    (extras,) = re.findall(r"-e '\.\[(.+)\]' && .venv/bin/python -m rlplug ", (ROOT / "README.md").read_text("utf-8"))
    defaults = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    loggers = next(one["logger.only"] for one in defaults if isinstance(one, dict) and "logger.only" in one)
    assert set(loggers) & set(PROJECT["optional-dependencies"]) == {*extras.split(",")}


def test_all_extras_are_in_all_or_said_not_to_be():
    extras = PROJECT["optional-dependencies"]
    (line,) = extras["all"]
    said = {"dmc", "envpool", "robotics", "docs", "dev", "all"}
    assert {*re.findall(r"\[(.+)\]", line)[0].split(",")} == extras.keys() - said
    assert extras["dev"][0] == "rlplug[all,docs]"
