"""What the machine refuses, files of other users and memory, is one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AS_NOBODY = """
import contextlib, io, os, sys
import rlplug.run.build
from rlplug.cli import main
os.chdir(sys.argv[1])
lines = sys.stdin.read().splitlines()
with contextlib.redirect_stderr(io.StringIO()):  # imports what another user may not read
    for line in ("resume x", "evaluate x", "estimate x data.path=x", "data x", "check algo=bc data.path=x", "algo=x"):
        main(line.split())
    main(["-m", "algo=ppo,x"])
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
for line in lines:
    print(">", line, file=sys.stderr, flush=True)
    print(main(line.split()), flush=True)
"""
LINES = {
    "resume closed": "closed/manifest.json: Permission denied",
    "evaluate closed": "closed/manifest.json: Permission denied",
    "resume closed/run": "closed/run cannot be read: Permission denied",
    "evaluate closed/run": "closed/run cannot be read: Permission denied",
    "estimate closed/run data.path=x": "closed/run cannot be read: Permission denied",
    "data closed/run": "data.path: closed/run cannot be read: Permission denied",
    "check algo=bc data.path=closed/run": "data.path: closed/run cannot be read: Permission denied",
    "algo=ppo hydra.run.dir=closed/x": "hydra.run.dir: closed/x cannot be made: Permission denied",
    "-m seed=1,2 hydra.sweep.dir=closed/x": "hydra.sweep.dir: closed/x cannot be made: Permission denied",
    "algo=ppo": "hydra.run.dir: runs cannot be made: Permission denied",
    "check hydra.searchpath=[closed/conf]": "hydra.searchpath: closed/conf does not exist",
}


def open_to_others(*paths: str) -> bool:
    return all(folder.stat().st_mode & 0o001 for path in paths for folder in (Path(path), *Path(path).parents))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(
    not open_to_others(sys.prefix, os.path.dirname(__file__)), reason="other users cannot read this code"
)
def test_another_user(tmp_path: Path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    work = tmp_path / "work"
    (work / "closed" / "run").mkdir(parents=True)
    (work / "closed").chmod(0o700)
    command = [sys.executable, "-c", AS_NOBODY, str(work)]
    done = subprocess.run(command, input="\n".join(LINES), capture_output=True, text=True)
    said = "\n".join(done.stderr.splitlines())
    assert done.stdout.split() == ["2"] * len(LINES), said
    assert said == "\n".join(f"> {line}\nrlplug: {message}" for line, message in LINES.items())


LIMITED = """
import resource, sys
from rlplug.cli import main
import rlplug.run.build, rlplug.cli.train, psutil
limit = psutil.Process().memory_info().vms + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main(sys.argv[2:]))
"""
SAC = [
    *("algo=sac", "env=pendulum", "model.hidden=[8]", "num_steps_sampled_before_learning_starts=50"),
    *("train_batch_size=16", "total_steps=100", "eval.every=0", "eval.episodes=1", "hardware=cpu", "logger.only=[]"),
]


def limited(megabytes: int, *words: str) -> str:
    """Train with so much more memory than the process has at its start, and return its only line."""
    command = [sys.executable, "-c", LIMITED, str(megabytes), *SAC, *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == (2 if "has only" in done.stderr else 1), done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_a_limit_of_memory_that_the_buffer_exceeds(tmp_path: Path):
    line = limited(1024, "buffer.capacity=50_000_000", f"hydra.run.dir={tmp_path / 'run'}")
    assert line.startswith("rlplug: buffer.capacity: the buffer would need ")
    assert line.endswith(" of free memory; make it smaller")
    assert not (tmp_path / "run").exists()


TIGHT = """
import gymnasium, psutil, resource
from gymnasium.envs.classic_control import PendulumEnv

class Tight(PendulumEnv):
    def step(self, action):
        limit = psutil.Process().memory_info().vms + 2**27
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return super().step(action)

gymnasium.register("Tight-v0", entry_point=Tight, max_episode_steps=20)
"""


def test_a_limit_of_memory_that_is_met_while_the_buffer_is_allocated(tmp_path: Path):
    """It is allocated with the first row, when there may be less than there was at the start."""
    (tmp_path / "tight.py").write_text(TIGHT)
    words = [*SAC, "env=gymnasium", "env.id=tight:Tight-v0", "env.vectorization=list", "buffer.capacity=20_000_000"]
    command = [sys.executable, "-m", "rlplug", *words, "hydra.run.dir=run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("rlplug: there is no memory for a tensor of ")
    assert " takes less; there is no checkpoint yet; begin again with: python -m rlplug resume " in line
