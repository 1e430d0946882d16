"""Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from rlplug import hookimpl, tracking
from rlplug.api import Context, Run
from rlplug.settings import option, settings
from rlplug.types import ConfigError

EXIT_CODES = {"finished": 0, "interrupted": 255}  # W&B shows 255 as killed, any other but 0 as failed
# W&B's transaction log is in LevelDB's format: blocks of records, which may be cut into fragments
BLOCK, HEADER, WHOLE, END = 32768, 7, 1, 4


class WandB:
    """Logs metrics by ``env_steps``, or ``updates`` if the loop counts these, the configuration, videos and weights.

    A resumed run continues the same W&B run, which has each metric once per step.

    Raises:
        ConfigError: ``mode=online`` without credentials. A run never prompts for them.
    """

    @settings
    class Config:
        mode: Literal["offline", "online", "disabled"] = option("offline writes files that `wandb sync` uploads.")
        project: str = option("Project of the run.")
        entity: str | None = option("User or team; null: your default one.")
        group: str | None = option("Group of runs, such as the seeds of an experiment.")
        job_type: str | None = option("Type of the run within its group.")
        run_name: str | None = option("Name of the run; null: its folder.")
        tags: list[str] = option("Tags of the run.")
        notes: str | None = option("Description of the run.")
        log_model: bool = option("Log the weights of the best checkpoint as an artifact at the end.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if cfg.mode == "online" and not wandb.login(prompt=False, verify=False):
            unset = ", unset WANDB_MODE" if "WANDB_MODE" in os.environ else ""
            raise ConfigError(
                "logger.wandb.mode",
                f"online needs credentials of Weights & Biases, and none were found; run `wandb login` or set "
                f"WANDB_API_KEY{unset}, or choose logger.wandb.mode=offline and upload with `wandb sync` afterwards",
            )
        self.cfg, self._rows = cfg, tracking.Rows()
        self._run: wandb.Run | None = None

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        cfg, unit = self.cfg, run.loop.unit
        self._rows = tracking.Rows(_last(run.run_dir, unit))
        self._run = wandb.init(
            mode=cfg.mode,
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            job_type=cfg.job_type,
            name=cfg.run_name or "/".join(run.run_dir.parts[-2:]),
            tags=cfg.tags,
            notes=cfg.notes,
            dir=str(run.run_dir),
            config=run.config.raw,
            id=tracking.manifest(run)["run"],
            resume="allow" if cfg.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", git_commit=tracking.commit(run)),
        )
        self._run.define_metric(unit, hidden=True)
        self._run.define_metric("*", step_metric=unit)
        for step, metrics in self._rows.missing(run):
            self._run.log({**metrics, unit: step})

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._run and (new := self._rows.new(metrics, step)):
            self._run.log({**new, run.loop.unit: step})

    @hookimpl
    def rlplug_evaluated(self, run: Run) -> None:
        video = tracking.video(run)
        if self._run and video and self._rows.new({"eval/video": 0}, run.steps):
            self._run.log({"eval/video": wandb.Video(str(video), format="mp4"), run.loop.unit: run.steps})

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._run:
            if self.cfg.log_model and (files := tracking.best(run)):
                about = {"checkpoint": files[0].parent.name}
                weights = wandb.Artifact(f"{self._run.id}-best", "model", metadata=about)
                for file in files:
                    weights.add_file(str(file))
                self._run.log_artifact(weights, aliases=["best"])
            self._run.summary.update(dict(summary))
            self._run.finish(exit_code=EXIT_CODES.get(summary["status"], 1))


def _last(folder: Path, unit: str) -> dict[str, int]:
    """Return the highest step of each metric that W&B's files in a run folder hold."""
    last: dict[str, int] = {}
    for file in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for record in _records(file):
            names = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if unit in names:
                step = json.loads(names[unit])
                last |= {name: step for name in names if step > last.get(name, -1)}
    return last


def _records(file: Path) -> Iterator[Record]:
    """Yield the records of a transaction log; the last one may be cut, if its writer was killed."""
    data, at, whole = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += HEADER + length
        if at > len(data) or not kind:
            return
        whole += data[at - length : at]
        if kind in (WHOLE, END):
            yield Record.FromString(whole)
            whole = b""
