"""Contextual bandits: hand-computed statistics, what each explores by, ranks, recorded rounds, regret, and refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rlplug import testing
from rlplug.api import Plan
from rlplug.config import compose, parse
from rlplug.context import EnvShard, RunContext
from rlplug.distributed.fabric import one_rank
from rlplug.plugins.algo.linear_bandit import LinGreedy, LinTS, LinUCB
from rlplug.plugins.env.bandit import LinearBandit, LoggedBandit, read
from rlplug.run.build import build, resolve
from rlplug.testing.checks.ranks import distances
from rlplug.testing.checks.runs import differences
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, EnvSpec, Group
from tests.hardware.test_ranks import play
from tests.plugins.acting import learner_of

RUN = ("env=linear_bandit", "tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "checkpoint.every=0")


def spec(*obs: int, arms: int = 2, extras=None, **more) -> EnvSpec:
    group = Group(Box(-9.0, 9.0, obs, np.float32), Discrete(arms))
    return EnvSpec({"agent": group}, extras=extras or {}, offers=frozenset({"bandit"}), **more)


def make(cls, of: EnvSpec, num_envs: int = 2, **options):
    name = {LinUCB: "linucb", LinTS: "lints", LinGreedy: "lingreedy"}[cls]
    cfg = testing.config(f"algo/{name}", **options)
    return cls(cfg, testing.context(of, needs=cls.needs(cfg, of), num_envs=num_envs))


def rollout(obs, action, reward, valid=None, **more):
    """Leaves ``[T+1, B]``, with a row T that nobody acted on."""
    obs, action, reward = torch.tensor(obs), torch.tensor(action), torch.tensor(reward)
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else torch.tensor(valid)
    rows = {"obs": obs, "action": action, "reward": reward, "valid": valid} | more
    last = {key: torch.zeros_like(x[:1]) for key, x in rows.items()}
    last["obs"], last["reward"] = last["obs"] + torch.nan, last["reward"] + torch.nan
    return {key: torch.cat([x, last[key]]) for key, x in rows.items()}


def learn(algorithm, *batches):
    return [algorithm.update(batch, learner_of(algorithm)).metrics for batch in batches][-1]


def act(algorithm, obs, mode="explore", **more):
    obs = obs if isinstance(obs, dict) else torch.as_tensor(obs)
    step = {"obs": obs, "is_first": torch.zeros(algorithm.ctx.num_envs, dtype=torch.bool), **more}
    return algorithm.act(step, {}, mode)[0]


# arm 0 saw (1, 0) with reward 1 and (1, 1) with 0; arm 1 saw (0, 1) with 2
ROWS = (
    [[[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [7.0, 7.0]]],
    [[0, 0], [1, 0]],
    [[1.0, 0.0], [2.0, torch.nan]],
    [[True, True], [True, False]],
)


# ---- what is learned -------------------------------------------------------------------------------------------------


def test_statistics_of_every_arm():
    """By hand: A0 = [[3, 1], [1, 2]], b0 = (1, 0), theta0 = A0^-1 b0 = (0.4, -0.2); A1 = diag(1, 2), b1 = (0, 2)."""
    algorithm = make(LinUCB, spec(2))
    metrics = learn(algorithm, rollout(*ROWS))
    assert algorithm.A.tolist() == [[[3.0, 1.0], [1.0, 2.0]], [[1.0, 0.0], [0.0, 2.0]]]
    assert algorithm.b.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    torch.testing.assert_close(algorithm.theta, torch.tensor([[0.4, -0.2], [0.0, 1.0]]).double())
    torch.testing.assert_close(algorithm.root.mT @ algorithm.root, torch.linalg.inv(algorithm.A))
    assert metrics.keys() == {"mean_reward"}
    assert metrics["mean_reward"] == 1.0
    assert {x.dtype for x in algorithm.state_dict().values()} == {torch.float64}


def test_one_theta_learns_from_the_features_of_the_chosen_arms():
    """By hand, with lambda 2: A = 2 I + (1, 0)(1, 0)^T + (1, 1)(1, 1)^T, b = (1, 0), theta = (3, -1) / 11."""
    algorithm = make(LinUCB, spec(2, 2), num_envs=1, lambda_=2.0)
    obs = [[[[9.0, 9.0], [1.0, 0.0]]], [[[1.0, 1.0], [9.0, 9.0]]]]
    learn(algorithm, rollout(obs, [[1], [0]], [[1.0], [0.0]]))
    assert algorithm.A.tolist() == [[[4.0, 1.0], [1.0, 3.0]]]
    torch.testing.assert_close(algorithm.theta, torch.tensor([[3.0, -1.0]]).double() / 11)


def test_disjoint_thetas_of_features_of_every_arm():
    algorithm = make(LinUCB, spec(2, 2), num_envs=1, disjoint=True)
    obs = [[[[9.0, 9.0], [1.0, 0.0]]], [[[1.0, 1.0], [9.0, 9.0]]]]
    learn(algorithm, rollout(obs, [[1], [0]], [[1.0], [0.0]]))
    assert algorithm.A.tolist() == [[[2.0, 1.0], [1.0, 2.0]], [[2.0, 0.0], [0.0, 1.0]]]
    torch.testing.assert_close(algorithm.theta, torch.tensor([[0.0, 0.0], [0.5, 0.0]]).double())


def test_an_update_without_rounds_changes_nothing():
    algorithm = make(LinUCB, spec(2, extras={"expected_reward": Box(-1, 1, (2,))}))
    learn(algorithm, rollout(*ROWS, expected_reward=torch.zeros(2, 2, 2)))
    before = {name: x.clone() for name, x in algorithm.state_dict().items()}
    empty = rollout(*ROWS[:3], [[False, False], [False, False]], expected_reward=torch.zeros(2, 2, 2))
    assert learn(algorithm, empty).keys() == {"mean_reward", "cumulative_regret"}
    assert differences(before, algorithm.state_dict()) == []


def test_regret_is_against_the_best_allowed_arm():
    algorithm = make(LinUCB, spec(2, extras={"expected_reward": Box(-1, 1, (2,)), "action_mask": Discrete(2)}))
    expected = torch.tensor([[[0.5, 1.0], [0.25, 0.0]], [[0.5, 0.75], [9.0, 0.0]]])
    mask = torch.tensor([[[True, True], [True, True]], [[False, True], [True, True]]])
    metrics = learn(algorithm, rollout(*ROWS, expected_reward=expected, action_mask=mask))
    assert metrics["cumulative_regret"] == 0.5  # of the first row's first column
    assert metrics["regret"] == 0.5 / 3
    learn(algorithm, rollout(*ROWS, expected_reward=expected, action_mask=mask))
    assert algorithm.totals.tolist() == [6.0, 6.0, 6.0, 1.0]


def test_of_recorded_rounds_those_count_that_chose_the_same():
    algorithm = make(LinUCB, spec(2, extras={"logged_action": Discrete(2)}))
    metrics = learn(algorithm, rollout(*ROWS, logged_action=torch.tensor([[0, 1], [1, 0]])))
    assert algorithm.A.tolist() == [[[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 2.0]]]
    assert metrics["mean_reward"] == 1.5
    assert metrics["accepted"] == 2 / 3


@pytest.mark.parametrize("num_envs", [4, 1])
@pytest.mark.parametrize("algo", ["lints"])
def test_two_ranks_are_equal_to_one_bit_for_bit(algo: str, num_envs: int):
    """Each has two of four environments; of one environment, both have all rows."""
    words = (f"algo={algo}", *RUN, f"num_envs={num_envs}", "rollout_fragment_length=8", "env.max_episode_steps=5")
    raw = compose(words).raw
    alone = play(one_rank(), raw, 6)
    assert alone["weights.totals"][0] > 6 * 8 * num_envs * 0.6
    for other in ranks(2)(play, raw, 6):
        assert differences(alone, other) == []


def late(fabric, raw):
    """Return the weights of this rank after one update from three rounds of collection."""
    with closing(build(parse(raw), Path(), fabric, Plan("cpu", fabric.world_size))) as trainer:
        for _ in range(3):
            trainer.collect("random")
        trainer.update()
        return trainer.algorithm.state_dict()


def test_ranks_learn_of_all_rounds_that_came_before_learning():
    """They come segment by segment, so they are added up in another order; a rank has as many columns as the run."""
    raw = compose(("algo=linucb", *RUN, "num_envs=4")).raw
    alone = late(one_rank(), raw)
    assert alone["totals"][0] == 12
    for other in ranks(2)(late, raw):
        assert distances(alone, other) == []


# ---- what is done ----------------------------------------------------------------------------------------------------


def test_the_upper_bound():
    """At x = (1, 0): 0.4 + alpha sqrt(0.4) of arm 0, where A0^-1 is [[2, -1], [-1, 3]] / 5; alpha of arm 1."""
    for alpha, best in ((0.0, 0), (1.0, 0), (1.2, 1)):
        algorithm = make(LinUCB, spec(2), alpha=alpha)
        learn(algorithm, rollout(*ROWS))
        out = act(algorithm, [[1.0, 0.0], [0.0, 1.0]])
        bounds = [[0.4 + alpha * 0.4**0.5, alpha], [-0.2 + alpha * 0.6**0.5, 1 + alpha * 0.5**0.5]]
        torch.testing.assert_close(out["q"], torch.tensor(bounds))
        assert out["action"].tolist() == [best, 1]
        assert act(algorithm, [[1.0, 0.0], [0.0, 1.0]], "greedy")["action"].tolist() == [0, 1]


@pytest.mark.parametrize("per_arm", [False, True])
def test_thompson_draws_from_the_posterior(per_arm: bool):
    n, x = 40_000, [1.0, 2.0]
    algorithm = make(LinTS, spec(2, 2) if per_arm else spec(2), num_envs=n, v=0.5)
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 2, range(2)
    obs = [[[[1.0, 0.0], [1.0, 0.0]]] * 2] if per_arm else ROWS[0]
    learn(algorithm, rollout(obs, *([[0, 1]], [[1.0, 0.5]]) if per_arm else ROWS[1:]))
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = n, range(n)
    rows = torch.tensor([x, x] if per_arm else x).expand(n, *([2, 2] if per_arm else [2]))
    q = act(algorithm, rows)["q"].double()
    x = torch.tensor(x).double()
    variance = 0.25 * torch.einsum("i,aij,j->a", x, torch.linalg.inv(algorithm.A), x)
    torch.testing.assert_close(q.mean(0), (algorithm.theta @ x).expand(2), atol=0.02, rtol=0)
    torch.testing.assert_close(q.var(0), variance.expand(2), rtol=0.05, atol=0)
    correlation = torch.corrcoef(q.T)[0, 1].item()  # arms with thetas of their own draw for themselves
    assert correlation > 0.999 if per_arm else abs(correlation) < 0.02


def test_rllibs_items_are_features_of_the_arms():
    plain, of = make(LinUCB, spec(2, 2)), spec(2)
    item = Dict({"item": Box(-9.0, 9.0, (2, 2), np.float32)})
    items = make(LinUCB, EnvSpec({"agent": Group(item, Discrete(2))}, offers=of.offers))
    obs = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0))
    assert differences(act(plain, obs.numpy()), act(items, {"item": obs})) == []


# ---- environments ----------------------------------------------------------------------------------------------------


def environment(cls=LinearBandit, columns: int = 3, total: int = 0, env_ids=None, **options):
    name = {LinearBandit: "linear_bandit", LoggedBandit: "logged_bandit"}[cls]
    shard = EnvShard("actor", columns, range(columns) if env_ids is None else env_ids)
    return cls(
        testing.config(f"env/{name}", **options), RunContext(spec=EnvSpec({}), total_steps=total).derive(shard=shard)
    )


@pytest.mark.parametrize("per_arm", [False, True])
def test_means_are_linear_and_rewards_scatter_around_them(per_arm):
    env = environment(columns=1000, per_arm=per_arm, num_actions=3)
    first = env.reset(range(1000))
    x = first["obs"].astype(float) if per_arm else np.repeat(first["obs"][:, None].astype(float), 3, 1)
    np.testing.assert_allclose(first["expected_reward"], (x * env.theta).sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(first["obs"], axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(env.theta, axis=-1), 1.0)
    action = np.arange(1000) % 3
    noise = env.step(action)["reward"] - first["expected_reward"][np.arange(1000), action]
    assert abs(noise.mean()) < 4 * 0.25 / 1000**0.5
    assert abs(noise.std() - 0.25) < 0.03


def test_a_column_is_the_same_whoever_plays_beside_it():
    whole, part = environment(columns=4), environment(columns=4, env_ids=[1, 3])
    rows = whole.reset([5, 6, 7, 8]), part.reset([6, 8])
    for _ in range(130):  # several blocks, and the end of an episode
        for key in rows[0]:
            assert np.array_equal(rows[0][key][[1, 3]], rows[1][key])
        rows = whole.step(np.array([0, 1, 2, 3])), part.step(np.array([1, 3]))


def test_behind_an_episode_the_next_round_is_shown_as_final_and_as_first():
    env = environment(max_episode_steps=2)
    rows = [env.reset([0, 1, 2]), *(env.step(np.zeros(3, int)) for _ in range(4))]
    assert [row["truncated"].all() for row in rows[1:]] == [False, True, False, False]
    assert np.array_equal(rows[2]["obs"], rows[3]["obs"])
    assert not np.array_equal(rows[3]["obs"], rows[4]["obs"])
    assert not rows[3]["reward"].any()


@pytest.mark.parametrize(
    "wrong", [{"seeds": []}, {"seeds": [1, 2, "x"]}, {"seeds": [1, 2, -3]}, {"number": "x"}, {"number": -1}]
)
def test_a_state_that_no_bandit_had_is_refused(wrong):
    env = environment()
    env.reset([0, 1, 2])
    with pytest.raises(ValueError, match=r"env\.\S* (should be|is negative)"):
        env.load(env.state() | wrong)


# ---- recorded rounds -------------------------------------------------------------------------------------------------


def recorded(path: Path, n: int = 20_000, **changes):
    """Write rounds of a policy that takes arm 0 half of the time; return the world's theta ``[3, 2]``."""
    g = np.random.default_rng(0)
    theta, x = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.6]]), g.random((n, 2))
    propensity = np.array([0.5, 0.25, 0.25])
    action = g.choice(3, n, p=propensity)
    reward = (x * theta[action]).sum(1) + 0.1 * g.standard_normal(n)
    rounds = {"context": x, "action": action, "reward": reward, "propensity": propensity[action]} | changes
    np.savez(path, **{key: value for key, value in rounds.items() if value is not None})
    return theta


