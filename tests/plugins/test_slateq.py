"""SlateQ: the known optimum, targets by hand, slates of different documents, and what is refused."""

from __future__ import annotations

import itertools
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from rlplug import testing
from rlplug.config import compose
from rlplug.context import EnvShard
from rlplug.plugins.algo.slateq import SlateQ
from rlplug.plugins.env.interest_evolution import InterestEvolution
from rlplug.run.build import build
from rlplug.types import ConfigError

SMALL = {"num_documents": 4, "slate_size": 2, "num_topics": 2, "num_levels": 3, "persistence": 0.8, "choice_scale": 1.0}
WORDS = tuple(f"env.{key}={value}" for key, value in SMALL.items())


def small(n: int = 1) -> InterestEvolution:
    return InterestEvolution(testing.config("env/interest_evolution", **SMALL), testing.context(num_envs=n))


def made(n: int = 1, **options) -> SlateQ:
    torch.manual_seed(0)
    ctx = testing.context(overrides=["algo=slateq", "env=interest_evolution", *WORDS, "model.hidden=[8]"], num_envs=n)
    cfg = testing.config("algo/slateq", **options)
    ctx.needs = SlateQ.needs(cfg, ctx.spec)
    return SlateQ(cfg, ctx)


def test_the_environment_behaves_as_its_solution_says():
    """Sessions of the best slates pay their values, up to what 1,000 of them tell."""
    n = 100
    env = small(n)
    q = env.solve()
    best = {tuple(user): env.slates[i] for user, i in zip(env.users.tolist(), q.argmax(1), strict=True)}
    env.reset(range(n))
    paid, owed = list[float](), np.zeros(n)
    while len(paid) < 1000:
        row = env.step(np.array([best[tuple(user)] for user in env.user.tolist()]))
        owed += row["reward"]
        for i in np.flatnonzero(row["terminated"] | row["truncated"]):
            paid.append(owed[i])
            owed[i] = 0.0
    mean = np.mean(q.max(1))  # all users are equally likely
    assert abs(np.mean(paid) - mean) < 4 * np.std(paid) / len(paid) ** 0.5


def test_a_policy_is_worth_at_most_the_optimum():
    env = small()
    best = env.solve()
    myopic = env.solve(policy=env.solve(gamma=0.0).argmax(1))
    np.testing.assert_allclose(env.solve(policy=best.argmax(1)), best, atol=1e-8)
    assert (myopic.max(1) <= best.max(1) + 1e-9).all()


def test_the_decomposed_tabular_values_are_those_of_slates():
    """Equation 16 with the exact item values gives the exact values of all slates."""
    env = small()
    q, cfg = env.solve(), env.cfg
    value, users = q.max(1), env.users
    place = {tuple(user): i for i, user in enumerate(users.tolist())}
    for at, user in enumerate(users):
        for number, slate in enumerate(env.slates):
            chance, total = env.probabilities(user, env.fixed, slate), 0.0
            for document, p in zip(slate, chance, strict=False):
                t, change = int(env.fixed[document, :-1].argmax()), np.zeros(cfg.num_topics, int)
                change[t] = 1
                ways = ((cfg.drift, change), (1 - cfg.drift, -change))
                later = sum(w * value[place[tuple((user + d).clip(0, cfg.num_levels - 1))]] for w, d in ways)
                total += p * (env.fixed[document, -1] + cfg.persistence * later)
            total += chance[-1] * cfg.persistence * value[at]
            assert total == pytest.approx(q[at, number], abs=1e-8)


@pytest.mark.parametrize("strategy", ["q_learning", "sarsa", "myopic"])
@pytest.mark.parametrize("null_item", [True, False])
def test_targets_by_enumeration(strategy, null_item):
    algorithm = made(strategy=strategy, null_item=null_item, gamma=0.9, double_q=False, target_slate="exact")
    torch.nn.init.normal_(algorithm.choice.weight)
    n, draw = 5, torch.Generator().manual_seed(0)
    obs = {"user": torch.rand(2, n, 2, generator=draw), "documents": torch.rand(2, n, 4, 3, generator=draw)}
    obs["response"] = {"click": torch.tensor([[0] * n, [0, 1, 2, 1, 0]]), "engagement": torch.zeros(2, n)}
    batch = {
        "obs": obs,
        "action": torch.tensor([[[3, 1]] * n, [[0, 2]] * n]),
        "reward": torch.rand(2, n, generator=draw),
        "terminated": torch.tensor([[False, True, False, False, False], [False] * n]),
        "valid": torch.ones(2, n, dtype=torch.bool),
    }
    batch["valid"][1, 3] = False  # truncated: there is no next slate
    with torch.no_grad():
        prepared = algorithm.prepare(batch)
        v, none = algorithm.choice(obs["user"][1], obs["documents"][1])
        q = algorithm.target(obs["user"][1], obs["documents"][1])
    assert prepared["item"].tolist() == [3, 1, 4, 1, 3]  # 4: nothing
    for i in range(n):
        nothing = float(none[i] * q[i, 4]) if null_item else 0.0
        worth = {}
        for slate in itertools.combinations(range(4), 2):
            at = list(slate)
            worth[slate] = (nothing + float((v[i, at] * q[i, at]).sum())) / float(none[i] + v[i, at].sum())
        future = worth[0, 2] if strategy == "sarsa" and i != 3 else max(worth.values())
        future = 0.0 if i == 1 or strategy == "myopic" else 0.9 * future
        assert float(prepared["returns"][i]) == pytest.approx(float(batch["reward"][0, i]) + future, abs=1e-5)


