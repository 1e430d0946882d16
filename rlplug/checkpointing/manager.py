"""Schedule and retention of checkpoints, which a separate thread writes."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplug.checkpointing import atomic, format
from rlplug.checkpointing.format import FOLDER, Checkpoint, Snapshot, checkpoints, folder_of
from rlplug.functional.schedule import due
from rlplug.types import CheckpointError, RunError

BEST = "best"  # link to the checkpoint with the best evaluation, in the same folder


class CheckpointManager:
    """Writes and deletes the checkpoints of one run folder, by the settings ``checkpoint`` (``cfg``).

    It writes one checkpoint at a time, during training, which waits only to begin a checkpoint of a best evaluation.
    The manager of every rank writes that rank's files; that of rank 0 also completes checkpoints and deletes old ones.
    ``submit``, ``set_score``, ``poll`` and ``wait`` return a newly completed checkpoint, if any, and raise
    ``RunError`` if it could not be written.
    """

    def __init__(self, run: Path, cfg: Any, steps: int) -> None:
        self.run, self.cfg = run, cfg
        self.minutes = float(cfg.every.removesuffix("min")) if isinstance(cfg.every, str) else None
        self._steps, self._time = steps, time.monotonic()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def idle(self) -> bool:
        """Return whether no checkpoint is being written and the minutes of ``every`` have passed."""
        return not self.busy and (self.minutes is None or time.monotonic() - self._time >= 60 * self.minutes)

    def due(self, steps: int) -> bool:
        """Return whether a checkpoint is due, given that the manager of rank 0 is idle."""
        return steps != self._steps if self.minutes is not None else due(self.cfg.every, self._steps, steps)

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint would be kept for this score."""
        return not math.isnan(score) and sum(kept >= score for kept, _ in self._best()) < self.cfg.keep_best

    def submit(self, snapshot: Snapshot) -> Path | None:
        """Begin to write a checkpoint, or only the score if one of the same step exists."""
        before = self.wait()
        self._steps, self._time = format.steps_of(snapshot.manifest), time.monotonic()
        self._writing = self._thread.submit(self._write, folder_of(self.run, self._steps), snapshot)
        return before

    def set_score(self, steps: int, score: float) -> Path | None:
        """Write the score of an evaluation into the checkpoint of that step, if it exists."""
        before = self.wait()
        if (folder := folder_of(self.run, steps)).exists():
            format.note_score(folder, score)
            self._prune()
        return before

    def poll(self) -> Path | None:
        """Return the checkpoint completed since the last call, if any."""
        return None if self.busy else self.wait()

    def wait(self) -> Path | None:
        """Wait until no checkpoint is being written."""
        if self._writing is None:
            return None
        future, self._writing = self._writing, None
        try:
            return future.result()
        except OSError as error:
            raise RunError(f"a checkpoint could not be written to {self.run}: {error.strerror}") from error

    def close(self) -> None:
        """End the thread after it has written the submitted checkpoint."""
        self._thread.shutdown()

    def _write(self, folder: Path, snapshot: Snapshot) -> Path:
        format.write(folder, snapshot)
        if snapshot.rank == 0:
            self._prune()
        return folder

    def _prune(self) -> None:
        """Link to the best checkpoint, and delete those neither among the last nor the best."""
        best = [path for _, path in self._best()]
        if best:
            atomic.symlink(self.run / FOLDER / BEST, best[0].name)
        else:
            atomic.delete(self.run / FOLDER / BEST)
        for path in checkpoints(self.run)[self.cfg.keep_last :]:
            if path not in best:
                format.remove(path)

    def _best(self) -> list[tuple[float, Path]]:
        """Return scores and paths of the checkpoints kept for their scores, best first."""
        scored: list[tuple[float, Path]] = []
        for path in checkpoints(self.run):
            with suppress(CheckpointError):  # damaged or just deleted
                score = Checkpoint(path).manifest["score"]
                scored += [] if score is None or math.isnan(score) else [(score, path)]
        return sorted(scored, reverse=True)[: self.cfg.keep_best]