def test_a_policy_is_worth_in_the_replay_what_it_is_worth(tmp_path: Path):
    """Li et al. 2011, theorem 1; the record's policy takes arm 0 twice as often, which its propensities say."""
    theta = recorded(path := tmp_path / "log.npz")
    env = environment(LoggedBandit, columns=1, path=str(path), max_episode_steps=1_000_000)
    row, agreed, truth = env.reset([0]), [], []
    for _ in range(env.rounds):
        means = (theta @ row["obs"][0]).tolist()
        action, logged = np.array([np.argmax(means)]), row["logged_action"]
        row = env.step(action)
        truth.append(max(means))
        agreed += [row["reward"][0]] if action == logged else []
        assert action == logged or row["reward"] == 0
    assert len(truth) == pytest.approx(0.75 * 20_000, rel=0.02)  # half of arm 0's rounds are left out
    assert len(agreed) == pytest.approx(len(truth) / 3, rel=0.05)
    error = np.std(agreed) / len(agreed) ** 0.5
    assert abs(np.mean(agreed) - np.mean(truth)) < 3 * error < 0.02


def test_columns_share_the_rounds_of_a_csv_out(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_text("age,action,reward,clicks\n" + "".join(f"{i},{i % 2},{10 * i},{i / 4}\n" for i in range(6)))
    env = environment(LoggedBandit, columns=3, env_ids=[0, 2], path=str(path), max_episode_steps=5)
    assert env.reset([0, 0])["obs"].tolist() == [[0.0, 0.0], [2.0, 0.5]]
    row = env.step(np.array([0, 1]))
    assert row["obs"].tolist() == [[3.0, 0.75], [5.0, 1.25]]
    assert row["logged_action"].tolist() == [1, 1]
    assert row["reward"].tolist() == [0.0, 0.0]
    assert env.step(np.array([1, 1]))["reward"].tolist() == [30.0, 50.0]


def test_a_run_learns_from_a_record_and_says_what_counted(tmp_path: Path):
    theta = recorded(path := tmp_path / "log.npz", 4000)
    words = [*RUN, "algo=linucb", "algo.alpha=2.0", "env=logged_bandit", f"env.path={path}", "num_envs=4"]
    with closing(build(compose([*words, "total_steps=2000", "rollout_fragment_length=4"]), Path())) as trainer:
        while not trainer.done:
            trainer.collect()
            metrics = trainer.update().metrics
        assert metrics["accepted"] == pytest.approx(1 / 3, abs=0.1)
        np.testing.assert_allclose(trainer.algorithm.theta, theta, atol=0.15)
        counted = trainer.algorithm.totals[1]
    assert metrics["mean_reward"] > 0.6  # an arm that is drawn uniformly has 0.53, the best one 0.7
    assert counted > 500


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["algo=linucb", "env=cartpole"], "env", "env.max_episode_steps=1 makes every step a round"),
        (["algo=lints", "env=pendulum"], "env", "chooses one of several arms, but the actions are Box"),
        (["algo=linucb", "env=taxi", "env.max_episode_steps=1"], "env", "env.flatten=true makes one vector"),
        (["algo=linucb", "env=linear_bandit", "algo.disjoint=false"], "algo.disjoint", "use null"),
        (["algo=linucb", "env=linear_bandit", "algo.lambda_=0"], "algo.lambda_", "greater than 0"),
        (["algo=linucb", "env=linear_bandit", "algo.alpha=-1"], "algo.alpha", "greater than or equal to 0"),
        (["algo=linucb", "env=linear_bandit", "buffer=replay"], "buffer", "use buffer=rollout"),
        (["algo=linucb", "env=linear_bandit", "model=lstm"], "model", "recurrent"),
        (["algo=lingreedy", "env=linear_bandit", "exploration=[icm]"], "exploration", "[epsilon_greedy,icm]"),
        (["algo=linucb", "env=logged_bandit", "env.path=/nowhere.npz"], "env.path", "cannot be read"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else None,
)
def test_refused_before_anything_starts(words, key, said):
    with pytest.raises(ConfigError) as error:
        resolve(compose(["tuned=none", "hardware=cpu", *words]))
    assert error.value.key == key
    assert said in error.value.message


