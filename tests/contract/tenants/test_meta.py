"""MAML on goals in the plane: tasks and adapted weights travel with jobs, and the evaluation adapts first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.spaces import Discrete

from rlplug import tree
from rlplug.cli import main
from rlplug.results.evaluate import evaluate
from rlplug.types import EnvSpec, Group
from tests.contract import worlds
from tests.contract.tenants import meta
from tests.installing import install, site  # noqa: F401  fixtures

MAML = ("algo=maml", "env=goals", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=20")
TWO = ("num_envs=2", "hardware.actors.count=2", "hardware.actors.num_cpus=0.5")


@pytest.fixture(autouse=True)
def maml(install):  # noqa: F811
    install("rlplug-maml", "rlplug_maml", meta.FILES)


def run(folder: Path, *words: str) -> dict:
    assert main([*MAML, *words, f"hydra.run.dir={folder}"]) == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_step_of_adaptation_pays_after_meta_learning(tmp_path, seed):
    trained = run(tmp_path / "run", "total_steps=160000", f"seed={seed}")
    before, after = trained["eval/return_before"], trained["eval/return_mean"]
    print(f"seed {seed}: {before:.2f} before adaptation, {after:.2f} after it, {trained['updates']} updates")
    assert after > before + 0.5
    again = evaluate(tmp_path / "run")
    assert again["eval/return_mean"] == after
    assert again["eval/return_before"] == before


def test_actors_beside_training_cannot_play_an_evaluation_of_its_own(tmp_path, capsys):
    assert main([*MAML, *TWO, "hardware.actors.evaluation=1", f"hydra.run.dir={tmp_path / 'run'}"]) != 0
    said = "hardware.actors.evaluation: runs greedy episodes, but maml has its own evaluation; use 0"
    assert said in "".join(capsys.readouterr())


def a_maml():
    """Four tasks, leaves ``[4, 6, 2]``."""
    spec = EnvSpec({"agent": Group(worlds.box(3), Discrete(2))}, offers=frozenset({"tasks"}))
    ctx = worlds.context(spec, worlds.Layer)
    algorithm = meta.MAML(meta.MAML.Config(gamma=0.9, inner_lr=0.3, lr=1e-3, hidden=4, tasks=4), ctx)
    batch = {
        name: meta.stacked([worlds.stream(6, 2, seed + k) for k in range(4)])
        for name, seed in (("pre", 0), ("post", 9))
    }
    return ctx, algorithm, batch


def test_microbatches_change_no_gradient():
    ctx, algorithm, batch = a_maml()
    batch = algorithm.prepare(batch)
    whole = worlds.gradients(worlds.learner(ctx, algorithm), batch, algorithm)
    parts = worlds.gradients(worlds.learner(ctx, algorithm, microbatches=2), batch, algorithm)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, atol=1e-6, rtol=1e-4, msg=key)


def test_it_differentiates_through_the_adaptation():
    _, algorithm, batch = a_maml()
    algorithm.double()
    batch = algorithm.prepare(tree.map(lambda x: x.double() if x.is_floating_point() else x, batch))
    algorithm(batch, ("policy",)).terms["policy"].mean().backward()
    weight: Any = algorithm.get_parameter("policy.0.weight")
    for i, j in ((0, 0), (2, 1)):
        values = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                weight[i, j] += step
            values.append(float(algorithm(batch, ("policy",)).terms["policy"].detach().mean()))
        with torch.no_grad():
            weight[i, j] += 1e-5
        assert float(weight.grad[i, j]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)
