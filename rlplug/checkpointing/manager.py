"""When checkpoints are written, and which of them are kept. A thread of its own writes them."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplug.checkpointing import writing
from rlplug.checkpointing.atomic import NO_LINKS, PARTIAL
from rlplug.checkpointing.format import FOLDER, folder_of
from rlplug.checkpointing.reading import Checkpoint, checkpoints
from rlplug.checkpointing.writing import Snapshot
from rlplug.types import CheckpointError, RunError

BEST = "best"


class CheckpointManager:
    """Writes and keeps the checkpoints of one run folder.

    It writes one checkpoint at a time. While it writes, training goes on, and the next one that is due waits; only for
    a checkpoint of a best evaluation does training wait.

    Every rank has a manager, which writes that rank's files; the first rank's completes the checkpoint.

    Args:
        run: the run folder.
        cfg: the run's settings ``checkpoint``: ``every``, ``keep_last``, ``keep_best``.
        env_steps: environment steps that the run has made.
        first: whether this is the first rank.
    """

    def __init__(self, run: Path, cfg: Any, env_steps: int, first: bool = True) -> None:
        self.run, self.cfg, self.first = run, cfg, first
        self.minutes = float(cfg.every.removesuffix("min")) if isinstance(cfg.every, str) else None
        self._steps, self._time = env_steps, time.monotonic()
        self._scores: dict[Path, float] = {}
        self.written: list[Path] = []
        """the newest last"""
        for path in reversed(checkpoints(run)):
            self.written.append(path)
            with suppress(CheckpointError):  # it is older than the one that the run continues from
                self._remember(path, Checkpoint(path).manifest["score"])
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    # ---- when -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is being written and the minutes of ``every`` have passed."""
        return not self.busy and (self.minutes is None or time.monotonic() - self._time >= 60 * self.minutes)

    def due(self, env_steps: int) -> bool:
        """Return whether a checkpoint is due, given that the first rank's manager is idle."""
        if not self.cfg.every or env_steps == self._steps:
            return False
        return self.minutes is not None or env_steps // self.cfg.every > self._steps // self.cfg.every

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint with this score would be kept for it."""
        best = sorted(self._scores.values(), reverse=True)[: self.cfg.keep_best]
        if math.isnan(score):
            return False
        return len(best) < self.cfg.keep_best or bool(best and score > best[-1])

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint."""
        return self.written[-1] if self.written else None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    # ---- writing --------------------------------------------------------------------------------------------------

    def submit(self, snapshot: Snapshot) -> Path | None:
        """Begin to write a checkpoint; if there is one of the same environment step, only its score is written.

        Returns:
            The previous checkpoint, if it was still to be reported.

        Raises:
            RunError: the previous checkpoint could not be written.
        """
        before = self.wait()
        env_steps = snapshot.manifest["env_steps"]
        self._steps, self._time = env_steps, time.monotonic()
        folder = folder_of(self.run, env_steps)
        self._writing = self._thread.submit(self._write, folder, snapshot)
        return before

    def set_score(self, env_steps: int, score: float) -> Path | None:
        """Write the score of an evaluation into the checkpoint of that step, if there is one.

        Returns:
            The previous checkpoint, as ``submit``.

        Raises:
            RunError: as ``submit``.
        """
        before = self.wait()
        folder = folder_of(self.run, env_steps)
        if folder in self.written:
            writing.note_score(folder, score)
            self._remember(folder, score)
            self._prune()
        return before

    def poll(self) -> Path | None:
        """Return the checkpoint that was completed since the last call, if any.

        Raises:
            RunError: it could not be written.
        """
        return None if self.busy else self.wait()

    def wait(self) -> Path | None:
        """Wait until nothing is being written; otherwise as ``poll``."""
        if self._writing is None:
            return None
        future, self._writing = self._writing, None
        try:
            return future.result()
        except OSError as error:
            raise RunError(f"a checkpoint could not be written to {self.run}: {error.strerror}") from error

    def close(self) -> None:
        """End the thread after it has written what was submitted."""
        self._thread.shutdown()

    def _write(self, folder: Path, snapshot: Snapshot) -> Path:
        score = snapshot.manifest["score"]
        if not self.first:
            writing.contribute(folder, snapshot)
            return folder
        if folder not in self.written:
            writing.write(folder, snapshot)
            self.written.append(folder)
        elif score is not None:
            writing.note_score(folder, score)
        self._remember(folder, score)
        self._prune()
        return folder

    # ---- keeping --------------------------------------------------------------------------------------------------

    def _remember(self, path: Path, score: float | None) -> None:
        if score is not None and not math.isnan(score):
            self._scores[path] = score

    def _prune(self) -> None:
        best = sorted(self._scores, key=lambda path: (self._scores[path], path), reverse=True)[: self.cfg.keep_best]
        self._point_at(best[0].name if best else None)
        for path in self.written[: -self.cfg.keep_last]:
            if path not in best:
                writing.remove(path)
                self.written.remove(path)
                self._scores.pop(path, None)

    def _point_at(self, best: str | None) -> None:
        """Let ``checkpoints/best`` lead to the best checkpoint, where the file system has symbolic links."""
        link = self.run / FOLDER / BEST
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(best):
            partial = link.with_name(BEST + PARTIAL)
            partial.unlink(missing_ok=True)
            try:
                partial.symlink_to(best)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
            else:
                partial.replace(link)