@pytest.mark.parametrize("slate", ["exact", "greedy", "top_k", "random"])
def test_slates_have_different_documents(slate):
    algorithm = made(6, slate=slate, epsilon=0.5)
    torch.nn.init.normal_(algorithm.choice.weight)
    env = small(6)
    step = {"obs": {k: torch.from_numpy(x) for k, x in env.reset(range(6))["obs"].items() if k != "response"}}
    step["is_first"] = torch.ones(6, dtype=torch.bool)
    with torch.inference_mode(), algorithm.ctx.acting(EnvShard("actor", 6, range(6))):
        for mode in ("random", "explore", "greedy"):
            for _ in range(10):
                out, _ = algorithm.act(step, {}, mode)
                assert all(len({*row}) == 2 for row in out["action"].tolist())


def test_the_choice_model_learns_how_users_choose():
    """The gradient of its likelihood vanishes at the environment's own scores."""
    env = small()
    algorithm = made()
    with torch.no_grad():
        algorithm.choice.weight[:, :2] = torch.eye(2) * env.cfg.choice_scale
        algorithm.choice.nothing.fill_(env.cfg.no_click)
    users = torch.from_numpy(env.levels[env.users]).float()
    v, none = algorithm.choice(users, torch.from_numpy(env.fixed).expand(len(users), -1, -1))
    for user, scores, nothing in zip(env.users, v, none, strict=True):
        for slate in env.slates:
            mine = torch.cat((scores[slate], nothing.unsqueeze(0)))
            expected = torch.from_numpy(env.probabilities(user, env.fixed, slate)).float()
            torch.testing.assert_close(mine / mine.sum(), expected)


def greedy_values(algorithm: SlateQ, env: InterestEvolution) -> np.ndarray:
    """The exact value of what the policy shows to every user."""
    obs = {"user": torch.from_numpy(env.levels[env.users]).float()}
    obs["documents"] = torch.from_numpy(env.fixed).expand(len(env.users), -1, -1)
    with torch.inference_mode():
        shown = algorithm.chosen(algorithm.online, obs, "exact").sort(-1).values.tolist()
    index = {tuple(slate): i for i, slate in enumerate(env.slates.tolist())}
    policy = np.array([index[tuple(slate)] for slate in shown])
    return env.solve(policy=policy)[np.arange(len(policy)), policy]


@pytest.mark.slow
def test_it_learns_the_optimum_of_the_small_problem():
    """12,000 steps are too few: sessions end by chance, and what they pay then favors other slates for two users."""
    words = ("total_steps=60_000", "eval.every=0", "hardware=cpu", "logger.only=[]", "compile=off", "algo.gamma=1.0")
    more = (
        *("model.hidden=[64]", "algo.epsilon=[[0,1.0],[30_000,0.2]]", "algo.lr=[[0,3e-3],[60_000,1e-4]]"),
        *("num_envs=32", "replay_ratio=0.1", "train_batch_size=256"),
    )
    with closing(build(compose(["algo=slateq", "env=interest_evolution", *WORDS, *words, *more]), Path())) as trainer:
        trainer.loop.run(trainer)
        env = small()
        mean, best = greedy_values(trainer.algorithm, env).mean(), env.solve().max(1).mean()
    assert mean == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=interest_evolution", "env.slate_size=11"], "env.slate_size: 11 is more than env.num_documents=10"),
        (["env=cartpole"], "env: slateq needs observations {user, documents, response: {click}}"),
        (["env=recsim", "env.kwargs.slate_size=11"], "env.kwargs.slate_size: 11 is not from 1 to"),
    ],
)
def test_what_it_cannot_do_is_refused(words, said):
    with pytest.raises(ConfigError) as error:
        build(compose(["algo=slateq", *words, "hardware=cpu"]), Path())
    assert said in str(error.value)


@pytest.mark.skipif(find_spec("recsim") is not None, reason="RecSim is installed")
def test_without_recsim_it_says_what_to_install():
    with pytest.raises(ConfigError, match=r"env.id: RecSim cannot be imported .* pip install --no-deps recsim-no-tf"):
        build(compose(["algo=slateq", "env=recsim", "hardware=cpu"]), Path())