def test_an_environment_of_single_steps_is_served():
    resolve(compose(["algo=linucb", "env=cartpole", "env.max_episode_steps=1", "tuned=none", "hardware=cpu"]))
    cfg = testing.config("algo/linucb")
    with pytest.raises(ConfigError, match=r"\[5, 3\]|of every arm \[2, d\]"):
        LinUCB.needs(cfg, spec(5, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": None}, "lacks reward; it has context, action, propensity"),
        ({"action": np.full(9, 0.5)}, "whole numbers from 0 to inf"),
        ({"action": np.arange(9), "context": np.zeros((9, 3, 2))}, "whole numbers from 0 to 2"),
        ({"action": np.arange(8)}, "the others [N]"),
        ({"context": np.zeros(9)}, "context [N, d] or [N, arms, d]"),
        ({"context": np.zeros((0, 2)), "action": [], "reward": [], "propensity": []}, "N above 0"),
        ({"context": np.full((9, 2), np.nan)}, "a context that is not a finite number"),
        ({"reward": np.array(["a"] * 9)}, "a reward that is not a finite number"),
        ({"propensity": np.zeros(9)}, "not in (0, 1]"),
        ({"action_mask": np.ones((9, 2))}, "an action_mask that is not [N, 3]"),
        ({"action_mask": np.eye(3)[np.full(9, 1)]}, "or forbids an arm that was taken"),
        ({"action": np.array(1)}, "action []"),
        ({"bytes": 0}, "cannot be read as recorded rounds"),
        ({"bytes": 300}, "cannot be read as recorded rounds"),
        ("action,reward,x\n0,1,2\n0,1\n", "line 3"),
        ("action,reward,x\n0,1,a\n", "'a'"),
        ("", "is empty"),
    ],
)
def test_broken_records_are_refused(tmp_path: Path, changes, said):
    path = tmp_path / ("log.csv" if isinstance(changes, str) else "log.npz")
    if isinstance(changes, str):
        path.write_text(changes)
    else:
        recorded(path, 9, **{key: x for key, x in changes.items() if key != "bytes"})
        path.write_bytes(path.read_bytes()[: changes.get("bytes")])
    with pytest.raises(ConfigError) as error:
        read(path)
    assert error.value.key == "env.path"
    assert str(path) in error.value.message
    assert said in error.value.message


