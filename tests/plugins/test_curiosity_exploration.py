"""ICM and RND beside their papers: what is rewarded, what is learnt, and what counts once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import compose, testing
from rlplug.api import Segment
from rlplug.distributed.fabric import one_rank
from rlplug.nn import Linear
from rlplug.plugins.exploration.icm import ICM
from rlplug.plugins.exploration.rnd import RND
from rlplug.testing.checks.runs import Watching
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError
from tests.plugins.acting import learner_of

T, B = 5, 6
ACTIONS: dict[str, Any] = {
    "discrete": 4,
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(3),
    "box": testing.box(2),
}


def make(cls: Any, action: Any = 4, obs: Any = 3, overrides=(), **changes) -> Any:
    torch.manual_seed(0)
    name = cls.__name__.lower()
    ctx = testing.context(testing.spec(obs, action), overrides=overrides, num_envs=B)
    return cls(testing.config(f"exploration/{name}", **changes), ctx)


def sample(extra: Any, seed: int = 1) -> dict[str, Any]:
    """Rows ``[T+1, B]``; episodes end in columns 0 and 1, and the last row says valid, as a replay's may."""
    g = torch.Generator().manual_seed(seed)
    action = extra.space if isinstance(extra, ICM) else spaces.Discrete(4)
    action.seed(seed)
    drawn = torch.tensor([[action.sample().tolist() for _ in range(B)] for _ in range(T + 1)])
    batch = {"obs": torch.randn(T + 1, B, 3, generator=g), "action": drawn, "reward": torch.zeros(T + 1, B)}
    batch["valid"] = torch.ones(T + 1, B, dtype=torch.bool)
    batch["valid"][2, 0] = batch["valid"][4, 1] = False
    return batch


def by_hand(eta: float = 0.05, beta: float = 0.2) -> tuple[ICM, dict[str, torch.Tensor]]:
    """Features are the observation; every prediction is 0 and every action as likely."""
    icm = make(ICM, obs=2, eta=eta, beta=beta, feature_dim=2)
    with torch.no_grad():
        icm.feature.weight.copy_(torch.eye(2))
        for p in (icm.feature.bias, *icm.predict.parameters(), *icm.inverse.parameters()):
            p.zero_()
    obs = torch.tensor([[[9.0, 9.0]], [[1.0, 2.0]]])
    return icm, {"obs": obs, "action": torch.tensor([[2], [0]]), "valid": torch.tensor([[True], [False]])}


def test_icm_s_reward_by_hand():
    icm, batch = by_hand()
    assert_close(icm.intrinsic_reward(batch), torch.tensor([[0.125], [0.0]]))


def test_icm_s_loss_by_hand():
    icm, batch = by_hand()
    terms = icm.forward(batch, ("predictor",)).terms
    assert_close(terms["inverse"], torch.tensor([[0.8 * math.log(4.0)]]))
    assert_close(terms["forward"], torch.tensor([[0.2 * 2.5]]))
    losses = learner_of(icm).minimize(batch, icm)
    assert_close(sum(losses.terms.values()), torch.tensor(1.609035))


@pytest.mark.parametrize("cls", [ICM, RND])
def test_only_transitions_are_rewarded(cls):
    extra = make(cls)
    batch = sample(extra)
    reward = extra.intrinsic_reward(batch)
    begins = batch["valid"].clone()
    begins[-1] = False
    assert ((reward > 0) == begins).all()
    assert not reward.requires_grad


@pytest.mark.parametrize("cls", [ICM, RND])
def test_the_reward_is_of_where_a_transition_leads(cls):
    """Another row t + 1 changes the reward of row t, and of no later row but its own."""
    extra = make(cls)
    batch, other = sample(extra), sample(extra)
    other["obs"][3, 4] += 1.0
    changed = (extra.intrinsic_reward(batch) != extra.intrinsic_reward(other)).nonzero().tolist()
    assert changed == ([[2, 4], [3, 4]] if cls is ICM else [[2, 4]])


