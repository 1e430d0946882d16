"""Ray actors: the only part of rlplug that knows Ray. It is loaded when a run that has actors starts."""

from __future__ import annotations

import os
from pathlib import Path

AUTH_MODE = "RAY_AUTH_MODE"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of segments that are not needed any more
}

# Ray reads these when it is imported
os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
if (Path.home() / ".ray" / "auth_token").exists():  # Ray decides the same way when it finds a cluster by itself
    os.environ.setdefault(AUTH_MODE, "token")
