"""Evolution strategies: candidates that actors play as they become free, and an update from their returns alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlplug.api import Needs
from rlplug.checkpointing.format import find
from rlplug.cli import main
from tests.contract.tenants import population
from tests.contract.tenants.population import FILES, centered_ranks
from tests.installing import install, site  # noqa: F401  fixtures

ES = (
    "algo=gaussian_es",
    "env=cartpole",
    "model.hidden=[16]",
    "hardware=cpu",
    "logger.only=[]",
    "eval.every=0",
    "eval.episodes=20",
)
TWO = ("num_envs=2", "hardware.actors.count=2", "hardware.actors.num_cpus=0.5")


@pytest.fixture(autouse=True)
def es(install):  # noqa: F811
    install("rlplug-es", "rlplug_es", FILES)


def run(folder: Path, *words: str) -> tuple[dict, dict]:
    """Return the summary and the weights of a run."""
    assert main([*ES, *words, f"hydra.run.dir={folder}"]) == 0
    return json.loads((folder / "summary.json").read_text()), find(folder).tree("weights")["algorithm"]


@pytest.mark.slow
def test_two_actors_learn_to_balance_a_pole(tmp_path):
    summary, _ = run(tmp_path / "run", *TWO, "total_steps=40000")
    print(f"return {summary['eval/return_mean']:.0f} after {summary['env_steps']} steps, {summary['updates']} updates")
    assert summary["eval/return_mean"] > 150
    assert summary["episodes"] == 32 * summary["updates"]


def test_a_run_that_made_more_steps_than_asked_for_goes_on(tmp_path):
    before, _ = run(tmp_path / "run", "total_steps=1000")
    assert before["env_steps"] > 1000
    assert main(["resume", str(tmp_path / "run")]) == 0  # there is nothing to do
    assert main(["resume", str(tmp_path / "run"), "total_steps=4000"]) == 0
    longer, weights = run(tmp_path / "undisturbed", "total_steps=4000")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after["env_steps"] == longer["env_steps"] >= 4000
    resumed = find(tmp_path / "run").tree("weights")["algorithm"]
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)


def test_ranks_do_not_depend_on_scale():
    returns = torch.tensor([10.0, -5.0, 3.0, 7.0])
    torch.testing.assert_close(centered_ranks(returns), torch.tensor([0.5, -0.5, -1 / 6, 1 / 6]))
    assert torch.equal(centered_ranks(returns.exp()), centered_ranks(returns))
    assert population.PROTOCOLS


def test_curiosity_has_nothing_to_reward(capsys, tmp_path):
    assert main([*ES, "exploration=[icm]", f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = "exploration.icm: rewards rows that the learner samples, but gaussian_es uses no rewards; leave it out"
    assert capsys.readouterr().err.strip().endswith(said)
    assert not (tmp_path / "run").exists()


def test_curiosity_is_refused_for_a_loop_that_gives_no_rows(capsys, tmp_path, monkeypatch):
    """Also where the algorithm does not say so; and at the first update if the loop does not say so either."""
    monkeypatch.setattr(population.ES, "needs", classmethod(lambda cls, cfg, spec: Needs()))
    words = (*ES, "total_steps=300", "eval.episodes=1", "exploration=[icm]")
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = "exploration.icm: rewards rows that the learner samples, but gaussian_es learns from no rows"
    assert f"{said} with loop=generations; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(population.Population, "gives_rows", True)
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = "exploration.icm: rewards sampled rows, but the loop passes the learner seed, sign, return"
    assert f"{said}; leave it out" in capsys.readouterr().err
