"""Output to readers that may end (``2>&1 | head -n 1``, a killed ``tee``) without ending the run."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # errors of pipes and terminals


class _Unread(io.FileIO):
    """A file descriptor that discards output once its reader is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # also for output from outside of Python
            return len(data)


def outlive_readers(*names: str) -> None:
    """Keep this process running when readers of ``names``, ``sys.stdout`` or ``sys.stderr``, are gone.

    Streams replaced by a caller are unchanged.
    """
    for name in names:
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Unread(stream.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream.line_buffering
            )
            setattr(sys, name, text)
