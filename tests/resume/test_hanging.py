"""An environment that hangs is told of, and one Ctrl-C ends the run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

SHORT = [
    *(
        "env=gymnasium",
        "env.id=tests.resume.test_hanging:Hanging-v0",
        "env.timeout_s=1",
        "logger.only=[]",
        "num_envs=2",
    ),
    *("rollout_fragment_length=64", "algo.sgd_minibatch_size=64", "checkpoint.every=128", "eval.every=0"),
    "hydra.run.dir=run",
]


class Hanging(CartPoleEnv):
    """Hangs at its 300th step."""

    made = 0

    def step(self, action):
        self.made += 1
        while self.made == 300:
            time.sleep(0.01)
        return super().step(action)


gymnasium.register("Hanging-v0", Hanging, max_episode_steps=50)


@pytest.mark.parametrize("vectorization", ["list", "subprocess env.workers=1"])
def test_one_ctrl_c_ends_a_run_that_hangs(vectorization: str, tmp_path: Path):
    command = [sys.executable, "-m", "rlplug", *SHORT, *f"env.vectorization={vectorization}".split()]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    line = program.stderr.readline()
    assert (
        line == "rlplug: environments 0 to 1 have not answered for 1 s (env.timeout_s); Ctrl-C ends the run at once\n"
    )
    program.send_signal(signal.SIGINT)
    _, rest = program.communicate()
    assert program.returncode == 130
    assert "Traceback" not in rest
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["checkpoint"] is not None
