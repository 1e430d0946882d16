"""Real runs, made once, and folders of runs with metrics by hand."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplug.cli import main

TINY = ("env=cartpole", "tuned=none", "hardware=cpu", "logger=[]", "compile=off", "model.hidden=[8]", "log.every=64")
SWEEP = ("-m", "algo=a2c,dqn", "seed=1,2", *TINY, "total_steps=320", "eval.every=80", "eval.episodes=2")
SWEEP += ("num_steps_sampled_before_learning_starts=100",)

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/sweep``, a sweep of two algorithms and two seeds."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*SWEEP, "hydra.sweep.dir=runs/sweep"]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``made``, which is the current folder."""
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write a run folder: that of a real run, with other settings and metrics."""
    monkeypatch.chdir(tmp_path)
    source = made / "runs/sweep/algo=a2c,seed=1"

    def write(
        name: str,
        rows: Mapping[str, Sequence[float]],
        score: float | None = None,
        status: str | None = "finished",
        **settings: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        raw = yaml.safe_load((source / "config.yaml").read_text())
        for key, value in settings.items():
            node, (*parents, last) = raw, key.split("__")
            for parent in parents:
                node = node[parent]
            node[last] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        manifest = json.loads((source / "manifest.json").read_text()) | {"run": uuid.uuid4().hex}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        steps = next(iter(rows.values()))
        lines = [
            ",".join(["step", *rows]),
            *(",".join(map(str, (10 * (i + 1), *row))) for i, row in enumerate(zip(*rows.values(), strict=True))),
        ]
        (folder / "metrics.csv").write_text("\n".join([*lines, ""]))
        if status is not None:
            summary = {"status": status, "env_steps": 10 * len(steps), "updates": len(steps), "eval/env_steps": 10}
            summary |= {} if score is None else {"eval/return_mean": score}
            (folder / "summary.json").write_text(json.dumps(summary))
        return Path(name)

    return write
