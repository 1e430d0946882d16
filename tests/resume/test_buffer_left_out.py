"""With ``checkpoint.buffer=false`` a resumed run first collects new rows, and learns at its ratio afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from rlplug.checkpointing.format import checkpoints, find
from rlplug.cli import main
from rlplug.config import compose
from rlplug.run.launch import resume, train
from rlplug.testing.comparing import differences_of_runs
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError
from tests.tools.kill import Process, warm_up

SMALL = ("tuned=none", "eval.every=0", "eval.episodes=1", "log.every=1000", "hardware=cpu", "logger.only=[]")
SMALL = (*SMALL, "checkpoint.buffer=false", "checkpoint.keep_best=0")
STARTS = ("num_steps_sampled_before_learning_starts=50", "train_batch_size=8", "buffer.capacity=300")
SAC = ("algo=sac", "env=pendulum", "model.hidden=[8]", "checkpoint.every=50", *STARTS, *SMALL)
DQN = ("algo=dqn", "env=cartpole", "algo.hiddens=[8]", "model.hidden=[8]", *STARTS, *SMALL)
PPO = ("algo=ppo", "env=cartpole", "rollout_fragment_length=32", "algo.sgd_minibatch_size=16", "num_envs=2")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Environment steps and updates of runs in this process, before every round."""
    found: list[tuple[int, int]] = []
    report = Trainer.report

    def noted(trainer: Trainer) -> None:
        found.append((trainer.progress.env_steps, trainer.progress.updates))
        report(trainer)

    monkeypatch.setattr(Trainer, "report", noted)
    return found


def resumed(run: Path, *overrides: str) -> list[str]:
    """Resume a run, and return its lines."""
    lines: list[str] = []
    resume(run, overrides, lines.append)
    return lines


def line(steps: int) -> str:
    said = "the buffer begins empty, as checkpoint.buffer=false left out its rows; learning goes on after"
    return f"not exactly as it would have continued: {said} {steps} more environment steps"


def files(run: Path) -> set[str]:
    return {file.name for folder in checkpoints(run) for file in folder.iterdir()}


def test_a_killed_run_waits_and_then_learns_at_its_ratio(tmp_path: Path, rounds: list[tuple[int, int]]):
    run, more = tmp_path / "run", (*SAC, "total_steps=5000")
    warm_up(more)
    process = Process(run, more)
    assert process.wait(lambda: any(int(path.name.removeprefix("step_")) > 150 for path in checkpoints(run)))
    process.kill()
    start = find(run).steps
    assert line(50) in resumed(run, f"total_steps={start + 130}")
    assert files(run) == {"manifest.json", "learner.pt", "rank0.pt", "weights.pt"}
    assert sorted({*rounds}) == [(start + n, start - 50 + max(0, n - 50)) for n in range(130)]
    assert json.loads((run / "summary.json").read_text())["updates"] == start - 50 + 80


