"""Style, spelling, types and the dependency rule: every hook of .pre-commit-config.yaml passes on the whole tree."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
HOOKS = {
    hook["id"]: shlex.split(hook["entry"])
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hook(hook):
    tools = str(Path(sys.executable).parent)
    path = os.pathsep.join([tools, os.environ.get("PATH", "")])
    done = subprocess.run(
        HOOKS[hook],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{shlex.join(HOOKS[hook])}\n{done.stdout}"
