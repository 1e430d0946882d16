"""Two machines, emulated by network namespaces with an address each and a cable between them.

One is lost in the middle of a run. The run is resumed then, and ends exactly as an undisturbed run of two processes.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rlplug.testing.comparing import differences_of_runs
from tests.hardware.test_command_line import PPO, require_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]


class Machine:
    """A network namespace ``rlplug-a`` with the address 10.87.0.1, or ``rlplug-b`` with 10.87.0.2."""

    def __init__(self, name: str) -> None:
        self.name, self.space, self.cable = name, f"rlplug-{name}", f"rlplug-eth-{name}"
        self.address = f"10.87.0.{'ab'.index(name) + 1}"

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", "-n", self.space, *words], check=True, capture_output=True, text=True).stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        env = os.environ | {"GLOO_SOCKET_IFNAME": self.cable, "RAY_AUTH_MODE": "token"}  # its host name has no address
        command = ["ip", "netns", "exec", self.space, sys.executable, "-m", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def join(self, *words: str) -> None:
        """Join a Ray cluster, with one core."""
        program = self.start(
            "ray.scripts.scripts", "start", f"--node-ip-address={self.address}", "--num-cpus=1", *words
        )
        assert program.wait(timeout=120) == 0

    def kill(self) -> None:
        """Kill all of its processes at once."""
        found = subprocess.run(["ip", "netns", "pids", self.space], check=True, capture_output=True, text=True).stdout
        for pid in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def machine(name: str) -> Iterator[Machine]:
    made = Machine(name)
    subprocess.run(["ip", "netns", "add", made.space], check=True)
    try:
        yield made
    finally:
        made.kill()
        subprocess.run(["ip", "netns", "delete", made.space], check=True)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        both = [stack.enter_context(machine(name)) for name in "ab"]
        a, b = both
        a.ip("link", "add", a.cable, "type", "veth", "peer", b.cable, "netns", b.space)
        for one in both:
            one.ip("address", "add", f"{one.address}/24", "dev", one.cable)
            one.ip("link", "set", "lo", "up")
            one.ip("link", "set", one.cable, "up")
        yield both


def wait_for_checkpoint(run: Path, programs: list[subprocess.Popen[str]]) -> None:
    """Wait for the first checkpoint."""
    while not list(run.glob("checkpoints/step_*[0-9]")):
        assert all(program.poll() is None for program in programs), [p.communicate()[0] for p in programs]
        time.sleep(0.02)


def job(machines: list[Machine], *words: str) -> list[subprocess.Popen[str]]:
    where = ("--nnodes=2", "--nproc-per-node=1", f"--master-addr={machines[0].address}", "--master-port=29500")
    return [
        one.start("torch.distributed.run", *where, f"--node-rank={rank}", "-m", "rlplug", *words)
        for rank, one in enumerate(machines)
    ]


@pytest.mark.parametrize("how", ["its processes are killed", "its cable is cut"])
def test_a_machine_of_torchrun_is_lost(machines: list[Machine], undisturbed: Path, tmp_path: Path, how: str):
    run, b = tmp_path / "run", machines[1]
    programs = job(machines, *PPO, "hardware=cpu", "hardware.num_nodes=2", f"hydra.run.dir={run}")
    wait_for_checkpoint(run, programs)
    if how == "its processes are killed":
        b.kill()
    else:
        b.ip("link", "set", b.cable, "down")
    printed, _ = programs[0].communicate(timeout=300)
    assert programs[0].returncode == 1
    assert f"continue with: python -m rlplug resume {run}" in printed
    if how == "its processes are killed":
        assert f"\nrlplug: a rank on {b.address} has ended, or the network to it is down; the last good" in printed
        assert "[rank0]:" not in printed  # no traceback but torchrun's own
    else:
        assert f"rlplug: rank 1 ({platform.node()}) does not answer: it has ended, or its machine or network" in printed
        printed, _ = programs[1].communicate(timeout=300)
        assert f"rlplug: rank 0 ({platform.node()}) does not answer: " in printed
        b.ip("link", "set", b.cable, "up")
    for program in job(machines, "resume", str(run)):
        printed, _ = program.communicate(timeout=300)
        assert program.returncode == 0, printed
    require_equal(undisturbed, run)


@pytest.fixture
def cluster(machines: list[Machine]) -> Iterator[str]:
    """Start a Ray cluster with one core on each machine, and yield the setting of its address."""
    with tempfile.TemporaryDirectory(prefix="rlplug-ray-", ignore_cleanup_errors=True) as temporary:
        a, b = machines
        a.join("--head", "--port=6379", f"--temp-dir={temporary}", "--include-dashboard=false")
        b.join(f"--address={a.address}:6379")
        yield f"hardware.ray.address={a.address}:6379"
        for one in machines:
            one.kill()


ACTORS = (*PPO, "hardware=cpu", "hardware.actors.count=2", "hardware.actors.num_cpus=1")


def test_an_actor_restarts_on_another_machine(machines: list[Machine], cluster: str, tmp_path: Path):
    (a, b), run = machines, tmp_path / "run"
    whole = tmp_path / "whole"
    subprocess.run([sys.executable, "-m", "rlplug", *ACTORS, f"hydra.run.dir={whole}"], check=True)
    program = a.start("rlplug", *ACTORS, cluster, f"hydra.run.dir={run}")
    wait_for_checkpoint(run, [program])
    b.kill()
    b.join(f"--address={a.address}:6379")
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    assert "actor 1 (environments 2-3): its process died" in printed
    differ = differences_of_runs(whole, run)  # Ray itself draws from Python's generator when it joins a cluster
    assert [name for name in differ if not name.startswith("rank0: global.python.")] == []


def test_a_rank_on_ray_is_lost(machines: list[Machine], cluster: str, undisturbed: Path, tmp_path: Path):
    (a, b), run = machines, tmp_path / "run"
    words = (*PPO, "hardware=ray", "hardware.devices=2", "hardware.ray.placement_strategy=STRICT_SPREAD", cluster)
    program = a.start("rlplug", *words, f"hydra.run.dir={run}")
    wait_for_checkpoint(run, [program])
    b.kill()
    printed, _ = program.communicate(timeout=120)
    assert program.returncode == 1, printed
    assert any(line.endswith(f"continue with: python -m rlplug resume {run}") for line in printed.splitlines()), printed
    b.join(f"--address={a.address}:6379")
    program = a.start("rlplug", "resume", str(run))
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    require_equal(undisturbed, run)