KINDS = {
    "windows, one update a round": (*DQN, "replay_ratio=null", "num_envs=2"),
    "windows of actors": (
        *("algo=apex_dqn", "env=cartpole", "num_envs=4", "rollout_fragment_length=5", "replay_ratio=0.1"),
        *("buffer.num_shards=2", "algo.hiddens=[8]", "model.hidden=[8]", *STARTS, *SMALL),
    ),
    "sequences": (
        *(*DQN, "model=lstm", "model.hidden=8", "model.torso.hidden=[8]", "buffer=sequence", "algo.burn_in=2"),
        *("algo.sequence_length=4", "algo.stride=2", "replay_ratio=0.5"),
    ),
    "segments": (
        *("algo=impala", "env=cartpole", "num_envs=2", "rollout_fragment_length=10", "train_batch_size=40"),
        *("model.hidden=[8]", "buffer.replay_proportion=0.5", *SMALL),
    ),
    "episodes": (
        *("algo=qmix", "env=spread_torch", "env.max_episode_steps=10", "model.hidden=8", "model.torso.hidden=[8]"),
        *("train_batch_size=4", "buffer.capacity=400", *STARTS[:1], *SMALL),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_burst_of_owed_updates(kind: str, tmp_path: Path, rounds: list[tuple[int, int]]):
    train(compose([*KINDS[kind], "total_steps=200"]), tmp_path / "run")
    most = max(b - a for (_, a), (_, b) in pairwise(rounds))
    made = json.loads((tmp_path / "run" / "summary.json").read_text())["updates"]
    assert 0 < most < made
    rounds.clear()
    said = [text for text in resumed(tmp_path / "run", "total_steps=400") if "begins empty" in text]
    wait = 1 if kind == "segments" else 50
    assert said == [line(wait)]
    assert all(updates == made for steps, updates in rounds if steps - 200 < wait)
    assert max(b - a for (_, a), (_, b) in pairwise(rounds)) <= most
    assert rounds[-1][1] > made


def test_on_policy_runs_lose_nothing(tmp_path: Path):
    words = [*PPO, "model.hidden=[8]", *SMALL]
    train(compose([*words, "total_steps=128"]), tmp_path / "one")
    train(compose([*words, "total_steps=64"]), tmp_path / "two")
    assert not [text for text in resumed(tmp_path / "two", "total_steps=128") if "exactly" in text]
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []


def test_the_switch_of_a_resumed_run(tmp_path: Path, rounds: list[tuple[int, int]]):
    run = tmp_path / "run"
    train(compose([*SAC, "total_steps=100", "checkpoint.buffer=true"]), run)
    assert any("_rows_" in name for name in files(run))
    assert line(50) not in resumed(run, "total_steps=140", "checkpoint.buffer=false", "checkpoint.keep_last=1")
    assert not any("_rows_" in name for name in files(run))
    assert rounds[-1] == (139, 89)  # it had its rows
    assert line(50) in resumed(run, "total_steps=150", "checkpoint.buffer=true")
    assert rounds[-1] == (149, 90)
    assert line(50) not in resumed(run, "total_steps=210")  # the rest of the 50 is still to be collected
    assert rounds[-1] == (209, 90 + 19)


def test_a_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, fork = tmp_path / "run", tmp_path / "fork"
    train(compose([*SAC, "total_steps=100"]), run)
    words = ["total_steps=200", "checkpoint.buffer=true", "algo.gamma=0.5"]
    assert main(["fork", str(run), "--to", str(fork), *words]) == 0
    assert line(50) in capsys.readouterr().err
    assert json.loads((fork / "summary.json").read_text())["updates"] == 50 + 50
    assert any("_rows_" in name for name in files(fork))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    words = [*SAC, "total_steps=400", "num_envs=4", "env.max_episode_steps=20", f"record.path={folder / 'data'}"]
    train(compose(words), folder / "run")
    return folder / "data"


def offline(data: Path, *more: str) -> Sequence[str]:
    words = ("algo=iql", "env=pendulum", "model.hidden=[8]", f"data.path={data}", "rollout_fragment_length=4")
    return [*words, *STARTS, *SMALL, *more]


def test_rows_that_are_read_once_are_not_left_out(data: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        train(compose([*offline(data), "total_steps=20"]), tmp_path / "run")
    assert refused.value.key == "checkpoint.buffer"
    assert refused.value.message == (
        "false leaves out rows that are collected again, but offline reads them once; use true"
    )
    assert not (tmp_path / "run").exists()


def test_rows_of_a_stream_are_read_again(data: Path, tmp_path: Path, rounds: list[tuple[int, int]]):
    train(compose([*offline(data, "loop.stream=true", "replay_ratio=0.5"), "total_steps=20"]), tmp_path / "run")
    rounds.clear()
    assert line(50) in resumed(tmp_path / "run", "total_steps=40")
    (steps, made), *_ = rounds
    assert made == 20
    assert [updates for read, updates in rounds if read - steps < 50 and updates > made] == []
    learned = [read for read, updates in rounds if updates == 39]
    assert learned[-1] - steps >= 50 + 2 * 17  # the updates went on with two steps each
