"""Ray actors. Only this package uses Ray; it is imported when a run with actors starts."""

from __future__ import annotations

import os
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # errors of segments that are no longer needed
    "RAY_worker_niceness": "5",  # lower priority than the learner; with Ray's 15, other processes starve actors
}

for name, value in DEFAULTS.items():  # read by Ray at import
    os.environ.setdefault(name, value)
if (Path.home() / ".ray" / "auth_token").exists():  # the rule of Ray when it finds a cluster by itself
    os.environ.setdefault(AUTH_MODE, "token")
