"""PPO beside its paper: what its update does with a segment."""

from __future__ import annotations

import pytest
import torch

import rlplug
from rlplug import testing, tree
from rlplug.functional import gae
from rlplug.plugins.algo.ppo import PPO
from rlplug.testing.probes import PROBES, check_probe
from rlplug.types import ConfigError
from tests.plugins.acting import B, T, learner_of, segment
from tests.plugins.test_actor_critics import make as made


def make(spec=None, overrides=(), **changes) -> PPO:
    return made("ppo", spec, overrides, **changes)


def update(algorithm: PPO, batch=None):
    learner = learner_of(algorithm)
    counted = []
    minimize = learner.minimize
    learner.minimize = lambda *a, **k: counted.append(1) or minimize(*a, **k)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm) if batch is None else batch)
    losses = algorithm.update(prepared, learner)
    return losses, len(counted)


def test_every_valid_row_is_used_once_an_epoch():
    assert update(make())[1] == 2 * 4  # 62 valid rows in minibatches of 16


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


def test_scheduled_clip_follows_the_steps():
    algorithm = make(clip_param=[[0, 0.2], [100, 0.0]])
    algorithm.ctx.schedules.refresh(50)
    assert float(algorithm.clip_param) == pytest.approx(0.1)


def test_masks_reach_every_minibatch():
    algorithm = make(testing.spec(3, 4), num_sgd_iter=1, sgd_minibatch_size=T * B)
    mask = torch.rand(T + 1, B, 4, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., 0] = True
    losses, _ = update(algorithm, segment(algorithm, mask))
    assert float(losses.metrics["kl"]) == pytest.approx(0.0, abs=1e-6)  # the same masks as when it acted


# ---- recurrence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru", "attention"])
def test_one_unroll_of_stream_rows_is_every_episode_by_itself(cell, shared):
    algorithm = make(overrides=[f"model={cell}"], vf_share_layers=shared, gamma=0.9, lambda_=0.8)
    batch = segment(algorithm)
    with torch.no_grad():
        value = algorithm.net.values(batch, tree.map(lambda x: x[0], batch["carry"]))
        torso, name = (algorithm.net.torso, "policy") if shared else (algorithm.net.value_torso, "value")
        for column, starts in enumerate([[0], [0], [0, 6], [0, 10]]):
            for start, end in zip(starts, [*starts[1:], T + 1], strict=True):
                carry = torso.initial_carry(1)
                if not batch["is_first"][start, column]:
                    carry = tree.map(lambda x: x[0, column : column + 1], batch["carry"][name])  # noqa: B023
                brute = []
                for obs in batch["obs"][start:end, column]:
                    features, carry = torso(obs[None], carry, torch.zeros(1, dtype=torch.bool))
                    brute.append(algorithm.net.value(features)[0, 0])
                torch.testing.assert_close(value[start:end, column], torch.stack(brute))
                rows = {key: batch[key][start:end, column : column + 1] for key in ("reward", "terminated", "valid")}
                advantage, _ = gae(
                    rows["reward"], torch.stack(brute)[:, None], rows["terminated"], rows["valid"], 0.9, 0.8
                )
                whole, _ = gae(batch["reward"], value, batch["terminated"], batch["valid"], 0.9, 0.8)
                torch.testing.assert_close(whole[start:end, column], advantage[:, 0])


@pytest.mark.parametrize("length", [1, 4, 5, 16])
@pytest.mark.parametrize("overrides", [["model=lstm"], ["model=mlp", "model@critic_model=gru"], ["model=attention"]])
def test_chunks_unroll_to_what_acted(length, overrides):
    algorithm = make(overrides=overrides, max_seq_len=length)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm))
        losses = algorithm.forward(prepared, ("policy",))
        features = algorithm.net.values(prepared, tree.map(lambda x: x[0], prepared["carry"]))
    valid = prepared["valid"]
    assert valid.shape == (length, B * -(-T // length))
    assert int(valid.sum()) == T * B - 2
    torch.testing.assert_close(losses.diagnostics()["kl"][valid], torch.zeros(T * B - 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(features[valid], prepared["value"][valid])


def test_advantages_are_normalised_over_valid_rows():
    algorithm = make(overrides=["model=lstm"], sgd_minibatch_size=T * B, num_sgd_iter=1)
    learner = learner_of(algorithm)
    seen, minimize = [], learner.minimize
    learner.minimize = lambda batch, *rest, **options: seen.append(batch) or minimize(batch, *rest, **options)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm))
    assert not prepared["valid"].all()
    algorithm.update(prepared, learner)
    (minibatch,) = seen
    a = minibatch["advantage"][minibatch["valid"]]
    torch.testing.assert_close(a.mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(a.std(correction=0), torch.tensor(1.0))


def test_memory_reaches_back_through_a_chunk_and_no_further():
    """The loss of a chunk's last row has a gradient in the observations of its rows, and of its own episode alone."""
    algorithm = make(overrides=["model=lstm"], max_seq_len=8)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm))
    prepared["obs"].requires_grad_()
    algorithm.forward(prepared, ("policy",)).terms["value"][7].sum().backward()
    reached = prepared["obs"].grad.abs().sum(-1) > 0  # [8, 2 B]: two chunks of every column
    assert reached[:, :4].all()
    assert reached[:, 4].tolist() == [False] * 6 + [True] * 2  # column 2 begins anew in row 6
    assert reached[:, 6].all()
    assert reached[:, 7].tolist() == [False] * 2 + [True] * 6  # and column 3 in row 10


def test_recurrent_minibatches_smaller_than_a_chunk_are_refused():
    with pytest.raises(ConfigError, match="max_seq_len"):
        make(overrides=["model=lstm"], max_seq_len=8, sgd_minibatch_size=4)


def test_chunks_without_a_transition_are_not_learned_from(tmp_path):
    """5 rows in chunks of 4: the second chunk is often a final observation alone."""
    words = ["algo=ppo", "model=lstm", "env=gymnasium", "env.id=rlplug.testing.worlds:World-v0", "num_envs=1"]
    words += ["env.vectorization=list", "rollout_fragment_length=5", "algo.max_seq_len=4"]
    words += ["algo.sgd_minibatch_size=4", "total_steps=100", "eval.every=0", "eval.episodes=1", "logger.only=[]"]
    rlplug.train([*words, f"hydra.run.dir={tmp_path / 'run'}"])


def test_the_policy_judges_with_masks():
    algorithm = make()
    mask = torch.zeros(T + 1, B, 2, dtype=torch.bool)
    mask[..., 1] = True
    batch = segment(algorithm, mask)
    torch.testing.assert_close(algorithm.logp(batch), torch.zeros(T + 1, B))


@pytest.mark.parametrize("distribution", ["squashed_gaussian", "beta"])
def test_the_best_number_is_found_by_every_distribution(distribution):
    check_probe("ppo", PROBES["target"], "box", [f"algo.distribution={distribution}"])
