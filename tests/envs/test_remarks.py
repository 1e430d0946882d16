"""What models do with an observation, and is not plain from its space, is told once when a run starts."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlplug.cli import main

SPACES = {"image": Box(0, 255, (4, 4, 3), np.float32), "number": Box(0, 255, (2,), np.int64), "id": Discrete(10_001)}
SAID = {
    "image": "pixels from 0 to 255 of type float32 are divided by 255",
    "number": "numbers from 0 to 255 of type int64 go into networks as they are",
    "id": "10,001 choices, not one-hot",
}


class Wide(gymnasium.Env):
    """Observes ones. Episodes of 5 steps."""

    action_space = Discrete(2)

    def __init__(self, what="image"):
        self.observation_space = SPACES[what]
        self.one = np.ones(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.one, {}

    def step(self, action):
        self.steps += 1
        return self.one, 1.0, self.steps == 5, False, {}


gymnasium.register("Wide-v0", Wide)


@pytest.mark.parametrize(("what", "algo"), [("image", "ppo"), ("number", "ppo"), ("id", "ppo"), ("id", "dqn")])
def test_a_run_tells_it_once(what, algo, tmp_path: Path, capsys):
    words = [f"algo={algo}", "env=gymnasium", "env.id=Wide-v0", f"+env.kwargs.what={what}", "eval.episodes=1"]
    words += ["eval.every=0", "num_envs=1", "rollout_fragment_length=256", "model.hidden=[4]", "logger=[]"]
    words += ["hardware=cpu", "compile=off", f"total_steps={256 if algo == 'ppo' else 1280}"]
    assert main([*words, *["buffer.capacity=2000"] * (algo == "dqn"), f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "observation: " in line]
    assert len(told) == 1
    assert SAID[what] in told[0]
