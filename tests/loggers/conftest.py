"""A run as loggers see it, and the door through which they come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import pytest
import yaml

from rlplug.api import Loop, VecEnv
from rlplug.registry import Events, conf_folder, load
from rlplug.tracking import write_video
from rlplug.types import Progress


@dataclass
class Config:
    total_steps: int = 1000
    algo: Any = None
    env: Any = field(default_factory=lambda: SimpleNamespace(cls=VecEnv))
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(every="5min"))
    data: Any = None
    log: Any = field(default_factory=lambda: SimpleNamespace(level="info"))
    estimate: Any = None
    raw: dict[str, Any] = field(
        default_factory=lambda: {
            "algo": {"name": "sac", "gamma": 0.99, "hiddens": [256, 256], "grad_clip": None},
            "env": {"name": "gymnasium", "id": "Pendulum-v1"},
            "total_steps": 1000,
            "seed": 3,
        }
    )


@dataclass
class LoggedRun:
    """What loggers read of ``api.Run``, and what the trainer tells them."""

    run_dir: Path
    config: Config = field(default_factory=Config)
    progress: Progress = field(default_factory=Progress)
    loop: type[Loop] = Loop
    logged: int = 0
    evaluated: tuple[int, int] = (0, 0)
    clock: Any = field(default_factory=lambda: SimpleNamespace(spent={}))
    collector: Any = None

    def __post_init__(self) -> None:
        (self.run_dir / "manifest.json").write_text(json.dumps({"run": "a" * 32, "git": {"commit": "c" * 40}}))
        self.hooks = pluggy.PluginManager("rlplug")
        self.hooks.add_hookspecs(Events)

    @property
    def steps(self) -> int:
        return getattr(self.progress, self.loop.unit)

    def start(self, *loggers: Any) -> None:
        for logger in loggers:
            self.hooks.register(logger)
        self.hooks.check_pending()
        self.hooks.hook.rlplug_started(run=self)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.progress.env_steps = step
        self.logged += 1
        self.hooks.hook.rlplug_logged(run=self, metrics=metrics, step=step)

    def evaluate(self, mean: float, std: float) -> None:
        metrics = {"eval/return_mean": mean, "eval/return_std": std}
        self.hooks.hook.rlplug_evaluated(run=self, metrics=metrics)
        self.log(self.progress.env_steps, metrics)

    def end(self, status: str = "finished", **extra: float) -> None:
        summary = {"status": status, "env_steps": self.progress.env_steps, "wall_s": 95.2, **extra}
        self.hooks.hook.rlplug_ended(run=self, summary=summary)


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    folder = tmp_path / "sac-pendulum" / "2030-01-02_03-04-05-s3"
    folder.mkdir(parents=True)
    return LoggedRun(folder)


@pytest.fixture
def evaluated(run: LoggedRun) -> LoggedRun:
    """A run that is at step 200, with the video of an evaluation and a best checkpoint."""
    shown = (np.full((16, 16, 3), 10 * i, np.uint8) for i in range(5))
    write_video(run.run_dir / "videos" / "step_000000000200.mp4", shown, 25)
    checkpoint = run.run_dir / "checkpoints" / "step_000000000200"
    checkpoint.mkdir(parents=True)
    for name in ("manifest.json", "weights.pt", "learner.pt"):
        (checkpoint / name).write_text(name)
    (checkpoint.parent / "best").symlink_to(checkpoint.name)
    run.progress.env_steps = 200
    return run


@pytest.fixture
def logger() -> Callable[..., Any]:
    """Builds a logger as the trainer does: its class by name, its options from its YAML."""

    def build(name: str, **options: Any) -> Any:
        node = yaml.safe_load((conf_folder("rlplug") / "logger" / f"{name}.yaml").read_text())
        assert node.pop("name") == name
        cls = load("logger", name)
        return cls(cls.Config(**{**node, **options}), None)

    return build