def test_arms_that_were_not_offered_are_forbidden(tmp_path: Path):
    recorded(path := tmp_path / "log.npz", 6, action=np.arange(6) % 3, action_mask=np.eye(3)[np.arange(6) % 3])
    env = environment(LoggedBandit, columns=1, path=str(path))
    assert env.spec.extras["action_mask"].n == 3
    assert env.reset([0])["action_mask"].tolist() == [[True, False, False]]
    assert env.step(np.array([0]))["action_mask"].tolist() == [[False, True, False]]


def test_a_round_counts_once(tmp_path: Path):
    recorded(path := tmp_path / "log.npz", 9, propensity=None)
    assert environment(LoggedBandit, columns=2, total=8, path=str(path)).num_envs == 2
    for columns, total, key, said in ((2, 9, "total_steps", "use 8"), (10, 5, "num_envs", "the 9 rounds")):
        with pytest.raises(ConfigError) as error:
            environment(LoggedBandit, columns=columns, total=total, path=str(path))
        assert error.value.key == key
        assert said in error.value.message


def test_algorithms_that_learn_from_every_row_are_refused(tmp_path: Path):
    recorded(path := tmp_path / "log.npz", 900, propensity=None)
    words = ["algo=dqn", "env=logged_bandit", f"env.path={path}", *RUN[1:]]
    with pytest.raises(ConfigError, match="use algo=linucb, lints or lingreedy"):
        build(compose([*words, "total_steps=500"]), tmp_path)
