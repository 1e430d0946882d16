"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import wandb

from rlplug import hookimpl
from rlplug.api import Context, Run
from rlplug.settings import option, settings
from rlplug.types import ConfigError

EXIT_CODES = {"finished": 0, "interrupted": 255}  # W&B shows 255 as killed, any other but 0 as failed


class WandB:
    """Logs metrics by ``env_steps``, or ``updates`` if the loop counts these, and the whole configuration.

    W&B cannot remove rows: a killed and resumed run shows the steps after its checkpoint twice.

    Raises:
        ConfigError: ``mode=online`` without credentials. A run never prompts for them.
    """

    @settings
    class Config:
        mode: Literal["offline", "online", "disabled"] = option("offline writes files that `wandb sync` uploads.")
        project: str = option("Project of the run.")
        entity: str | None = option("User or team; null: your default one.")
        group: str | None = option("Group of runs, such as the seeds of an experiment.")
        run_name: str | None = option("Name of the run; null: its folder.")
        tags: list[str] = option("Tags of the run.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if cfg.mode == "online" and not wandb.login(prompt=False, verify=False):
            unset = ", unset WANDB_MODE" if "WANDB_MODE" in os.environ else ""
            raise ConfigError(
                "logger.wandb.mode",
                f"online needs credentials of Weights & Biases, and none were found; run `wandb login` or set "
                f"WANDB_API_KEY{unset}, or choose logger.wandb.mode=offline and upload with `wandb sync` afterwards",
            )
        self.cfg = cfg
        self._run: wandb.Run | None = None

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        cfg = self.cfg
        self._run = wandb.init(
            mode=cfg.mode,
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            name=cfg.run_name or "/".join(run.run_dir.parts[-2:]),
            tags=cfg.tags,
            dir=str(run.run_dir),
            config=run.config.raw,
            id=_previous_id(run.run_dir),
            resume="allow" if cfg.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(run.loop.unit, hidden=True)
        self._run.define_metric("*", step_metric=run.loop.unit)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._run:
            self._run.log({**metrics, run.loop.unit: step})

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._run:
            self._run.summary.update(dict(summary))
            self._run.finish(exit_code=EXIT_CODES.get(summary["status"], 1))


def _previous_id(folder: Path) -> str | None:
    """Return the id of the run already in this folder, so that a resumed run continues it."""
    previous = sorted((folder / "wandb").glob("*run-*-*"))
    return previous[-1].name.rpartition("-")[2] if previous else None
