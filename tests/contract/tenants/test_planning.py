"""A simulator behind ``ctx.simulator()``: one step of planning balances a pole."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from rlplug.agent import evaluate
from rlplug.api import Job
from rlplug.cli import main
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.types import ConfigError
from tests.contract.tenants.planning import FILES, CartPoleModel
from tests.installing import install, site  # noqa: F401  fixtures

WORDS = ("algo=lookahead", "env=modeled", "hardware=cpu", "logger=[]", "rollout_fragment_length=8")


@pytest.fixture(autouse=True)
def plan(install):  # noqa: F811
    install("rlplug-plan", "rlplug_plan", FILES)


def test_one_step_of_planning_beats_random_actions():
    with closing(build(compose([*WORDS]), Path())) as trainer:
        jobs = [Job(0, episodes=10, mode="greedy"), Job(1, episodes=10, mode="random")]
        planned, drawn = (float(batch["return"].mean()) for _, batch in trainer.play(jobs))
    print(f"return {planned:.0f} with one step of planning, {drawn:.0f} with random actions")
    assert planned > 5 * drawn


def test_a_loaded_agent_plans(tmp_path):
    assert main([*WORDS, "total_steps=64", "eval.every=0", "eval.episodes=4", f"hydra.run.dir={tmp_path}"]) == 0
    assert evaluate(tmp_path)["eval/return_mean"] > 150


def test_the_simulator_is_the_environment():
    env, model = gymnasium.make("CartPole-v1").unwrapped, CartPoleModel()
    obs, _ = env.reset(seed=3)
    for action in (0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        row = model.step(torch.tensor(np.array(obs))[None], torch.tensor([action]))
        obs, _, terminated, _, _ = env.step(action)
        np.testing.assert_allclose(row["obs"][0].numpy(), obs, atol=1e-5)
        assert bool(row["terminated"][0]) == terminated
        if terminated:
            break
    assert terminated


def test_an_environment_without_a_simulator_is_refused():
    for words in ((*WORDS, "env.model=false"), (*WORDS[:1], "env=cartpole", *WORDS[2:])):
        with pytest.raises(ConfigError, match=r"^env: this environment offers no simulator, which the algorithm plans"):
            build(compose([*words]), Path())
