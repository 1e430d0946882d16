"""Old checkpoints stay readable: a real run of every past format is kept in ``fixtures/``.

They were made by ``python -m tests.checkpointing.make_fixtures``, and are never made again: who raises ``FORMAT``
says in ``MIGRATIONS`` how the older one is read, and adds fixtures of the new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import rlplug
from rlplug.checkpointing import format as form
from rlplug.checkpointing.format import FORMAT, MIGRATIONS, Checkpoint, find
from rlplug.checkpointing.serialize import encode
from rlplug.run import launch
from tests.checkpointing.make_fixtures import FIXTURES, RUNS
from tests.checkpointing.runs import copy_of
from tests.tools.fuzz import Scene

EVERY = sorted(path for path in FIXTURES.glob("format_*/*") if path.is_dir())


def title(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


def does(run: Path) -> dict[str, Any]:
    """What was written down when the fixture was made."""
    return json.loads((run / "does.json").read_text())


def test_every_format_has_fixtures_and_a_way_to_the_next():
    assert {path.parent.name for path in EVERY} == {f"format_{number}" for number in range(1, FORMAT + 1)}
    for number in range(1, FORMAT + 1):
        assert {path.name for path in EVERY if path.parent.name == f"format_{number}"} >= RUNS.keys()
    assert MIGRATIONS.keys() == {*range(1, FORMAT)}


def test_fixtures_are_small_and_of_no_machine():
    files = [path for path in FIXTURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 130_000 * FORMAT
    for path in files:
        assert b"/home/" not in path.read_bytes()
        assert b"/tmp/" not in path.read_bytes()
        assert b"/work/" not in path.read_bytes()


@pytest.mark.parametrize("fixture", EVERY, ids=title)
def test_it_is_read(fixture: Path):
    found = find(fixture)
    assert json.loads((found.path / "manifest.json").read_text())["format"] == int(fixture.parent.name.split("_")[1])
    found.verify()
    assert found.manifest["env_steps"] == does(fixture)["env_steps"]
    for name in ("weights", "learner", "rank0"):
        assert found.tree(name)
    assert found.tree("weights")["algorithm"]
    rows = [batch for chunk in found.chunks() for batch in [found.rows(chunk)]]
    assert bool(rows) == ("sac" in fixture.name)
    assert all("valid" in batch for batch in rows)


@pytest.mark.parametrize("fixture", EVERY, ids=title)
def test_its_policy_does_what_it_did(fixture: Path):
    then = does(fixture)
    action = rlplug.load(fixture).act(np.array(then["obs"], np.float32))
    np.testing.assert_allclose(action, then["action"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fixture", EVERY, ids=title)
def test_it_can_be_continued(fixture: Path, tmp_path: Path):
    run, told = copy_of(fixture, tmp_path / "run"), []
    made = does(fixture)["env_steps"]
    launch.resume(run, [f"total_steps={made + 300}"], tell=told.append)
    assert f"continuing from step {made:,}" in told
    found = find(run)
    assert json.loads((found.path / "manifest.json").read_text())["format"] == FORMAT
    assert made < found.manifest["env_steps"] <= made + 300
    assert found.manifest["updates"] > find(fixture).manifest["updates"]
    rows = [int(line.partition(",")[0]) for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    assert rows == sorted(rows)
    assert rows[-1] == found.manifest["env_steps"]


# ---- how an older format is read -------------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {new if key == old else key: value for key, value in content.items()}


def older(run: Path, first: str) -> Path:
    """A run of format 1 that has other names for three things: the weights, the episodes and its steps."""
    path = find(run).path
    scene = Scene(run, run, run, None)  # type: ignore[arg-type]
    for name, old in (("weights", "algorithm"), ("rank0", "episodes")):
        tree = renamed(old, f"{first} {old}")(Checkpoint(path).tree(name))
        scene.plant(path / f"{name}.pt", encode(tree))
    scene.forge(path, renamed("env_steps", f"{first} env_steps"))
    return path


def step(before: str, after: str) -> dict[str, Callable[[Any], Any]]:
    """From one format to the next."""
    names = {"manifest": "env_steps", "weights": "algorithm", "rank": "episodes"}
    return {tree: renamed(f"{before} {old}".strip(), f"{after} {old}".strip()) for tree, old in names.items()}


@pytest.mark.parametrize(
    "steps", [{1: step("my", "")}, {1: step("my", "your"), 2: step("your", "")}], ids=["one step", "two steps"]
)
@pytest.mark.parametrize("name", RUNS)
def test_a_migration(steps: dict[int, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fixture, newest = FIXTURES / "format_1" / name, max(steps) + 1
    if FORMAT > 1:
        pytest.skip("the names that are moved here are those of format 1; real migrations are tested above")
    run = copy_of(fixture, tmp_path / "run")
    path = older(run, "my")
    with pytest.raises(rlplug.ConfigError, match="env_steps is missing"):
        find(run)
    monkeypatch.setattr(form, "FORMAT", newest)
    monkeypatch.setattr(form, "MIGRATIONS", steps)
    found = find(run)
    assert found.path == path
    assert found.manifest["env_steps"] == does(fixture)["env_steps"]
    assert found.tree("weights")["algorithm"].keys() == Checkpoint(path).tree("weights")["algorithm"].keys()
    then = does(fixture)
    np.testing.assert_allclose(rlplug.load(run).act(np.array(then["obs"], np.float32)), then["action"], rtol=1e-4)
    launch.resume(run, [f"total_steps={then['env_steps'] + 300}"], tell=lambda _: None)
    newer = find(run).path
    assert newer != path
    assert json.loads((newer / "manifest.json").read_text())["format"] == newest
    monkeypatch.undo()
    with pytest.raises(rlplug.ConfigError, match=f"in format {newest}; this one reads formats up to 1: upgrade rlplug"):
        Checkpoint(newer)


@pytest.mark.parametrize("name", RUNS)
def test_rows_migrate_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setattr(form, "FORMAT", FORMAT + 1)
    kinds = ("weights", "learner", "rank", "rows", "manifest")
    watch = {kind: lambda content, kind=kind: seen.append(kind) or content for kind in kinds}
    monkeypatch.setattr(form, "MIGRATIONS", {**MIGRATIONS, FORMAT: watch})
    found = find(FIXTURES / f"format_{FORMAT}" / name)
    for tree in ("weights", "learner", "rank0"):
        found.tree(tree)
    for chunk in found.chunks():
        found.rows(chunk)
    assert seen == ["manifest", "weights", "learner", "rank", *["rows"] * len(found.chunks())]


def test_a_run_from_before_an_option_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = copy_of(FIXTURES / f"format_{FORMAT}" / "ppo_cartpole", tmp_path / "run")
    steps = does(run)["env_steps"]

    def without(raw: dict[str, Any]) -> dict[str, Any]:
        algo = {key: value for key, value in raw["algo"].items() if key != "gamma"}
        return {key: value for key, value in raw.items() if key != "on_nan"} | {"algo": algo}

    raw = without(yaml.safe_load((run / "config.yaml").read_text()))
    (run / "config.yaml").write_text(yaml.safe_dump(raw))
    scene = Scene(run, run, run, None)  # type: ignore[arg-type]
    scene.forge(find(run).path, lambda manifest: manifest | {"config": without(manifest["config"])})
    with pytest.raises(rlplug.ConfigError, match=r"on_nan: is missing\nalgo.gamma: is missing"):
        launch.resume(run, [f"total_steps={steps + 300}"])

    def grown(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"on_nan": "stop", "algo": raw["algo"] | {"gamma": 0.99}}

    monkeypatch.setattr(form, "FORMAT", FORMAT + 1)
    monkeypatch.setattr(form, "MIGRATIONS", {**MIGRATIONS, FORMAT: {"config": grown}})
    assert rlplug.load(run).act(np.zeros(4, np.float32)) in (0, 1)
    launch.resume(run, [f"total_steps={steps + 300}"], tell=lambda _: None)
    assert find(run).manifest["env_steps"] > steps
    assert yaml.safe_load((run / "config.yaml").read_text())["on_nan"] == "stop"
    monkeypatch.undo()
    with pytest.raises(rlplug.ConfigError, match=f"in format {FORMAT + 1}: upgrade rlplug"):
        launch.resume(run, [f"total_steps={steps + 600}"])
