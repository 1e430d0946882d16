"""Output whose reader may end (``2>&1 | head -n 1``, a ``tee`` that was killed): the run goes on without it."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal


class _Unread(io.FileIO):
    """A file descriptor that goes silent once nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # also for what is not written from Python
            return len(data)


def outlive_readers(*names: str) -> None:
    """Let this process go on when nobody reads ``sys.stdout`` or ``sys.stderr`` any more, as ``names`` says.

    What a caller put in their place is left as it is.
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
