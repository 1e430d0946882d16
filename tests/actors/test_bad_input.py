"""Impossible settings are refused with one message, before anything is started or written."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from rlplug.config import compose
from rlplug.distributed.fabric import free_port
from rlplug.run import launch
from rlplug.types import ConfigError, RunError

SAC = ("algo=sac", "env=pendulum", "num_envs=2", "logger.only=[]")
PPO = ("algo=ppo", "env=cartpole", "tuned=none", "num_envs=4", "logger.only=[]")
CORES = os.cpu_count()
CASES = {
    "more actors than environments": (
        (*SAC, "hardware.actors.count=3", "hardware.actors.num_cpus=0"),
        "hardware.actors.count: num_envs=2 cannot be shared equally among 3 actors; use 1 or 2",
    ),
    "more cores than there are": (
        (*PPO, "hardware.actors.count=4", "hardware.actors.num_cpus=1000"),
        r"hardware.actors.count: 4 actors with 1000 cores each need more than the \d+ of this machine; "
        r"use hardware.actors.num_cpus=[\d.]+ to share them",
    ),
    "a device that is not there": (
        (*PPO, "hardware.actors.count=2", "hardware.actors.num_cpus=0", "hardware.actors.num_gpus=0.5"),
        "2 actors with 0.5 CUDA devices each need more than the 0 of this machine; use hardware.actors.num_gpus=0",
    ),
    "older weights for an algorithm that cannot learn from them": (
        (*PPO, "hardware.actors.count=2", "loop.in_flight=2"),
        "loop.in_flight: collects with older weights, which ppo does not support",
    ),
    "older weights, by the interval": (
        (*PPO, "hardware.actors.count=2", "loop.broadcast_interval=4"),
        "loop.broadcast_interval: collects with older weights",
    ),
    "evaluation actors without actors": (
        (*PPO, "hardware.actors.evaluation=1"),
        "hardware.actors.evaluation: needs actors that collect as well: hardware.actors.count=1",
    ),
    "actors and ranks that already have all cores": (
        (*PPO, "hardware=ray", "hardware.devices=1", f"hardware.ray.num_cpus={CORES}", "hardware.actors.count=1"),
        "hardware.actors.count: 1 actors with 1 cores each need more than the 0 of this machine that 1 ranks leave;"
        " use hardware.actors.num_cpus=0",
    ),
    "a precision that the processors of a cluster lack": (
        (*PPO, "hardware=ray", "hardware.precision=16-mixed"),
        "hardware.precision: CPUs do not",
    ),
    "an unknown option": ((*PPO, "+hardware.actors.counts=2"), "hardware.actors.counts"),
    "an unknown choice": ((*PPO, "hardware.actors.on_failure=retry"), "hardware.actors.on_failure: 'retry'"),
    "a precision that processors lack": (
        (*PPO, "hardware.precision=16-mixed"),
        "hardware.precision: CPUs do not",
    ),
}


@pytest.mark.parametrize(("words", "message"), CASES.values(), ids=CASES.keys())
def test_refused(words: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message), closing(launch.build(compose(words), Path())):
        pass


def refused(tmp_path: Path, address: str) -> str:
    """Return the message of a refused run, which writes no folder."""
    words = (*PPO, "hardware.actors.count=2", "hardware.actors.num_cpus=0", f"hardware.ray.address={address}")
    with pytest.raises(ConfigError) as error:
        launch.train(compose(words), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(error.value)


def test_an_address_where_nothing_answers(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    message = refused(tmp_path, f"127.0.0.1:{port}")
    assert f"hardware.ray.address: no Ray cluster answers at 127.0.0.1:{port} (Connection refused)" in message


def test_an_address_where_another_program_answers(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refused(tmp_path, f"127.0.0.1:{port}")
    assert (
        f"hardware.ray.address: no Ray cluster answers at 127.0.0.1:{port} (another program listens there)" in message
    )


@pytest.mark.slow
def test_a_cluster_that_asks_for_its_token(tmp_path: Path):
    """This machine has none."""
    token, port = tmp_path / "token", free_port()
    token.write_text("a" * 64)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=1"]
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with subprocess.Popen([*ray, "--include-dashboard=false"], env=env, stdout=subprocess.DEVNULL) as head:
        try:
            said = "Connection refused"
            while "Connection refused" in said and head.poll() is None:  # until it listens
                said = refused(tmp_path, f"127.0.0.1:{port}")
        finally:
            started = descendants(head)
            head.terminate()
            psutil.wait_procs(started, 60.0)
    assert said == (
        f"hardware.ray.address: Ray at 127.0.0.1:{port} requires a token: copy ~/.ray/auth_token from the cluster's"
        " first machine to this one"
    )


def test_no_address(tmp_path: Path):
    assert "hardware.ray.address: 'there' is not host:port" in refused(tmp_path, "there")


def test_ray_leaves_sigterm_alone(cluster: str):
    """Ray would replace its handler."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


RAY = (*PPO, "hardware.actors.count=2", "hardware.actors.num_cpus=0")


def test_an_actor_that_starts_too_slowly(tmp_path: Path, cluster: str):
    slow = ("num_envs=2", "env.id=rlplug.testing.worlds:SlowCartPole-v0", "+env.kwargs.to_make=3")
    words = (*RAY, *slow, "hardware.actors.start_timeout_s=0.5", "hardware.actors.max_restarts=0")
    message = r"^actor \d .*: no step for 0.5 s; last seen starting; raise hardware.actors.start_timeout_s"
    with pytest.raises(RunError, match=message):
        launch.train(compose(words), tmp_path / "run")


def test_ray_that_cannot_be_started(tmp_path: Path):
    """A failure of this machine is no bad input."""
    words = [sys.executable, "-m", "rlplug", *RAY, f"hydra.run.dir={tmp_path / 'run'}"]
    (tmp_path / "file").touch()
    done = subprocess.run(
        words, env={**os.environ, "RAY_TMPDIR": str(tmp_path / "file")}, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlplug: Ray cannot be started on this machine: ")


def descendants(program: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(program.pid).children(recursive=True)


def test_a_cluster_of_a_run_is_of_this_machine_and_ends_with_the_run(tmp_path: Path):
    """It is no other one, such as that of RAY_ADDRESS, which does not exist."""
    words = [sys.executable, "-m", "rlplug", *RAY, "total_steps=1e9", f"hydra.run.dir={tmp_path / 'run'}"]
    program = subprocess.Popen(words, text=True, env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"})
    while program.poll() is None and not (tmp_path / "run" / "manifest.json").exists():
        time.sleep(0.1)
    everyone = descendants(program)
    listening = [at for process in everyone for at in process.net_connections() if at.status == "LISTEN"]
    assert listening
    assert [at for at in listening if not ip_address(at.laddr.ip.removeprefix("::ffff:")).is_loopback] == []
    program.kill()
    program.wait()
    _, alive = psutil.wait_procs(everyone, 20.0)
    for process in alive:
        process.kill()
    assert alive == []


def test_sigterm_while_a_cluster_starts(tmp_path: Path):
    words = [sys.executable, "-m", "rlplug", *RAY, f"hydra.run.dir={tmp_path / 'run'}"]
    program = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not any("gcs_server" in " ".join(process.cmdline()) for process in descendants(program)):
        time.sleep(0.005)
    everyone = descendants(program)
    program.send_signal(signal.SIGTERM)
    _, printed = program.communicate()
    assert (program.returncode, printed) == (143, "")
    assert psutil.wait_procs(everyone, 60.0)[1] == []
