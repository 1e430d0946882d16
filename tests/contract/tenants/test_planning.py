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
from rlplug.envs.env_list import EnvList
from rlplug.results.export import traced
from rlplug.results.export_policy import Policy
from rlplug.run.build import build
from rlplug.testing import conformance
from rlplug.types import ConfigError
from tests.contract.tenants import planning
from tests.contract.tenants.planning import FILES, CartPoleModel
from tests.installing import install, site  # noqa: F401  fixtures

WORDS = ("algo=lookahead", "env=modeled", "hardware=cpu", "logger.only=[]", "rollout_fragment_length=8")


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
        with pytest.raises(ConfigError, match=r"^env: this environment has no simulator, which the algorithm needs"):
            build(compose([*words]), Path())


def push_left(step):
    return {"action": torch.zeros(len(step["obs"]), dtype=torch.long)}


@pytest.mark.parametrize("check", [f"{what}-modeled" for what in conformance.OF_ALGORITHM])
def test_the_kit_takes_a_planner_that_learns_nothing(check):
    """It has no parameters, no optimizers and no terms."""
    (found,) = (one for one in conformance.checks_of("algo", "lookahead") if one.what == check)
    found()


def test_a_planner_that_cannot_be_exported_is_refused_and_passes_the_kit(monkeypatch):
    def act(self, step, carry, mode):
        best = max(range(self.actions), key=lambda a: self.value_of(self.model.step(step["obs"], a)).sum().item())
        return {"action": torch.full(step["obs"].shape[:1], best)}, carry

    monkeypatch.setattr(planning.Lookahead, "act", act)
    (found,) = (one for one in conformance.checks_of("algo", "lookahead") if one.what == "export-modeled")
    found()
    said = (
        r"^algo: the policy plans through the environment's simulator, .* line \d+, `best = .*rlplug.load\(run\).act$"
    )
    with closing(build(compose([*WORDS]), Path())) as trainer, pytest.raises(ConfigError, match=said):
        traced(Policy(trainer.algorithm, trainer.ctx, trainer.learner.normalizer))


def test_the_kit_finds_a_planner_that_ignores_its_seed(monkeypatch):
    reset = EnvList.reset
    monkeypatch.setattr(EnvList, "reset", lambda self, seeds, tasks=None: reset(self, [0] * len(seeds)))
    monkeypatch.setattr(planning.Lookahead, "act", lambda self, step, carry, mode: (push_left(step), carry))
    (found,) = (one for one in conformance.checks_of("algo", "lookahead") if one.what == "determinism-modeled")
    with pytest.raises(AssertionError, match="a run with seed 1 ends with the rows of seed 0: the seed is ignored"):
        found()


def step(change):
    """Return a ``step`` whose row is another one; ``change`` is of the simulator, the row and what was given."""

    def changed(self, env_state, action):
        row = CartPoleModel.step(self, env_state, action)
        return {key: leaf for key, leaf in (row | change(row, env_state, action)).items() if leaf is not None}

    return {"step": changed}


ONES = step(lambda row, state, action: {"reward": torch.ones(len(action))})


def late(row, state, action):
    return {"terminated": row["terminated"] & (row["obs"][..., 2].abs() > 0.25)}


def cleared(self, batch):
    paid = CartPoleModel.reward(self, batch)
    if "action" in batch:  # not called by step()
        batch["obs"].zero_()
    return paid


def overwritten(row, state, action):
    state.copy_(row["env_state"])
    return {}


SAYS = "differs from a step of the environment: it gives "
WRONG = {
    "backwards": ({"step": lambda self, state, action: CartPoleModel.step(self, state, 1 - action)}, f"{SAYS}obs "),
    "late": (step(late), f"{SAYS}terminated "),
    "paid": ({"reward": lambda self, batch: (~batch["terminated"]).float()}, f"{SAYS}reward "),
    "generous": (  # pays more when it is asked for the reward only
        ONES | {"reward": lambda self, batch: torch.full((len(batch["obs"]),), 2.0)},
        "simulator().reward() differs from the reward of step(): [(2.0, 1.0)], which should be equal",
    ),
    "wide": (
        ONES | {"reward": lambda self, batch: torch.ones(len(batch["obs"]), 1)},
        "simulator().reward() gives shape [",
    ),
    "clearing": ({"reward": cleared}, "simulator().reward() changes its argument"),
    "overwriting": (step(overwritten), "changes its argument"),
    "noisy": (
        step(lambda row, state, action: {"reward": row["reward"] + torch.rand(())}),
        "gives different results in two calls",
    ),
    "mixing": (
        step(lambda row, state, action: {"obs": row["obs"] + (0.01 if len(action) == 1 else 0)}),
        "for a single column gives obs ",
    ),
    "short": (step(lambda row, state, action: {"env_state": None}), "gives no env_state"),
    "truncating": (
        step(lambda row, state, action: {"truncated": row["terminated"]}),
        "truncates where the environment does not",
    ),
}


def episodes():
    return next(
        check for check in conformance.checks_of("env", "modeled", env="modeled") if check.what == "episodes-modeled"
    )


def test_the_kit_takes_a_simulator_that_steps_as_the_environment():
    episodes()()


@pytest.mark.parametrize("model", WRONG)
def test_the_kit_finds_a_simulator_that_does_not(model, monkeypatch):
    members, said = WRONG[model]
    monkeypatch.setattr(planning, "CartPoleModel", type("Wrong", (CartPoleModel,), members))
    with pytest.raises(AssertionError) as error:
        episodes()()
    assert said in str(error.value)


@pytest.mark.parametrize("words", [(), ("algo=ppo",), ("algo=ppo", "env=modeled")])
def test_an_environment_is_checked_in_runs_of_its_own(words):
    """Its manifest, or whoever calls the check, may name only an algorithm, or nothing."""
    planning.MADE.clear()
    run = next(check for check in conformance.checks_of("env", "modeled", overrides=words) if check.what == "in-a-run")
    run()
    assert planning.MADE
