"""On a CUDA device, what is replayed is what would run eagerly, to the bit. Nothing here runs where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlplug import load, tree
from rlplug.compiler.captured import CudaGraphs
from rlplug.compiler.compiler import EAGER, Compiler
from rlplug.compiler.parity import CALLS
from rlplug.config import compose
from rlplug.run.build import build
from tests.compiler.test_recordings import Function, equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
OFF_POLICY = ("tuned=none", "train_batch_size=32", "num_steps_sampled_before_learning_starts=64", "num_envs=2")
ROLLOUTS = ("tuned=none", "num_envs=4", "rollout_fragment_length=32")
ON_DEVICE = ("env=cartpole_torch", "tuned=none", "num_envs=64", "rollout_fragment_length=16")
ON_DEVICE += ("algo.sgd_minibatch_size=256",)
RUNS = {
    "sac": ("algo=sac", "env=pendulum", *OFF_POLICY),
    "sac on device": ("algo=sac", "env=pendulum", "buffer.device=learner", *OFF_POLICY),
    "sac discrete": ("algo=sac", "env=cartpole", *OFF_POLICY),
    "td3": ("algo=td3", "env=pendulum", *OFF_POLICY),
    "dqn": ("algo=dqn", "env=cartpole", "algo.target_update_period=7", *OFF_POLICY),
    "dqn prioritized": ("algo=dqn", "env=cartpole", "buffer=prioritized", *OFF_POLICY),
    "dqn with icm": ("algo=dqn", "env=cartpole", "exploration=[epsilon_greedy,icm]", *OFF_POLICY),
    "ppo": ("algo=ppo", "env=cartpole", "algo.sgd_minibatch_size=32", *ROLLOUTS),
    "ppo lstm": ("algo=ppo", "env=cartpole", "model=lstm", "algo.sgd_minibatch_size=64", *ROLLOUTS),
    "ppo icm": ("algo=ppo", "env=cartpole", "exploration=[icm]", "algo.sgd_minibatch_size=64", *ROLLOUTS),
    "ppo on device": ("algo=ppo", *ON_DEVICE),
    "agents on device": ("algo=mappo", "env=spread_torch", *ROLLOUTS),
    "a2c": ("algo=a2c", "env=cartpole", "tuned=none", "num_envs=4", "algo.opt_type=adam"),
}
CUDA = ("hardware=1gpu", "logger.only=[]", "eval.every=0", "deterministic=true", "total_steps=1_000_000")


def history(words, compile, rounds=16):
    """Return what a run holds after some rounds, and what it did not compile."""
    with closing(build(compose([*CUDA, *words, f"compile={compile}"]), Path())) as trainer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while trainer.progress.updates < rounds:
                trainer.collect("random" if trainer.progress.env_steps < trainer.ctx.learning_starts else "explore")
                if trainer.ready() and trainer.progress.env_steps >= trainer.ctx.learning_starts:
                    trainer.update()
        trainer.learner.check_finite()
        held = tree.map(torch.clone, trainer.policy.state()), trainer.learner.state()["optimizers"]
        return held, trainer.progress.env_steps, [str(one.message) for one in caught if "compile" in str(one.message)]


@pytest.mark.parametrize("run", RUNS)
def test_a_replayed_run_is_the_eager_one_to_the_bit(run):
    eager, replayed = history(RUNS[run], "off"), history(RUNS[run], "auto")
    assert eager[1] == replayed[1]
    equal(eager[0][0], replayed[0][0])
    equal(eager[0][1], replayed[0][1])
    assert replayed[2] == [] or run == "ppo lstm", "where an episode ends is known when it runs"


def call(compiler, function, n, begin=0):
    return [
        compiler._call((function,), "it", function, {"x": torch.full((2, 3), float(i), device="cuda")})
        for i in range(begin, begin + n)
    ]


class OnCuda(Function):
    def __init__(self):
        super().__init__()
        self.weight = self.weight.cuda()
        self.generator = torch.Generator("cuda").manual_seed(1)

    def draw(self):
        return torch.rand(3, generator=self.generator, device="cuda")


def test_a_function_with_draws_is_recorded():
    function, plain = OnCuda(), OnCuda()
    compiler = Compiler(torch.device("cuda", 0), True, [function.generator])
    found = call(compiler, function, 10)
    for i, one in enumerate(found):
        assert torch.equal(one["row"], plain({"x": torch.full((2, 3), float(i), device="cuda")})["row"])
    assert function.calls == EAGER + CALLS + 1
    assert torch.equal(function.generator.get_state(), plain.generator.get_state())


def test_a_recording_that_fails_leaves_everything_as_it_was():
    class Fails(OnCuda):
        def __call__(self, batch):
            found = super().__call__(batch)
            if self.calls == EAGER + 1:
                found["sum"].item()
            return found

    function, plain = Fails(), OnCuda()
    compiler = Compiler(torch.device("cuda", 0), True, [function.generator])
    call(compiler, function, EAGER)
    with pytest.warns(UserWarning, match="it could not be compiled; it runs eagerly"):
        assert call(compiler, function, 1) == [None]
    for i in range(EAGER):
        plain({"x": torch.full((2, 3), float(i), device="cuda")})
    assert torch.equal(function.weight, plain.weight)
    assert torch.equal(function.generator.get_state(), plain.generator.get_state())
    again = OnCuda()  # and others can still be recorded, and draw
    found = call(Compiler(torch.device("cuda", 0), True, [again.generator]), again, 8)
    assert len(found) == 8
    function({"x": torch.ones(2, 3, device="cuda")})
    torch.rand(3, device="cuda")


def test_what_the_host_waits_for_is_not_recorded():
    class Waits(OnCuda):
        def __call__(self, batch):
            found = super().__call__(batch)
            return found if found["sum"] > -1e9 else {}

    function = Waits()
    compiler = Compiler(torch.device("cuda", 0), True, [function.generator])
    with pytest.warns(UserWarning, match="it runs eagerly: the host waits for the device at"):
        assert None not in call(compiler, function, EAGER)
    assert call(compiler, function, 1) == [None]


def test_capture_is_refused_between_two_recordings_of_one_pool():
    """Outputs of one recording are not overwritten by another of the same pool."""
    graphs = CudaGraphs(torch.device("cuda", 0))
    assert graphs is not None
    first, second = OnCuda(), OnCuda()
    compiler = Compiler(torch.device("cuda", 0), True, [first.generator, second.generator])
    kept = call(compiler, first, 7)[-1]["row"].clone(), call(compiler, first, 1, 7)[-1]
    before = kept[1]["row"].clone()
    call(compiler, second, 10)
    assert torch.equal(kept[1]["row"], before)


KILLED = {
    "sac": ("algo=sac", "env=pendulum", "total_steps=4000", "checkpoint.every=500", "tuned=none"),
    "ppo on device": (
        *("algo=ppo", "env=cartpole_torch", "num_envs=256", "total_steps=400_000", "checkpoint.every=50_000"),
    ),
}


@pytest.mark.parametrize("run", KILLED)
def test_a_killed_run_is_continued_to_the_bit(run, tmp_path):
    line = [sys.executable, "-m", "rlplug"]
    words = [*KILLED[run], "hardware=1gpu", "logger.only=[]", "eval.every=0", "deterministic=true", "seed=1"]
    subprocess.run([*line, *words, f"hydra.run.dir={tmp_path / 'whole'}"], check=True)
    process = subprocess.Popen([*line, *words, f"hydra.run.dir={tmp_path / 'killed'}"])
    checkpoints = tmp_path / "killed" / "checkpoints"
    while process.poll() is None and len([*checkpoints.glob("[0-9s]*")]) < 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    subprocess.run([*line, "resume", str(tmp_path / "killed")], check=True)
    whole, killed = (load(tmp_path / name).algorithm.state_dict() for name in ("whole", "killed"))
    equal(dict(whole), dict(killed))
