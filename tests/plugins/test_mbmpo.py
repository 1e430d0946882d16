"""MBMPO: dynamics that fit, imagined episodes that obey the stream rule, and updates that do not depend on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlplug import testing, tree
from rlplug.api import Job, Segment
from rlplug.checkpointing.format import find
from rlplug.cli import main
from rlplug.config import compose
from rlplug.nn.dynamics import Dynamics
from rlplug.plugins.algo.mbmpo import MBMPO
from rlplug.testing.rank_pool import ranks
from tests.plugins.test_maml import assert_close, updated

SMALL = (
    *(
        "algo=mbmpo",
        "env=cartpole_torch",
        "env.max_episode_steps=8",
        "algo.ensemble_size=2",
        "algo.fc_net_hiddens=[16]",
    ),
    *("algo.train_epochs=4", "algo.num_maml_steps=1", "algo.horizon=6", "algo.imagined_episodes=3", "model.hidden=[8]"),
    *("algo.maml_optimizer_steps=2", "algo.inner_adaptation_steps=2", "train_batch_size=16", "loop.episodes=2"),
    *("seed=1", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=2"),
)


class Paying:
    """A simulator that pays the action, and terminates where the first number exceeds 1."""

    def reward(self, batch: Any) -> torch.Tensor:
        return batch["action"].float()

    def terminated(self, batch: Any) -> torch.Tensor:
        return batch["next_obs"][:, 0] > 1.0


def of(obs: Any = 3, action: Any = 2, **options: Any) -> MBMPO:
    ctx = testing.context(testing.spec(obs, action), overrides=["algo=mbmpo", "model.hidden=[8]"])
    ctx.simulator = Paying  # type: ignore[method-assign]
    return MBMPO(testing.config("algo/mbmpo", **{"ensemble_size": 2, "fc_net_hiddens": [8], **options}), ctx)


def test_dynamics_fit_a_linear_system_in_its_own_units():
    torch.manual_seed(0)
    obs, action = torch.randn(400, 2) * torch.tensor([1.0, 100.0]) + 50.0, torch.randn(400, 1)
    after = obs + torch.cat([0.1 * action, 5.0 * action], -1)
    dynamics = Dynamics(2, 1, [32], "tanh", 3, normalize=True)
    dynamics.observe(obs, action, after, lambda x: x)
    dynamics.commit()
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=1e-2)
    first = float(dynamics.errors(obs, action, after).mean())
    for _ in range(200):
        optimizer.zero_grad()
        dynamics.errors(obs, action, after).mean().backward()
        optimizer.step()
    assert float(dynamics.errors(obs, action, after).mean()) < 0.01 * first
    every = dynamics.step(obs.expand(3, -1, -1), action.expand(3, -1, -1))
    assert every.shape == (3, 400, 2)
    assert float(((every - after) / torch.tensor([0.1, 5.0])).square().mean().detach()) < 0.05


def test_imagined_episodes_are_streams_of_each_network():
    algorithm = of(imagined_episodes=4, horizon=5)
    algorithm.starts.copy_(torch.linspace(-2, 0.9, 256).unsqueeze(-1).expand(-1, 3))
    algorithm.started.fill_(256)
    with torch.no_grad():
        algorithm.dynamics.change.weight.zero_()
        algorithm.dynamics.change.bias[:, 0] = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rows = algorithm._imagined(algorithm.policy.initial(2), 5)
    assert rows["obs"].shape == (2, 6, 4, 3)
    valid, over, obs = rows["valid"], rows["terminated"], rows["obs"]
    assert not valid[:, -1].any()
    moved = obs[:, 1:] - obs[:, :-1]
    going = valid[:, :-1] & ~over[:, :-1]
    torch.testing.assert_close(moved[0][going[0]], torch.tensor([0.5, 0.0, 0.0]).expand(int(going[0].sum()), 3))
    assert not moved[1].any()  # the other network predicts no change
    assert over[0].any()
    assert not over[1].any()
    assert torch.equal(over[0], valid[0] & (obs[0, ..., 0] + 0.5 > 1.0))
    assert not valid[:, 1:][over[:, :-1]].any()
    assert torch.equal(rows["reward"], rows["action"].float())


def test_imagined_observations_stay_in_the_space():
    algorithm = of(Box(np.float32([-1.0, -np.inf]), np.float32([1.0, np.inf])), horizon=5)
    with torch.no_grad():
        algorithm.dynamics.change.weight.zero_()
        algorithm.dynamics.change.bias.fill_(0.5)
    rows = algorithm._imagined(algorithm.policy.initial(2), 5)
    going = rows["valid"].any(-1, keepdim=True)
    assert rows["obs"][..., 0].max() == 1.0
    assert torch.where(going, rows["obs"][..., 1], 0.0).max() > 1.0


def test_an_evaluation_plays_the_policies_of_the_next_real_episodes_and_changes_no_draw():
    algorithm = of(horizon=5, imagined_episodes=4)
    algorithm.started.fill_(1)
    asked = list[tuple[list[Job], dict[str, Any]]]()

    def play(jobs: Any, weights: Any) -> Any:
        asked.append((jobs, weights))
        for job in jobs:
            kind = float(job.policies.get("", 9))
            yield job, {"return": torch.tensor([kind, kind + 2.0]), "length": torch.tensor([5, 5])}

    metrics = algorithm.evaluate(play, 2)
    algorithm.rounds(play, 2, 7)
    (evaluated, weights), (played, next_weights) = asked
    assert [(job.policies, job.mode) for job in evaluated] == [
        ({"": "0"}, "greedy"),
        ({"": "1"}, "greedy"),
        ({}, "greedy"),
    ]
    assert [(job.number, job.policies, job.mode) for job in played] == [
        (7, {"": "0"}, "explore"),
        (8, {"": "1"}, "explore"),
    ]
    assert all(torch.equal(x, next_weights[k][name]) for k, of_one in weights.items() for name, x in of_one.items())
    assert any((weights["0"][name] != weights["1"][name]).any() for name in weights["0"])
    assert metrics["eval/return_mean"] == 1.5  # the mean of 0, 2, 1 and 3
    assert metrics["eval/policy_return_mean"] == 10.0


@pytest.mark.parametrize(("bound", "seen"), [(1.0, [1.0, -0.5]), (np.inf, [3.0, -0.5])])
def test_networks_see_the_actions_that_an_environment_executes(bound, seen):
    algorithm = of(action=Box(-bound, bound, (1,), np.float32))
    assert algorithm._flat(torch.tensor([[3.0], [-0.5]])).flatten().tolist() == seen


def test_held_out_rows_are_in_no_loss_and_no_moment():
    algorithm, n = of(), 40
    batch = {"obs": torch.randn(2, n, 3), "action": torch.randint(2, (2, n)), "valid": torch.ones(2, n).bool()}
    batch["held_out"] = torch.arange(n).expand(2, n) % 4 == 0
    rows = algorithm.prepare(batch)
    assert torch.equal(rows["valid"], ~batch["held_out"][0])
    assert torch.equal(rows["held_out"], batch["held_out"][0])
    other = tree.map(lambda x: x.clone(), batch)
    other["obs"][:, ::4] += 100.0
    found = []
    for given in (batch, other):
        one = of()
        one.observe(segment_of(given), Gathering())  # type: ignore[arg-type]
        one.dynamics.commit()
        found.append(one.dynamics.inputs.mean)
    assert torch.equal(*found)
    assert found[0].any()


class Gathering:
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def segment_of(batch: Any) -> Any:
    return Segment(batch | {"is_first": torch.ones_like(batch["valid"])}, whole=True)


def test_two_ranks_make_the_update_of_one():
    alone = updated(None, compose([*SMALL]).raw)
    assert {f"MAMLIter0_DynaTrajInner_{j}_episode_reward_mean" for j in range(3)} < alone[1].keys()
    for one in ranks(2)(updated, compose([*SMALL, "hardware=2cpu"]).raw):
        assert_close(alone, one, atol=1e-4, rtol=1e-3)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    def run(folder: Path, *more: str) -> Any:
        assert main([*SMALL, *more, f"hydra.run.dir={folder}"]) == 0
        return json.loads((folder / "summary.json").read_text())

    short = run(tmp_path / "run", "total_steps=40")
    assert main(["resume", str(tmp_path / "run"), "total_steps=90"]) == 0
    summary = run(tmp_path / "undisturbed", "total_steps=90")
    assert summary["updates"] > short["updates"] > 0
    resumed, weights = (find(tmp_path / name).tree("weights")["algorithm"] for name in ("run", "undisturbed"))
    assert all(torch.equal(x, resumed[key]) for key, x in weights.items())


REFUSED = {
    "no simulator": (("env=cartpole",), "has no simulator"),
    "no reward of observations": (
        ("env=sparse_cartpole",),
        "env: mbmpo needs the reward of imagined observations, which this environment's simulator does not offer",
    ),
    "no vectors": (("env=frozenlake",), "env: mbmpo predicts vectors, and no masks of actions, but observations are"),
    "recurrent": (("model=lstm",), "model: MBMPO cannot learn with a recurrent model"),
    "preprocessing": (
        ("preprocess.normalize_obs=true",),
        "preprocess.normalize_obs: changes the environment's rows, but mbmpo plans with a simulator",
    ),
    "one network": (("algo.ensemble_size=1",), "algo.ensemble_size: 1"),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(words, said, capsys, tmp_path):
    small = ("algo=mbmpo", "env=cartpole_torch", "hardware=cpu", "logger.only=[]")
    assert main([*small, *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err


def test_an_action_space_that_is_discrete_is_one_hot():
    algorithm = of()
    assert algorithm.flat.choices == [int(Discrete(2).n)]
    assert algorithm._flat(torch.tensor([0, 1])).tolist() == [[1.0, 0.0], [0.0, 1.0]]
