"""Contexts of algorithms that act for several agents of every environment."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from rlplug import testing
from rlplug.context import EnvShard
from rlplug.contract import MisuseError

ENVS, N = 6, 3


def child(rank: int = 0, world_size: int = 1, **options):
    share = ENVS // world_size
    ids = range(rank * share, (rank + 1) * share)
    ctx = testing.context(num_envs=ENVS, env_ids=ids, rank=rank, world_size=world_size, batch_size=4, seed=3, **options)
    return ctx.child(testing.spec(2, 5), agents=N)


def test_sizes_count_agents():
    ctx = child(1, 2)
    assert (ctx.num_envs, [*ctx.env_ids], ctx.batch_size) == (18, [*range(9, 18)], 12)
    with ctx.acting(EnvShard("actor", 4, [0, 3])):
        assert (ctx.num_envs, [*ctx.env_ids]) == (12, [0, 1, 2, 9, 10, 11])
    assert ctx.child(ctx.spec, agents=2).num_envs == 36


@pytest.mark.parametrize("role", ["actor", "eval", "learner"])
def test_rows_of_agents_are_shares_of_one_draw(role):
    """Actors, ranks and evaluations draw what one process draws, row by row; without rows, all draw the same."""

    def draw(ctx, ids):
        if role == "learner":
            return ctx.randn(len(ids) * N, 2), ctx.rand(3, rows=False)
        with ctx.acting(EnvShard(role, ENVS, ids)):
            return ctx.randn(len(ids) * N, 2), ctx.rand(3, rows=False)

    whole, same = draw(child(), range(ENVS))
    parts = [draw(child(rank, 2), range(rank * 3, rank * 3 + 3)) for rank in range(2)]
    assert torch.equal(torch.cat([rows for rows, _ in parts]), whole)
    assert all(torch.equal(shared, same) for _, shared in parts)
    if role != "learner":
        some, _ = draw(child(), [4, 1])
        assert torch.equal(some, whole.view(ENVS, N, 2)[[4, 1]].flatten(0, 1))


def test_replicated_rows_are_the_whole_draw():
    ctx = child(1, 2)
    ctx.shard.replicated = True
    assert torch.equal(ctx.rand(12, 2), child().rand(12, 2))


def test_models_of_its_own():
    ctx = testing.context(overrides=["model=mlp", "model.hidden=[8]"])
    other = testing.context(overrides=["model=mlp", "model.hidden=[5]"]).slots["model"]
    own = ctx.child(ctx.spec, models={"model": other})
    assert [x.build("model", ctx.spec.single_agent.obs).out_dim for x in (ctx, own)] == [8, 5]
    assert own.build("critic_model", ctx.spec.single_agent.obs).out_dim == 5, "an empty slot is that of the policy"
    mixed = testing.context(overrides=["model.hidden=[8]", "model@critic_model=mlp", "critic_model.hidden=[7]"])
    both = mixed.child(ctx.spec, models={"model": other})
    assert [both.build(slot, ctx.spec.single_agent.obs).out_dim for slot in ("model", "critic_model")] == [5, 7]


def test_a_copied_algorithm_keeps_generators_and_schedules():
    from rlplug.plugins.algo.ppo import PPO

    ctx = child(rollout_length=8, overrides=["algo=ppo"])
    algo = PPO(testing.config("algo/ppo", sgd_minibatch_size=8, lr=[[0, 1e-3], [100, 0.0]]), ctx)
    twin = copy.deepcopy(algo)
    assert twin.ctx is algo.ctx
    assert twin.lr is algo.lr
    assert twin.net.policy is not algo.net.policy
    before = pickle.dumps(ctx.state()["generators"]["eval"].numpy())
    with ctx.acting(EnvShard("eval", 2, range(2))), torch.inference_mode():
        twin.act({"obs": torch.zeros(6, 2), "is_first": torch.ones(6, dtype=torch.bool)}, {}, "explore")
    assert pickle.dumps(ctx.state()["generators"]["eval"].numpy()) != before


def test_a_wrong_number_of_rows_is_refused():
    ctx = child()
    with ctx.acting(EnvShard("actor", 2, range(2))), pytest.raises(MisuseError, match="6 environments act"):
        ctx.rand(2)
