"""Two machines, as far as one can be two: network namespaces with addresses of their own, and a cable between them.

One is lost in the middle of a run, which is then continued, and ends as the run of two processes to
which nothing happened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

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
        env = os.environ | {"GLOO_SOCKET_IFNAME": self.cable}  # the host's name is not this address
        command = ["ip", "netns", "exec", self.space, sys.executable, "-m", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def ray(self, temporary: Path, *words: str) -> None:
        said = self.start("ray.scripts.scripts", "start", f"--node-ip-address={self.address}", "--num-cpus=1", *words)
        assert said.wait(timeout=120) == 0, said.communicate()[0]

    def dies(self) -> None:
        """Every process of it, at once."""
        found = subprocess.run(["ip", "netns", "pids", self.space], check=True, capture_output=True, text=True).stdout
        subprocess.run(["kill", "-9", *found.split()], check=False)


@contextmanager
def machine(name: str) -> Iterator[Machine]:
    made = Machine(name)
    subprocess.run(["ip", "netns", "add", made.space], check=True)
    try:
        yield made
    finally:
        made.dies()
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    subprocess.run([sys.executable, "-m", "rlplug", *PPO, f"hydra.run.dir={run}"], check=True)
    return run


def checkpoint_of(run: Path, programs: list[subprocess.Popen[str]]) -> None:
    """Wait for the first one."""
    while not list(run.glob("checkpoints/step_*[0-9]")):
        assert all(program.poll() is None for program in programs), [p.communicate()[0] for p in programs]
        time.sleep(0.02)


def job(machines: list[Machine], *words: str) -> list[subprocess.Popen[str]]:
    where = ("--nnodes=2", "--nproc-per-node=1", f"--master-addr={machines[0].address}", "--master-port=29500")
    return [
        one.start("torch.distributed.run", *where, f"--node-rank={rank}", "-m", "rlplug", *words)
        for rank, one in enumerate(machines)
    ]


@pytest.mark.parametrize("how", ["its processes die", "its cable is cut"])
def test_a_machine_of_torchrun_is_lost(machines: list[Machine], undisturbed: Path, tmp_path: Path, how: str):
    run, (a, b) = tmp_path / "run", machines
    programs = job(machines, *PPO, "hardware=cpu", "hardware.num_nodes=2", f"hydra.run.dir={run}")
    checkpoint_of(run, programs)
    if how == "its processes die":
        b.dies()
    else:
        b.ip("link", "set", b.cable, "down")
    said, _ = programs[0].communicate(timeout=120)
    assert programs[0].returncode == 1
    assert f"continue with: python -m rlplug resume {run}" in said
    if how == "its cable is cut":
        assert (
            f"rlplug: rank 1 ({b.address}) does not answer any more: its machine is down, or the network to it" in said
        )
        said, _ = programs[1].communicate(timeout=120)
        assert f"rlplug: rank 0 ({a.address}) does not answer any more" in said
        b.ip("link", "set", b.cable, "up")
    for program in job(machines, "resume", str(run)):
        said, _ = program.communicate(timeout=300)
        assert program.returncode == 0, said
    require_equal(undisturbed, run)
