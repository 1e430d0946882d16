"""A pool of past policies that grows while it learns: checkpoints, actors, jobs and ``rlplug.load`` have all of it."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rlplug
from rlplug.actors.copies import acting_weights, load_acting_weights
from rlplug.api import Job, Learner, Losses
from rlplug.cli import main
from rlplug.config import compose
from rlplug.plugins.algo.ppo import PPO
from rlplug.run.build import build
from rlplug.testing.checks.runs import differences
from rlplug.testing.comparing import compare_runs
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch, Mode
from tests.installing import install, manifest, site  # noqa: F401  fixtures


class Pool(nn.Module):
    """Past networks, which learn no more. How many there are is its extra state."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.make = lambda: copy.deepcopy(like).requires_grad_(False)
        self.members = nn.ModuleList()

    def get_extra_state(self) -> Tensor:
        return torch.tensor(len(self.members))

    def set_extra_state(self, state: Tensor) -> None:
        """Make the members that are missing; their weights are loaded afterwards."""
        while len(self.members) < int(state):
            self.members.append(self.make())


class League(PPO):
    """PPO that keeps its network after every third update, and plays column 0 with the newest that it kept."""

    traceable = False

    def __init__(self, cfg, ctx) -> None:
        super().__init__(cfg, ctx)
        self.pool = Pool(self.net)

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        out, carry = super().act(step, carry, mode)
        if self.pool.members:
            newest: nn.Module = self.pool.members[-1]
            other = newest.act(step, carry, "greedy", self.ctx)[0]["action"]  # pyright: ignore
            out["action"] = torch.cat([other[:1], out["action"][1:]])
        return out, carry

    def update(self, batch: Batch, learner: Learner) -> Losses:
        if learner.progress.updates % 3 == 2:
            self.pool.members.append(copy.deepcopy(self.net).requires_grad_(False))
        return super().update(batch, learner)


RUN = (
    *("algo=pooled", "env=cartpole", "hardware=cpu", "num_envs=2", "model.hidden=[8]", "rollout_fragment_length=32"),
    *("logger.only=[]", "eval.every=0", "eval.episodes=2", "algo.sgd_minibatch_size=32", "algo.num_sgd_iter=1"),
)


@pytest.fixture(autouse=True)
def league(install):  # noqa: F811
    conf = Path(__file__).parents[3] / "conf" / "algo" / "ppo.yaml"
    files = {
        "rlplug_league/__init__.py": manifest(("algo", "pooled", f"{__name__}:League"))
        + "\n@hookimpl\ndef rlplug_conf():\n    return 'rlplug_league.conf'\n",
        "rlplug_league/conf/algo/pooled.yaml": conf.read_text().replace("name: ppo", "name: pooled"),
    }
    install("rlplug-league", "rlplug_league", files)


def test_a_run_goes_on_with_the_pool_that_it_had(tmp_path, monkeypatch):
    words, collect, rounds = (*RUN, "total_steps=768", "checkpoint.every=128"), Trainer.collect, iter(range(100))

    def broken(self, *args, **kwargs):
        collect(self, *args, **kwargs)
        if next(rounds) == 8:
            raise RuntimeError("as if killed")

    assert main([*words, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    monkeypatch.setattr(Trainer, "collect", broken)
    with pytest.raises(RuntimeError):
        main([*words, f"hydra.run.dir={tmp_path / 'resumed'}"])
    monkeypatch.setattr(Trainer, "collect", collect)
    assert main(["resume", str(tmp_path / "resumed")]) == 0
    parts = compare_runs(tmp_path / "whole", tmp_path / "resumed")
    assert [f"{part}: {name}" for part in ("weights", "learner", "rank0") for name in parts[part][1]] == []
    agent = rlplug.load(tmp_path / "resumed")
    assert len(agent.algorithm.pool.members) >= 3  # pyright: ignore
    assert agent.act(np.zeros((3, 4), np.float32)).shape == (3,)


def grown(members: int):
    """Return a trainer, and let it learn until its pool has so many."""
    trainer = build(compose([*RUN, "total_steps=100000"]), Path())
    while len(trainer.algorithm.pool.members) < members:  # pyright: ignore
        trainer.collect()
        trainer.update()
    return trainer


def test_an_actor_has_the_pool_of_the_learner():
    """What it is sent is enough, however often."""
    with closing(grown(2)) as trainer, closing(grown(0)) as actor:
        for _ in range(2):
            load_acting_weights(actor.policy, acting_weights(trainer.policy))
            assert not differences(actor.algorithm.state_dict(), trainer.algorithm.state_dict())
        one, two = (
            [batch for _, batch in run.play([Job(0, episodes=3), Job(1, mode="greedy")])] for run in (trainer, actor)
        )
        assert not differences(one, two)


def test_a_job_plays_with_weights_from_before_the_pool_grew():
    with closing(grown(1)) as trainer:
        before = {key: x.clone() for key, x in trainer.algorithm.state_dict().items()}
        while len(trainer.algorithm.pool.members) < 2:  # pyright: ignore
            trainer.collect()
            trainer.update()
        after = {key: x.clone() for key, x in trainer.algorithm.state_dict().items()}
        list(trainer.play([Job(0, {"": "old"}, episodes=2)], {"old": before}))
        assert not differences(trainer.algorithm.state_dict(), after)