@pytest.mark.parametrize("kind", ["multi_discrete", "box"])
def test_icm_learns_which_action_was_taken(kind):
    """Actions move the observation; after training the inverse model knows them, and the forward model the outcome."""
    space = testing.spec(3, ACTIONS[kind]).single_agent.action
    icm = make(ICM, ACTIONS[kind], obs=8, lr=3e-3, feature_dim=16)
    learner, g = learner_of(icm), torch.Generator().manual_seed(0)
    move = torch.randn(icm.flatten.size, 8, generator=g)
    space.seed(0)
    found = []
    for _ in range(300):
        action = torch.stack([torch.as_tensor(space.sample()) for _ in range(64)])
        obs = torch.randn(64, 8, generator=g)
        rows = torch.stack((obs, obs + icm.flatten(action) @ move))
        batch = {"obs": rows, "action": torch.stack((action, action)), "valid": torch.ones(2, 64, dtype=torch.bool)}
        found.append((icm.intrinsic_reward(batch)[0].mean(), icm.inverse_error(*icm.encoded(batch)).mean().detach()))
        icm.update(batch, learner)
    assert found[-1][0] < 0.2 * found[0][0]
    assert found[-1][1] < 0.2 * found[0][1]


@pytest.mark.parametrize(("cls", "kind"), [*((ICM, kind) for kind in ACTIONS), (RND, "discrete")])
def test_predictions_are_precise_under_autocast(cls, kind):
    """Small errors are small differences of predictions and targets, which 8 bits do not hold."""
    extra, computed = make(cls, ACTIONS[kind]), []
    outputs = (
        (extra.feature, extra.predict, extra.inverse) if cls is ICM else (extra.target["head"], extra.predictor["head"])
    )
    for part in outputs:
        for layer in (layer for layer in part.modules() if isinstance(layer, Linear)):
            layer.forward = lambda x, forward=layer.forward: computed.append((out := forward(x)).dtype) or out
    with torch.autocast("cpu", torch.bfloat16):
        extra(sample(extra), ("predictor",))
    assert len(computed) >= len(outputs)
    assert set(computed) == {torch.float32}


def test_bounded_actions_are_predicted_as_they_were_executed():
    icm = make(ICM, testing.box(2))
    batch = sample(icm) | {"action": torch.full((T + 1, B, 2), 1.0)}
    assert_close(icm.intrinsic_reward(batch), icm.intrinsic_reward(batch | {"action": torch.full((T + 1, B, 2), 7.0)}))


@pytest.mark.parametrize("cls", [ICM, RND])
def test_minibatches_take_every_transition_once_an_epoch(cls):
    changes = {"num_sgd_iter": 2, "sgd_minibatch_size": 7} | ({"update_proportion": 1.0} if cls is RND else {})
    extra = make(cls, **changes)
    batch, seen = sample(extra) | {"weight": torch.arange(B) + 1.0}, []
    learner = learner_of(extra, cls=Watching)
    learner.look = lambda learner, who, part, parts: seen.append(part)
    extra.update(batch, learner)
    assert len(seen) == 2 * 4
    count = sum(len(part["action"]) for part in seen)
    assert count == 2 * int(batch["valid"][:-1].sum())
    pairs = {
        tuple(x.tolist()): (y, w)
        for part in seen
        for x, y, w in zip(part["obs"], part["next_obs"], part["weight"], strict=True)
    }
    for t, i in batch["valid"][:-1].nonzero().tolist():
        found, weight = pairs[tuple(batch["obs"][t, i].tolist())]
        assert_close((found, weight), (batch["obs"][t + 1, i], torch.tensor(i + 1.0)))


@pytest.mark.parametrize("cls", [ICM, RND])
def test_a_sample_of_weight_0_is_not_learnt_from(cls):
    """And one of weight 2 counts twice."""
    extra = make(cls)
    batch = sample(extra)
    terms = extra.forward(batch, ("predictor",)).terms
    weighted = extra.forward(batch | {"weight": torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 1.0])}, ("predictor",)).terms
    for name, term in terms.items():
        assert (weighted[name][:, 0] == 0).all()
        assert_close(weighted[name][:, 2], 2.0 * term[:, 2])
        assert_close(weighted[name][:, 3:], term[:, 3:])


