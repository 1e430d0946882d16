"""MAML: exact gradients through the adaptation, updates that do not depend on who plays, and what is refused."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from rlplug import testing, tree
from rlplug.checkpointing.format import find
from rlplug.cli import main
from rlplug.config import compose, parse
from rlplug.functional.meta import adapt_kl_coeffs, adapted, linear_baseline, stacked, task_advantages
from rlplug.nn.adaptation import AdaptivePolicy
from rlplug.plugins.algo.maml import MAML
from rlplug.results.evaluate import evaluate
from rlplug.run.build import build, start
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, EnvSpec, Group
from tests.contract import worlds

SMALL = (
    *("algo=maml", "env=point_goals", "env.max_episode_steps=5", "algo.meta_batch_size=4", "algo.eval_tasks=3"),
    *("loop.episodes=3", "model.hidden=[8]", "algo.inner_adaptation_steps=2", "algo.maml_optimizer_steps=2"),
    *("algo.entropy_coeff=0.01", "seed=1", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=2"),
)


class Torso(nn.Module):
    out_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Any, carry: Any, is_first: Any) -> Any:
        return torch.tanh(self.linear(x)), carry


def algorithm_and_batch(**options: Any) -> Any:
    """MAML in float64 after two inner steps, and episodes ``[K, L+1, M]`` of 3 tasks before and after each."""
    spec = EnvSpec({"agent": Group(worlds.box(3), Discrete(2))}, extras={"task": worlds.box(2)})
    words = ["algo=maml", "model.hidden=[4]"]
    settings = {"inner_adaptation_steps": 2, "inner_lr": 0.3, "kl_coeff": 0.1, "entropy_coeff": 0.1} | options
    ctx = testing.context(spec, overrides=words)
    algorithm = MAML(testing.config("algo/maml", **settings), ctx)
    torch.manual_seed(0)
    algorithm.policy = AdaptivePolicy(Torso(), Discrete(2))
    nn.init.normal_(algorithm.policy.policy.linear.weight)
    algorithm.double()
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for step in range(3):
        tasks = [worlds.stream(5 + k, 2, 10 * step + k) for k in range(3)]
        rows = tree.map(lambda x: x.double() if x.is_floating_point() else x, stacked(tasks))
        dist = torch.log_softmax(torch.randn(*rows["reward"].shape, 2, generator=generator).double(), -1)
        rows |= {"dist": dist, "logp": dist.gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1)}
        batch[str(step)] = rows | {"return": torch.zeros(3, 2)}
    return ctx, algorithm, algorithm.prepare(batch)


# ---- exact values ----------------------------------------------------------------------------------------------------


def test_returns_are_of_episodes_and_not_of_rows():
    tasks = [worlds.stream(length, 2, 0) | {"return": torch.tensor([length, 1.0])} for length in (3, 5)]
    found = stacked(tasks)
    assert found["return"].tolist() == [[3.0, 1.0], [5.0, 1.0]]
    assert found["valid"].shape == (2, 5, 2)


def test_the_second_order_gradient_is_exact():
    _, algorithm, batch = algorithm_and_batch(clip_param=10.0)

    def loss() -> torch.Tensor:
        return torch.stack([*algorithm(batch, ("policy",)).terms.values()]).sum(0).mean()

    loss().backward()
    for name, places in (("policy.torso.linear.weight", ((0, 0), (2, 1))), ("policy.policy.linear.bias", ((1,),))):
        weight: Any = algorithm.get_parameter(name)
        for place in places:
            found = []
            for step in (1e-5, -2e-5):
                with torch.no_grad():
                    weight[place] += step
                found.append(float(loss().detach()))
            with torch.no_grad():
                weight[place] += 1e-5
            assert float(weight.grad[place]) == pytest.approx((found[0] - found[1]) / 2e-5, rel=1e-6, abs=1e-9)


def test_first_order_takes_the_gradient_at_the_adapted_weights():
    """Its gradient is that of the loss after the adaptation with respect to the adapted weights."""
    options = {"first_order": True, "kl_coeff": 0.0, "entropy_coeff": 0.0}
    _, algorithm, batch = algorithm_and_batch(**options)
    algorithm(batch, ("policy",)).terms["policy"].sum().backward()
    weights = algorithm.policy.initial(3)
    for step in ("0", "1"):
        weights, _ = adapted(algorithm.policy.evaluate, weights, batch[step], 0.3, create_graph=False)
        weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
    _, again, _ = algorithm_and_batch(**options, inner_adaptation_steps=0)
    again.policy.initial = lambda tasks: weights
    again(again.prepare({"0": batch["2"]}), ("policy",)).terms["policy"].sum().backward()
    for name, w in algorithm.policy.named_parameters():
        torch.testing.assert_close(w.grad, weights[name].grad.sum(0))
    second = algorithm_and_batch(**options | {"first_order": False})[1]
    second(batch, ("policy",)).terms["policy"].sum().backward()
    name = "policy.torso.linear.weight"
    assert not torch.allclose(second.get_parameter(name).grad, algorithm.get_parameter(name).grad, rtol=0.01)


def test_microbatches_change_no_gradient():
    ctx, algorithm, batch = algorithm_and_batch()
    whole = worlds.gradients(worlds.learner(ctx, algorithm), batch, algorithm)
    parts = worlds.gradients(worlds.learner(ctx, algorithm, microbatches=2), batch, algorithm)
    assert sum(float(g.abs().sum()) for g in whole.values()) > 0
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, atol=1e-6, rtol=1e-5)


def test_a_baseline_fits_returns_that_are_linear_in_its_features_in_every_task():
    obs = torch.randn(2, 7, 3, 2, dtype=torch.float64)
    time = torch.arange(7, dtype=torch.float64).view(1, -1, 1) / 100
    ret = torch.stack([obs[0, ..., 0] - 2 * obs[0, ..., 1] ** 2, (3 * time[0] + 0.5).expand(7, 3)])
    valid = torch.ones(2, 7, 3, dtype=torch.bool)
    valid[:, -1] = False
    fitted = linear_baseline(obs, ret.where(valid, torch.nan), valid)
    torch.testing.assert_close(fitted, ret.where(valid, 0.0), atol=1e-3, rtol=1e-3)


def test_advantages_have_mean_0_and_deviation_1_in_every_task():
    rows = stacked([worlds.stream(9, 4, k) for k in range(3)])
    advantage = task_advantages(rows, 0.9, 0.95)
    for own, valid in zip(advantage, rows["valid"], strict=True):
        assert float(own[valid].mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(own[valid].std(correction=0)) == pytest.approx(1.0, rel=1e-4)
        assert not own[~valid].any()


def test_every_kl_weight_follows_its_own_divergence():
    coeff = adapt_kl_coeffs(torch.ones(3), torch.tensor([0.016, 0.01, 0.006]), 0.01)
    assert coeff.tolist() == [2.0, 1.0, 0.5]


# ---- runs ------------------------------------------------------------------------------------------------------------


def updated(fabric: Any, raw: Any, updates: int = 2) -> Any:
    """Return the weights and the metrics of the last update, after some updates."""
    trainer: Any = build(parse(raw), Path(), fabric)
    with closing(trainer):
        start(trainer)
        update, found = trainer.update, []

        def counted(batch: Any) -> Any:
            found.append(update(batch))
            trainer.agreement.stop = 15 * (len(found) == updates)
            return found[-1]

        trainer.update, trainer.report = counted, trainer.agreement.conclude  # without files
        trainer.loop.run(trainer)
        state = {key: x.clone() for key, x in trainer.algorithm.state_dict().items()}
        return state, {name: float(x) for name, x in found[-1].metrics.items()}, trainer.progress.env_steps


def assert_close(a: Any, b: Any, **tolerance: float) -> None:
    assert a[2] == b[2]
    for key, x in a[0].items():
        torch.testing.assert_close(x, b[0][key], **tolerance)
    assert a[1] == pytest.approx(b[1], rel=1e-4, abs=1e-5)


def test_two_ranks_make_the_update_of_one():
    alone = updated(None, compose([*SMALL, "num_envs=2"]).raw)
    assert {"episode_reward_mean", "episode_reward_mean_adapt_1", "episode_reward_mean_adapt_2"} < alone[1].keys()
    assert alone[1]["adaptation_delta"] == pytest.approx(
        alone[1]["episode_reward_mean_adapt_2"] - alone[1]["episode_reward_mean"], abs=1e-5
    )
    for one in ranks(2)(updated, compose([*SMALL, "num_envs=2", "hardware=2cpu"]).raw):
        assert_close(alone, one, atol=1e-5, rtol=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    def run(folder: Path, *more: str) -> Any:
        assert main([*SMALL, *more, f"hydra.run.dir={folder}"]) == 0
        return json.loads((folder / "summary.json").read_text())

    def weights(folder: Path) -> Any:
        return find(folder).tree("weights")["algorithm"]

    short = run(tmp_path / "run", "total_steps=150")
    assert 150 <= short["env_steps"] < 500
    assert main(["resume", str(tmp_path / "run"), "total_steps=500"]) == 0
    summary = run(tmp_path / "undisturbed", "total_steps=500")
    assert summary["updates"] > short["updates"]
    resumed = weights(tmp_path / "run")
    assert all(torch.equal(x, resumed[key]) for key, x in weights(tmp_path / "undisturbed").items())
    assert summary["eval/return_mean"] == pytest.approx(summary["eval/episode_reward_mean_adapt_2"])
    again = evaluate(tmp_path / "run")
    assert all(again[key] == summary[key] for key in ("eval/return_mean", "eval/adaptation_delta"))
    chance = evaluate(tmp_path / "run", mode="random")
    assert chance["eval/episode_reward_mean"] != again["eval/episode_reward_mean"]  # also before the adaptation


RECURRENT = "model: MAML cannot learn with a recurrent model"
REFUSED = {
    "no tasks": (("env=cartpole",), "env: maml adapts to tasks, but this environment has none"),
    "recurrent": (("model=lstm",), RECURRENT),
    "another loop": (("loop=alternate",), "loop: maml learns from tasks before and after an adaptation; use loop=meta"),
    "another algorithm": (("algo=ppo", "loop=meta"), "loop: meta adapts to tasks, which PPO does not"),
    "preprocessing": (
        ("preprocess.scale_reward=0.1",),
        "preprocess.scale_reward: changes the environment's rows, but maml adapts to raw rows; use the default",
    ),
    "a rank without tasks": (
        ("num_envs=2", "hardware=2cpu", "algo.meta_batch_size=1"),
        "algo.meta_batch_size: 1 tasks leave some of 2 ranks without one; use 2 or more",
    ),
    "curriculum": (("curriculum=plr",), "curriculum: plr chooses the tasks of rollouts, but loop=meta plays jobs"),
    "curiosity": (("exploration=[icm]",), "exploration.icm: rewards rows that the learner samples, but maml uses no"),
    "actors": (
        ("num_envs=2", "hardware.actors.count=2", "hardware.actors.num_cpus=0.5", "hardware.actors.evaluation=1"),
        "hardware.actors.evaluation: runs greedy episodes, but maml evaluates in its own way; use 0",
    ),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(words, said, capsys, tmp_path):
    small = [word for word in SMALL[1:] if not word.startswith(("algo.", "model.", "loop.", "env."))]
    assert main(["algo=maml", *small, *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err


def test_large_observations_are_refused():
    image = EnvSpec({"agent": Group(Box(0, 255, (4, 84, 84), np.uint8), Discrete(2))}, extras={"task": Discrete(2)})
    with pytest.raises(ConfigError, match="fits a linear baseline to observations, of at most 1000 numbers"):
        MAML.needs(testing.config("algo/maml"), image)
    assert MAML.needs(testing.config("algo/maml"), replace(image, groups={"agent": Group(worlds.box(3), Discrete(2))}))


# ---- environments ----------------------------------------------------------------------------------------------------


def envs(name: str, n: int = 2) -> Any:
    trainer: Any = build(compose(["algo=ppo", f"env={name}", "hardware=cpu", "logger.only=[]"]), Path())
    with closing(trainer):
        return trainer.policy.env(replace(trainer.ctx.shard, num_envs=n, env_ids=range(n)))


def test_goals_pay_the_distance_and_end_at_the_goal():
    env = envs("point_goals")
    first = env.reset([1, 2], np.array([[0.1, 0.0], [-0.5, 0.5]], np.float32))
    assert not first["obs"].any()
    row = env.step(np.array([[1.0, 0.0], [1.0, 3.0]], np.float32))
    assert row["reward"].tolist() == pytest.approx([0.0, -float(np.hypot(0.6, 0.4))], abs=1e-6)
    assert row["terminated"].tolist() == [True, False]
    env.assign(np.array([[0.3, 0.0], [0.3, 0.0]], np.float32))
    row = env.step(np.zeros((2, 2), np.float32))
    assert np.array_equal(row["task"], np.array([[0.3, 0.0], [-0.5, 0.5]], np.float32))
    assert not row["obs"][0].any()
    for _ in range(18):
        row = env.step(np.zeros((2, 2), np.float32))
    assert row["truncated"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("pendulum_mass", np.array([[0.5], [2.0]], np.float32)),
        ("halfcheetah_direction", np.array([1, 0])),
        ("halfcheetah_velocity", np.array([[0.0], [2.0]], np.float32)),
    ],
)
def test_a_task_changes_what_is_paid(name, tasks):
    pytest.importorskip("mujoco")
    env = envs(name)
    with closing(env):
        assert np.array_equal(env.reset([3, 3], tasks)["task"], tasks)
        action = np.full((2, *env.spec.single_agent.action.shape), 0.7, np.float32)
        rows = [env.step(action) | {} for _ in range(2)]
        second = {key: np.array(x) for key, x in rows[1].items()}
        assert second["reward"][0] != second["reward"][1]
        same = np.array_equal(second["obs"][0], second["obs"][1])
        assert same == name.startswith("halfcheetah")  # the same body, paid differently; another mass moves differently
        assert env.spec.tasks.contains(env.reset([4, 5])["task"][0])
