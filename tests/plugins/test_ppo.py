"""PPO beside its paper: what its update does with a segment."""

from __future__ import annotations

import pytest
import torch

from rlplug import testing
from rlplug.plugins.algo.ppo import PPO
from rlplug.trainer.learner import FabricLearner
from rlplug.trainer.ranks import one_rank

T, B = 16, 4


def make(**changes) -> PPO:
    torch.manual_seed(0)
    spec = testing.spec(3, 2)
    cfg = testing.config("algo/ppo", **{"sgd_minibatch_size": 16, "num_sgd_iter": 2, **changes})
    return PPO(cfg, testing.context(spec, needs=PPO.needs(cfg, spec), num_envs=B, rows=T))


def segment(algorithm: PPO):
    g = torch.Generator().manual_seed(1)
    obs = torch.randn(T + 1, B, 3, generator=g)
    false = torch.zeros(T + 1, B, dtype=torch.bool)
    batch = {"obs": obs, "reward": obs[..., 0] + 1.0, "terminated": false, "truncated": false, "is_first": false}
    batch["valid"] = ~false
    batch["valid"][-1] = batch["valid"][5, 2] = False
    with torch.no_grad():
        out = [
            algorithm.act({"obs": row, "is_first": torch.zeros(B, dtype=torch.bool)}, {}, "explore")[0] for row in obs
        ]
    return batch | {key: torch.stack([o[key] for o in out]) for key in out[0]}


def update(algorithm: PPO, batch=None):
    learner = FabricLearner(one_rank(), algorithm.ctx, algorithm, None)
    counted = []
    minimise = learner.minimise
    learner.minimise = lambda *a, **k: counted.append(1) or minimise(*a, **k)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm) if batch is None else batch)
    losses = algorithm.update(prepared, learner)
    return losses, len(counted)


def test_every_valid_row_is_used_once_an_epoch():
    assert update(make())[1] == 2 * 4  # 63 valid rows in minibatches of 16


def test_first_pass_has_ratio_one():
    algorithm = make(num_sgd_iter=1, sgd_minibatch_size=T * B)
    losses, _ = update(algorithm)
    assert float(losses.metrics["kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(losses.metrics["clip_fraction"]) == 0.0
    assert float(losses.terms["policy"]) == pytest.approx(0.0, abs=1e-5)  # normalised advantages


def test_update_makes_the_rewarded_action_more_likely():
    algorithm = make(lr=1e-2, num_sgd_iter=5, gamma=0.0)
    batch = segment(algorithm)
    batch["reward"] = (batch["action"] == 1).float()
    update(algorithm, batch)
    with torch.no_grad():
        after = algorithm.policy(algorithm.model(batch["obs"], {}, None)[0]).logp(torch.ones_like(batch["action"]))
    assert after.exp().mean() > 0.6


def test_kl_stop_ends_the_epochs():
    assert update(make(kl_stop=1e-9, lr=1e-2, num_sgd_iter=50))[1] < 10


def test_kl_coefficient_adapts_and_is_part_of_the_state():
    algorithm = make(kl_coeff=0.2, kl_target=1e3)
    losses, _ = update(algorithm)
    assert float(algorithm.state_dict()["kl_coeff"]) == pytest.approx(0.1)
    assert "kl_penalty" in losses.terms
    algorithm = make(kl_coeff=0.2, kl_target=1e-9, lr=1e-2)
    update(algorithm)
    assert float(algorithm.kl_coeff) == pytest.approx(0.3)


def test_shared_torso_has_fewer_parameters_and_learns():
    shared, separate = make(vf_share_layers=True), make()
    assert sum(p.numel() for p in shared.parameters()) < sum(p.numel() for p in separate.parameters())
    losses, _ = update(shared)
    assert all(torch.isfinite(term) for term in losses.terms.values())


def test_invalid_rows_change_nothing():
    algorithm, other = make(), make()
    batch = segment(algorithm)
    segment(other)  # both have drawn the same noise
    changed = {key: leaf.clone() for key, leaf in batch.items()}
    for key in ("reward", "logp", "action"):
        changed[key][5, 2] = 1 if key == "action" else 1e3
    update(algorithm, batch)
    update(other, changed)
    for a, b in zip(algorithm.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_scheduled_clip_follows_the_steps():
    algorithm = make(clip_param=[[0, 0.2], [100, 0.0]])
    algorithm.ctx.schedules.refresh(50)
    assert float(algorithm.clip_param) == pytest.approx(0.1)
