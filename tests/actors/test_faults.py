"""Actors that are killed, hang and raise do not change what is learned."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug.api import Rollout
from rlplug.config import compose
from rlplug.run.build import build, start
from rlplug.run.callbacks import capture
from rlplug.testing.checks.ranks import distances
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch, RunError
from tests.actors.conftest import TWO, play, processes

PPO = (
    *("algo=ppo", "env=cartpole", "env.vectorization=list", "num_envs=4", "model.hidden=[16]", "logger=[]"),
    *("rollout_fragment_length=32", "algo.sgd_minibatch_size=32", "algo.num_sgd_iter=2", "total_steps=100_000"),
)
FAULTY = (*PPO, "env.id=rlplug.testing.worlds:FaultyCartPole-v0")

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def undisturbed():
    return play(PPO, 8)


def kill(*rounds: int) -> Callable[[int, Trainer], None]:
    """Kill an actor before each of these rounds, in turns."""

    def disturb(played: int, trainer: Trainer) -> None:
        if played in rounds:
            processes()[-(rounds.index(played) % 2)].kill()

    return disturb


@pytest.mark.slow
def test_killed_hung_and_raising(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Actors are killed; an environment hangs once; others raise and are restarted alone. A restarted actor continues
    at the very row, and the run equals that of one process in which nothing hung or was killed."""
    words = (*FAULTY, "+env.kwargs.raises=0.01", "+env.kwargs.malformed=0.01", "env.restart_failed=true")
    words = (*words, f"+env.kwargs.hangs={tmp_path / 'hung'}")
    disturbed = play((*words, *TWO, "hardware.actors.timeout_s=3"), 8, kill(4, 5))
    said = capfd.readouterr().err
    assert len(re.findall(r"rlplug: actor \d \(environments \d-\d\): its process died \(process \d+ on", said)) == 2
    assert re.search(r"no step for 3 s; last seen at row \d+ of 32", said)
    assert distances(play(words, 8), disturbed) == []  # the environment hangs only once


@pytest.mark.slow
def test_hung(undisturbed, capfd: pytest.CaptureFixture[str]):
    """An actor that makes no step is restarted, and the line says what it did last."""

    def disturb(played: int, trainer: Trainer) -> None:
        if played == 3:
            os.kill(processes()[0].pid, signal.SIGSTOP)

    assert distances(undisturbed, play((*PPO, *TWO, "hardware.actors.timeout_s=3"), 8, disturb)) == []
    assert "no step for 3 s; last seen " in capfd.readouterr().err


@pytest.mark.slow
def test_a_worker_process_of_an_actor_is_killed(undisturbed, capfd: pytest.CaptureFixture[str]):
    """Its actor is restarted at the very row, with new worker processes."""

    def disturb(played: int, trainer: Trainer) -> None:
        if played in (3, 5):
            processes()[0].children()[0].kill()

    words = (*PPO, "env.vectorization=subprocess", *TWO)
    assert distances(undisturbed, play(words, 8, disturb)) == []
    died = r"rlplug: actor \d \(environments \d-\d\): the worker process of environments \d was killed by SIGKILL"
    assert len(re.findall(died, capfd.readouterr().err)) == 2


@pytest.mark.slow
def test_ignored(undisturbed):
    """The run goes on with the columns of the other actor, and counts their steps."""
    words = (*PPO, *TWO, "hardware.actors.on_failure=ignore")
    left = play(words, 8, kill(4))
    whole = {"env_steps": undisturbed["progress.env_steps"]}
    assert 0.6 * whole["env_steps"] < left["progress.env_steps"] < whole["env_steps"]
    with pytest.raises(RunError, match="no actor is left; the last one was actor"):
        play(words, 8, kill(2, 3))


@pytest.mark.slow
def test_stopped():
    with pytest.raises(RunError, match=r"actor [01] \(environments \d-\d\): its process died"):
        play((*PPO, *TWO, "hardware.actors.on_failure=stop"), 8, kill(2))


@pytest.mark.slow
def test_raises_every_time(capfd: pytest.CaptureFixture[str]):
    """It is restarted first at the same row, then with other episodes; its first error ends the message."""
    with pytest.raises(RunError) as stopped:
        play((*FAULTY, *TWO, "+env.kwargs.raises=1.0", "hardware.actors.max_restarts=2"), 2)
    message = str(stopped.value)
    assert "failed 3 times in a row; the first error: environment" in message
    assert message.endswith("OSError: the pole is stuck")
    assert capfd.readouterr().err.count("raised in step():") >= 3


@pytest.mark.slow
def test_fails_for_ever(capfd: pytest.CaptureFixture[str]):
    """An actor that fails now and again, and plays rounds in between, is not restarted without end."""
    words = (*FAULTY, *TWO, "+env.kwargs.raises=0.02", "hardware.actors.max_restarts=50")
    limit = r"was restarted 2 times \(hardware.actors.max_total_restarts\), and failed again: environment"
    with pytest.raises(RunError, match=limit):
        play((*words, "hardware.actors.max_total_restarts=2"), 40)
    assert capfd.readouterr().err.count("raised in step():") >= 3


def test_stops_with_one_traceback(capfd: pytest.CaptureFixture[str]):
    """The run's last words are the traceback; nothing says it before."""
    with pytest.raises(RunError, match="OSError: the pole is stuck"):
        play((*FAULTY, *TWO, "+env.kwargs.raises=1.0", "hardware.actors.on_failure=stop"), 2)
    assert "the pole is stuck" not in capfd.readouterr().err


