"""What the tests of checkpoints run: as small as it can be, and real."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from rlplug import compose
from rlplug.checkpointing.manager import CheckpointManager
from rlplug.run import launch

SHORT = ("model.hidden=[8]", "eval.every=0", "eval.episodes=1", "hardware=cpu", "logger=[]")
SAC = (
    *("algo=sac", "env=pendulum", "total_steps=200", "num_steps_sampled_before_learning_starts=40"),
    *("train_batch_size=8", "buffer.capacity=170", "log.every=40", "checkpoint.every=50", "checkpoint.keep_last=4"),
)
PPO = (
    *("algo=ppo", "env=cartpole", "tuned=none", "total_steps=256", "num_envs=2", "rollout_fragment_length=32"),
    *("algo.sgd_minibatch_size=32", "algo.num_sgd_iter=2", "log.every=64", "checkpoint.every=64"),
)
OVERRIDES = {"sac": (*SHORT, *SAC), "ppo": (*SHORT, *PPO)}


@contextmanager
def punctual() -> Iterator[None]:
    """Checkpoints are of the steps they fall due at, however slow the disk: training waits for the one before."""

    def busy(keeper: CheckpointManager) -> bool:
        return keeper._writing is not None and bool(futures.wait([keeper._writing]).not_done)

    with mock.patch.object(CheckpointManager, "busy", property(busy)):
        yield


def trained(name: str, folder: Path, overrides: Sequence[str] = ()) -> Path:
    """A finished run, with a checkpoint wherever one fell due."""
    with punctual():
        launch.train(compose([*OVERRIDES[name], *overrides]), folder)
    return folder


def copy_of(run: Path, to: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(run, to, symlinks=True))


def steps(run: Path) -> list[Path]:
    """Its checkpoints by name, the newest first, whatever they are."""
    return sorted((run / "checkpoints").glob("step_" + "?" * 12), reverse=True)


def fingerprint(run: Path) -> dict[str, str]:
    """Every name in a folder, and what it is; the lock is no part of the run."""
    return {
        str(path.relative_to(run)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(run.rglob("*"))
        if path.name != "run.lock"
    }
