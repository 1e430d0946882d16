"""What is read after an upgrade: other formats are refused, and a component migrates its own settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlplug.agent import load
from rlplug.checkpointing.format import FORMAT, Checkpoint, find
from rlplug.config import compose, migrate, parse
from rlplug.results.evaluate import evaluate
from rlplug.run import launch
from rlplug.testing.comparing import differences_of_runs
from rlplug.types import ConfigError
from tests.checkpointing.runs import OVERRIDES, copy_of, punctual
from tests.installing import Install, install, manifest, site  # noqa: F401  fixtures
from tests.tools.damage import Scene

# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (FORMAT + 1, f"was written by a newer rlplug, in format {FORMAT + 1}; this one reads format 1: upgrade rlplug"),
        *((value, "is damaged or was altered: manifest.json: it has no valid format") for value in (0, True, "1")),
    ],
)
def test_another_format_is_refused(number: Any, why: str, sac_run: Path, tmp_path: Path):
    run = copy_of(sac_run, tmp_path / "run")
    path = find(run).path
    Scene(run, run, run, None).forge(path, lambda manifest: manifest | {"format": number})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        Checkpoint(path)
    assert str(refused.value) == f"{path} {why}"
    (run / "manifest.json").write_text(json.dumps(json.loads((run / "manifest.json").read_text()) | {"format": number}))
    with pytest.raises(ConfigError) as refused:
        launch.resume(run, ["total_steps=220"])
    assert str(refused.value) == f"{run} {why}"


# ---- settings --------------------------------------------------------------------------------------------------------

COMPONENTS = [("model", "outer", "{}:Outer"), ("model", "inner", "{}:Inner"), ("logger", "note", "{}:Note")]
PLUGIN = """
from rlplug.api import Model
from rlplug.nn import MLP, Flatten
from rlplug.settings import ModelNode, PositiveInt, option, settings

class Outer(Model):
    @settings
    class Config:
        {outer}: ModelNode = option("The model inside.")
        {migrate}

    def __init__(self, cfg, ctx):
        super().__init__()
        self.model = ctx.build(cfg.{outer}, ctx.space)
        self.out_dim = self.model.out_dim

    def forward(self, x, carry, is_first):
        return self.model(x, carry, is_first)

class Inner(Model):
    @settings
    class Config:
        {inner}: list[PositiveInt] = option("Sizes of the hidden layers.")
        {migrate}

    def __init__(self, cfg, ctx):
        super().__init__()
        self.flatten = Flatten(ctx.space)
        self.net = MLP(self.flatten.size, cfg.{inner}, "tanh")
        self.out_dim = self.net.out_dim

    def forward(self, x, carry, is_first):
        return self.net(self.flatten(x)), carry

class Note:
    @settings
    class Config:
        {note}: str = option("Any text.")
        {migrate}

    def __init__(self, cfg, ctx):
        pass
"""
OLD = {"outer": "inside", "inner": "width", "note": "words", "migrate": ""}
NEW = {"outer": "torso", "inner": "hidden", "note": "text"}
MIGRATE = """
        @classmethod
        def migrate(cls, old):
            assert "name" not in old
            names = {"inside": "torso", "words": "text"}
            settings = {names.get(key, key): value for key, value in old.items()}
            if "width" in settings:
                settings["hidden"] = [settings.pop("width")[0]]
            return settings
"""
FAULTY = """
        @classmethod
        def migrate(cls, old):
            return old["nowhere"]
"""


def plugin(module: str, names: dict[str, str]) -> dict[str, str]:
    components = [(kind, name, target.format(f"{module}.parts")) for kind, name, target in COMPONENTS]
    parts = PLUGIN
    for name, value in names.items():
        parts = parts.replace(f"{{{name}}}", value)
    return {f"{module}/__init__.py": manifest(*components), f"{module}/parts.py": parts}


def settings(outer: str, inner: str, note: str) -> dict[str, Any]:
    return {
        "model": {"name": "outer", outer: {"name": "inner", inner: [8]}},
        "logger": {"csv": {"name": "csv"}, "note": {"name": "note", note: "hello"}},
    }


def run_of(total_steps: int, folder: Path) -> Path:
    raw = compose([*OVERRIDES["ppo"], f"total_steps={total_steps}", "checkpoint.keep_best=0"]).raw
    with punctual():
        launch.train(parse(raw | settings("inside", "width", "words")), folder)
    return folder


def upgrade(site: Path, install: Install, migrate: str = MIGRATE) -> None:  # noqa: F811
    """Version 2 of the plugin, in which every option has another name."""
    shutil.rmtree(site / "rlplug_grown-1.0.dist-info")
    install("rlplug-grown", "grown_new", plugin("grown_new", NEW | {"migrate": migrate}), version="2.0")


def test_a_run_goes_on_with_options_that_were_renamed(site: Path, install: Install, tmp_path: Path):  # noqa: F811
    install("rlplug-grown", "grown_old", plugin("grown_old", OLD), version="1.0")
    run = run_of(128, tmp_path / "run")
    without_upgrade = copy_of(run, tmp_path / "without")
    launch.resume(without_upgrade, ["total_steps=256"], tell=lambda _: None)
    evaluated = json.loads((run / "summary.json").read_text())["eval/return_mean"]
    obs = np.zeros(4, np.float32)
    action = load(run).act(obs)

    upgrade(site, install)
    with pytest.warns(UserWarning, match="rlplug-grown was 1.0 then"):
        assert load(run).act(obs) == action
    assert evaluate(run, tell=lambda _: None)["eval/return_mean"] == evaluated
    told: list[str] = []
    launch.resume(run, ["total_steps=256"], tell=told.append)
    assert "rlplug-grown was 1.0 then, and is 2.0 now" in told
    assert differences_of_runs(without_upgrade, run) == []
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored | settings("torso", "hidden", "text") == stored

    launch.resume(run, ["total_steps=320"], tell=lambda _: None)  # its settings are the present ones already
    assert evaluate(run, tell=lambda _: None)["env_steps"] > 256


def test_what_cannot_be_migrated_is_named(site: Path, install: Install, tmp_path: Path):  # noqa: F811
    install("rlplug-grown", "grown_old", plugin("grown_old", OLD), version="1.0")
    run = run_of(64, tmp_path / "run")
    upgrade(site, install, FAULTY)
    why = "of rlplug-grown 2.0 cannot migrate its settings: KeyError: 'nowhere'"
    with pytest.raises(ConfigError, match=f"^logger.note: logger 'note' {why}$"):
        launch.resume(run, ["total_steps=128"])
    with pytest.raises(ConfigError, match=f"^model: model 'outer' {why}$"):
        evaluate(run, tell=lambda _: None)


@pytest.mark.parametrize(
    "raw",
    [
        {"model": {"name": "gone", "torso": {"name": "mlp"}}, "critic_model": None, "total_steps": 9},
        {"algo": {"name": ["x"]}, "env": 3, "logger": {"csv": None, "x": {}}, "exploration": [], 5: {"name": "sac"}},
    ],
)
def test_what_is_not_installed_or_no_node_is_left_alone(raw: dict[Any, Any]):
    assert migrate(raw) == raw
