"""TensorBoard event files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rlplug import hookimpl
from rlplug.api import Context, Run
from rlplug.settings import PositiveInt, option, settings


class TensorBoard:
    """Logs metrics by step, and the whole configuration as text, in ``tensorboard/``."""

    @settings
    class Config:
        flush_secs: PositiveInt = option("Maximum seconds until logged values are on disk.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg = cfg
        self._writer: SummaryWriter | None = None

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        steps = run.steps
        with _silent_threads():
            self._writer = SummaryWriter(
                str(run.run_dir / "tensorboard"),
                purge_step=steps + 1 if steps else 0,  # hides values that a resumed run had logged after that step
                max_queue=1000,  # scalars; a full queue blocks the run, and the default is 10
                flush_secs=self.cfg.flush_secs,
            )
        self._writer.add_text("config", f"```json\n{json.dumps(run.config.raw, indent=2)}\n```", steps)

    @hookimpl
    def rlplug_logged(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._writer:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._writer:
            self._writer.close()


@contextmanager
def _silent_threads() -> Iterator[None]:
    """Suppress tracebacks of threads started here: the writer raises their errors in its next call."""
    others, hook = set(threading.enumerate()), threading.excepthook
    yield
    own = set(threading.enumerate()) - others

    def failed(args: threading.ExceptHookArgs) -> None:
        if args.thread not in own:
            hook(args)

    threading.excepthook = failed
