"""Ray actors: the only part of rlplug that knows Ray. It is loaded when a run that has actors starts."""

from __future__ import annotations

import os
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of segments that are not needed any more
    "RAY_worker_niceness": "5",  # the learner goes first; by Ray's 15 every other process of the machine starves them
}

for name, value in DEFAULTS.items():  # Ray reads them when it is imported
    os.environ.setdefault(name, value)
if (Path.home() / ".ray" / "auth_token").exists():  # Ray decides the same way when it finds a cluster by itself
    os.environ.setdefault(AUTH_MODE, "token")
