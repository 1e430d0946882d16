"""When checkpoints are written, and which ones are kept. Writing happens in a thread of its own."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlplug.checkpointing import format as checkpoint
from rlplug.checkpointing.format import Snapshot
from rlplug.types import CheckpointError, RunError

BEST = "best"


class CheckpointManager:
    """Of one run folder.

    One checkpoint is written at a time. One that falls due meanwhile waits for it, and training goes on; one for a
    best evaluation is of that very moment, and lets training wait.

    Every rank has one, and writes its share; the first one makes them one checkpoint.

    Args:
        run: the run folder.
        cfg: the run's settings ``checkpoint``.
        env_steps: where the run stands.
        first: whether this is the first rank's.
    """

    def __init__(self, run: Path, cfg: Any, env_steps: int, first: bool = True) -> None:
        self.run, self.cfg, self.first = run, cfg, first
        self.minutes = float(cfg.every.removesuffix("min")) if isinstance(cfg.every, str) else None
        self._steps, self._time = env_steps, time.monotonic()
        self._scores: dict[Path, float] = {}
        self.written: list[Path] = []
        """newest last"""
        for path in reversed(checkpoint.checkpoints(run)):
            self.written.append(path)
            with suppress(CheckpointError):  # an older one than the run continues from
                self._score(path, checkpoint.Checkpoint(path).manifest["score"])
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None

    # ---- when -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Is nothing being written, and have the minutes passed?"""
        return not self.busy and (self.minutes is None or time.monotonic() - self._time >= 60 * self.minutes)

    def due(self, env_steps: int) -> bool:
        """Is it time for one, if the first rank's is idle?"""
        if not self.cfg.every or env_steps == self._steps:
            return False
        return self.minutes is not None or env_steps // self.cfg.every > self._steps // self.cfg.every

    def is_best(self, score: float) -> bool:
        """Is a checkpoint with this evaluation worth keeping for it?"""
        best = sorted(self._scores.values(), reverse=True)[: self.cfg.keep_best]
        if math.isnan(score):
            return False
        return len(best) < self.cfg.keep_best or bool(best and score > best[-1])

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is there, whole."""
        return self.written[-1] if self.written else None

    @property
    def busy(self) -> bool:
        """Is a checkpoint being written?"""
        return self._writing is not None and not self._writing.done()

    # ---- writing --------------------------------------------------------------------------------------------------

    def submit(self, snapshot: Snapshot) -> Path | None:
        """Begin to write. A checkpoint of the same environment step that is there already learns the score.

        Returns:
            The one before, if it had to be waited for.

        Raises:
            RunError: the one before could not be written.
        """
        before = self.wait()
        env_steps = snapshot.manifest["env_steps"]
        self._steps, self._time = env_steps, time.monotonic()
        folder = checkpoint.folder_of(self.run, env_steps)
        self._writing = self._thread.submit(self._write, folder, snapshot)
        return before

    def set_score(self, env_steps: int, score: float) -> Path | None:
        """Let the checkpoint of a step, if there is one, learn how well its policy was found to play.

        Returns:
            The one before, as ``submit``.

        Raises:
            RunError: as ``submit``.
        """
        before = self.wait()
        folder = checkpoint.folder_of(self.run, env_steps)
        if folder in self.written:
            checkpoint.note_score(folder, score)
            self._score(folder, score)
            self._prune()
        return before

    def poll(self) -> Path | None:
        """The checkpoint that was finished since the last call.

        Raises:
            RunError: it could not be written.
        """
        return None if self.busy else self.wait()

    def wait(self) -> Path | None:
        """As ``poll``, once nothing is being written any more."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        try:
            return writing.result()
        except OSError as error:
            raise RunError(f"a checkpoint could not be written to {self.run}: {error.strerror}") from error

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, folder: Path, snapshot: Snapshot) -> Path:
        score = snapshot.manifest["score"]
        if not self.first:
            checkpoint.contribute(folder, snapshot)
            return folder
        if folder not in self.written:
            checkpoint.write(folder, snapshot)
            self.written.append(folder)
        elif score is not None:
            checkpoint.note_score(folder, score)
        self._score(folder, score)
        self._prune()
        return folder

    # ---- keeping --------------------------------------------------------------------------------------------------

    def _score(self, path: Path, score: float | None) -> None:
        if score is not None and not math.isnan(score):
            self._scores[path] = score

    def _prune(self) -> None:
        best = sorted(self._scores, key=lambda path: (self._scores[path], path), reverse=True)[: self.cfg.keep_best]
        self._point_at(best[0].name if best else None)
        for path in self.written[: -self.cfg.keep_last]:
            if path not in best:
                checkpoint.remove(path)
                self.written.remove(path)
                self._scores.pop(path, None)

    def _point_at(self, best: str | None) -> None:
        """``checkpoints/best`` leads to the best one, where the file system has symbolic links."""
        link = self.run / checkpoint.FOLDER / BEST
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(best):
            beside = link.with_name(BEST + checkpoint.PARTIAL)
            beside.unlink(missing_ok=True)
            try:
                beside.symlink_to(best)
            except OSError as error:
                if error.errno not in checkpoint.NO_LINKS:
                    raise
            else:
                beside.replace(link)