@pytest.mark.parametrize("name", ["icm", "rnd"])
def test_recurrent_features_are_refused(name):
    chosen = compose(["algo=ppo", f"exploration=[{name}]", f"model@exploration.{name}.feature=lstm"])
    with pytest.raises(ConfigError, match=rf"exploration\.{name}\.feature: LSTM is recurrent"):
        chosen.exploration[name].build(testing.context(num_envs=B))


# ---- RND's statistics ------------------------------------------------------------------------------------------------


def test_rnd_divides_by_the_deviation_of_the_discounted_return():
    rnd = make(RND, gamma=0.9, eta=2.0)
    learner, returns, sums = learner_of(rnd), torch.zeros(B), []
    for seed in (1, 2):
        batch = sample(rnd, seed)
        rnd.observe(Segment(batch), learner)
        error = rnd.error(batch["obs"][1:]).detach()  # measured by the moments of the observations until then
        for t in range(T):
            returns = torch.where(batch["valid"][t], 0.9 * returns + error[t], returns)
            sums.append(returns[batch["valid"][t]])
    assert_close(rnd.returns, returns)
    deviation = torch.cat(sums).std(correction=0)
    assert_close(rnd.intrinsic_reward(batch)[:-1][batch["valid"][:-1]], (2.0 * error / deviation)[batch["valid"][:-1]])


def test_rnd_whitens_observations_that_transitions_lead_to():
    rnd = make(RND, obs_clip=1.5)
    batch = sample(rnd)
    batch["obs"] = 50.0 + 10.0 * batch["obs"]
    rnd.observe(Segment(batch), learner_of(rnd))
    counted = batch["obs"][1:][batch["valid"][:-1]]
    expected = ((batch["obs"] - counted.mean(0)) / counted.std(0, correction=0)).clamp(-1.5, 1.5)
    assert_close(rnd.whitened(batch["obs"]), expected, rtol=1e-4, atol=1e-4)
    assert (expected.abs() == 1.5).any()


def test_rnd_measures_replayed_rows_by_frozen_statistics():
    rnd = make(RND)
    rnd.observe(Segment(sample(rnd)), learner_of(rnd))
    before = {name: x.clone() for name, x in rnd.named_buffers()}
    other = sample(rnd, seed=3)
    assert torch.equal(rnd.intrinsic_reward(other), rnd.intrinsic_reward(other))
    rnd.update(other, learner_of(rnd))
    assert_close(dict(rnd.named_buffers()), before, rtol=0.0, atol=0.0)


def test_rnd_trains_the_predictor_alone_on_a_share_of_the_rows():
    rnd = make(RND, update_proportion=0.25)
    valid = torch.ones(100, 100, dtype=torch.bool)
    valid[:50] = False
    chosen = rnd.chosen({"valid": valid})
    assert not chosen[:50].any()
    assert not chosen[-1].any()
    assert 0.22 < chosen[50:].float().mean() < 0.28
    target = {name: p.clone() for name, p in rnd.target.named_parameters()}
    rnd.update(sample(rnd), learner_of(rnd))
    assert_close(dict(rnd.target.named_parameters()), target, rtol=0.0, atol=0.0)


def merged(fabric: Any, columns: slice | None) -> dict[str, torch.Tensor]:
    rnd = make(RND)
    learner = learner_of(rnd, fabric)
    for seed in (1, 2):
        mine = slice(None)
        if fabric.world_size == 2:
            mine = slice(0, 4) if fabric.global_rank == 0 else slice(4, None)
        rnd.observe(Segment({key: x[:, mine] for key, x in sample(rnd, seed).items()}, mine), learner)
    return dict(rnd.named_buffers())


def test_rnd_merges_statistics_over_ranks():
    alone = merged(one_rank(), None)
    for rank in ranks(2)(merged, None):
        assert_close(rank, alone, rtol=1e-5, atol=1e-6)