def test_several_rounds_in_flight(tmp_path: Path):
    """Actors play on with older weights during updates; every step counts once, even if an actor dies.

    A checkpoint notes that it does not hold these rounds.
    """
    words = (
        *("algo=sac", "env=pendulum", "num_envs=2", "model.hidden=[16]", "train_batch_size=16", "logger=[]"),
        *("num_steps_sampled_before_learning_starts=20", "rollout_fragment_length=5", "total_steps=120"),
        *(*TWO, "loop.in_flight=2", "loop.broadcast_interval=3"),
    )
    requested: set[tuple[int, int]] = set()

    def disturb(played: int, trainer: Trainer) -> None:
        handle = trainer.collector.pool.handles[0]
        assert processes()[0].nice() == os.nice(0) + 5  # the learner goes first, and other work does not starve it
        requested.update((trainer.progress.updates, request.version) for request in handle.requests)
        if played == 6:
            (note,) = capture(trainer).manifest["not_restored"]
            assert note == "rounds with older weights: actors play the next ones with the newest"
            processes()[0].kill()

    ended = play(words, 100, disturb)
    assert ended["progress.env_steps"] == 120
    assert max(updates - version for updates, version in requested) == 30


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
def test_environments_are_made_anew(vectorization: str, capfd: pytest.CaptureFixture[str]):
    """Without actors too."""
    words = (*FAULTY, "+env.kwargs.raises=0.01", "+env.kwargs.malformed=0.01", "env.restart_failed=true")
    play((*words, f"env.vectorization={vectorization}"), 4)
    said = capfd.readouterr().err
    assert "failed, and is replaced: OSError: the pole is stuck" in said
    assert "failed, and is replaced: environment" in said
    assert "observation has shape [3]; its space declares [4]" in said


def test_an_observation_out_of_bounds_is_told_once(capfd: pytest.CaptureFixture[str]):
    """By the learner, whichever actors have met one."""
    play((*FAULTY, *TWO, "+env.kwargs.beyond=0.05"), 2)
    said = capfd.readouterr().err
    assert said.count("beyond the bounds of its space") == 1
    assert "the run continues" in said


def test_the_row_of_a_failed_step_ends_its_episode(capfd: pytest.CaptureFixture[str]):
    """The failed step is not valid, though the row before it ended no episode; the next row begins another one."""
    words = (*FAULTY, "+env.kwargs.raises=0.03", "env.restart_failed=true")
    cut = 0
    with closing(build(compose(words), Path())) as trainer:
        before = torch.zeros(4, dtype=torch.bool)  # whether the row before ended an episode
        for _ in range(5):
            segment = trainer.collector.player.collect(32)
            ended = (segment["terminated"] | segment["truncated"])[:-1]
            expected = torch.cat([before[None], ended[:-1]])
            broken = ~segment["valid"][:-1] & ~expected
            assert segment["is_first"][1:][broken].all()
            assert not segment["reward"][:-1][broken].any()
            cut, before = cut + int(broken.sum()), ended[-1].clone()
    assert cut > 5
    assert cut == capfd.readouterr().err.count("failed, and is replaced: OSError")


def kill_next(known: list[int]) -> None:
    """Kill the next actor process that is not among ``known``, as soon as it appears."""

    def watch() -> None:
        while not (new := [process for process in processes() if process.pid not in known]):
            time.sleep(0.01)
        new[-1].kill()

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.slow
def test_killed_while_it_restarts(undisturbed, capfd: pytest.CaptureFixture[str]):
    """It failed while it started, not again at that row: it continues there."""

    def disturb(played: int, trainer: Trainer) -> None:
        if played == 4:
            known = [process.pid for process in processes()]
            kill_next(known)
            processes()[-1].kill()

    assert distances(undisturbed, play((*PPO, *TWO), 8, disturb)) == []
    assert capfd.readouterr().err.count("its process died") == 2


@pytest.mark.slow
def test_killed_while_it_starts(undisturbed, capfd: pytest.CaptureFixture[str]):
    """With on_failure=ignore, an actor that never played is restarted all the same."""
    kill_next([process.pid for process in processes()])
    assert distances(undisturbed, play((*PPO, *TWO, "hardware.actors.on_failure=ignore"), 8)) == []
    assert capfd.readouterr().err.count("its process died") == 1


def test_the_open_row_of_a_lost_actor():
    """Row 0 is the last observation of the segment before, also if the columns have no other valid row."""
    words = (*PPO, *TWO, "hardware.actors.on_failure=ignore")
    with closing(build(compose(words), Path())) as trainer:
        start(trainer)

        def collect() -> Batch:
            trainer.collector.submit(Rollout(32, "explore", 0))
            return trainer.collector.poll()[0].batch

        for _ in range(2):
            segment = collect()
        last = segment["obs"][-1].clone()
        processes()[-1].kill()
        segment = collect()
        assert (~segment["valid"]).all(0).sum() == 2
        assert torch.equal(segment["obs"][0], last)


@pytest.mark.slow
def test_a_busy_learner_ends_no_actor(capfd: pytest.CaptureFixture[str]):
    """While the learner is busy it gets no heartbeats, and the actors play on."""
    words = ("algo=dqn", "env=cartpole", "env.id=rlplug.testing.worlds:SlowCartPole-v0", "+env.kwargs.seconds=0.1")
    words = (*words, "env.vectorization=list", "num_envs=2", "model.hidden=[16]", "logger=[]", "total_steps=10_000")
    words = (*words, "rollout_fragment_length=64", "loop.in_flight=2")

    def disturb(played: int, trainer: Trainer) -> None:
        if played == 1:
            time.sleep(2.5)

    counted = play(
        (*words, "num_steps_sampled_before_learning_starts=128", *TWO, "hardware.actors.timeout_s=2"), 64, disturb
    )
    assert counted["progress.env_steps"] > 128
    assert "no step for" not in capfd.readouterr().err
