"""PPO beside its paper: what its update does with a segment."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import rlplug
from rlplug import testing, tree
from rlplug.distributed.fabric import one_rank
from rlplug.functional import gae
from rlplug.plugins.algo.ppo import PPO
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError
from tests.plugins.acting import B, T, segment


def make(spec=None, overrides=(), **changes) -> PPO:
    torch.manual_seed(0)
    spec = spec or testing.spec(3, 2)
    cfg = testing.config("algo/ppo", **{"sgd_minibatch_size": 16, "num_sgd_iter": 2, "max_seq_len": 8, **changes})
    needs = PPO.needs(cfg, spec)
    if any("lstm" in word or "gru" in word for word in overrides):
        needs = PPO.recurrent(cfg, needs)
    return PPO(cfg, testing.context(spec, overrides=overrides, needs=needs, num_envs=B, rollout_length=T))


def update(algorithm: PPO, batch=None):
    learner = RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)
    counted = []
    minimize = learner.minimize
    learner.minimize = lambda *a, **k: counted.append(1) or minimize(*a, **k)
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm) if batch is None else batch)
    losses = algorithm.update(prepared, learner)
    return losses, len(counted)


def test_every_valid_row_is_used_once_an_epoch():
    assert update(make())[1] == 2 * 4  # 62 valid rows in minibatches of 16


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
        after = algorithm.net.policy(algorithm.net.torso(batch["obs"], {}, None)[0]).logp(
            torch.ones_like(batch["action"])
        )
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


@pytest.mark.parametrize("overrides", [[], ["model=lstm"]])
def test_invalid_rows_change_nothing(overrides):
    algorithm, other = make(overrides=overrides), make(overrides=overrides)
    batch = segment(algorithm)
    segment(other)  # both have drawn the same noise
    changed = tree.map(torch.clone, batch)
    for key in ("reward", "logp", "action"):
        changed[key][5, 2] = changed[key][9, 3] = 1 if key == "action" else 1e3
    update(algorithm, batch)
    update(other, changed)
    for a, b in zip(algorithm.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_scheduled_clip_follows_the_steps():
    algorithm = make(clip_param=[[0, 0.2], [100, 0.0]])
    algorithm.ctx.schedules.refresh(50)
    assert float(algorithm.clip_param) == pytest.approx(0.1)


# ---- masks ----------------------------------------------------------------------------------------------------------

MASKED = {"discrete": (spaces.Discrete(4), [[4]]), "multi": (spaces.MultiDiscrete([3, 2]), [[3], [2]])}


def masks(sizes, rows: int, columns: int):
    """Random ones that leave something of every choice, and which of a flat row's entries are forbidden somewhere."""
    g = torch.Generator().manual_seed(2)
    parts = []
    for (n,) in sizes:
        part = torch.rand(rows, columns, n, generator=g) < 0.5
        part.scatter_(-1, torch.randint(n, (rows, columns, 1), generator=g), True)
        parts.append(part)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("mode", ["explore", "greedy"])
def test_no_forbidden_action_is_taken(kind, mode):
    action, sizes = MASKED[kind]
    algorithm = make(testing.spec(3, action))
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 2000, range(2000)
    mask = masks(sizes, 1, 2000)[0]
    step = {"obs": torch.randn(2000, 3), "is_first": torch.zeros(2000, dtype=torch.bool), "action_mask": mask}
    chosen = algorithm.act(step, {}, mode)[0]["action"].view(2000, -1)
    for (n,), part, a in zip(sizes, mask.split([n for (n,) in sizes], -1), chosen.unbind(-1), strict=True):
        assert a.max() < n
        assert part.gather(-1, a[:, None]).all()


@pytest.mark.parametrize("kind", MASKED)
def test_forbidden_actions_get_no_gradient(kind):
    action, sizes = MASKED[kind]
    algorithm = make(testing.spec(3, action), kl_coeff=0.2, entropy_coeff=0.1)
    mask = torch.ones(T + 1, B, sum(n for (n,) in sizes), dtype=torch.bool)
    mask[..., 1] = False  # choice 1 of the first factor
    with torch.no_grad():
        prepared = algorithm.prepare(segment(algorithm, mask))
    losses = algorithm.forward(prepared, ("policy",))
    assert all(torch.isfinite(x).all() for x in (losses.terms | losses.metrics).values())
    sum(term.mean() for term in losses.terms.values()).backward()
    gradient = algorithm.net.policy.linear.weight.grad
    assert (gradient[1] == 0).all()
    assert (gradient[[0, 2]] != 0).all()


def test_masks_reach_every_minibatch():
    algorithm = make(testing.spec(3, 4), num_sgd_iter=1, sgd_minibatch_size=T * B)
    losses, _ = update(algorithm, segment(algorithm, masks([[4]], T + 1, B)))
    assert float(losses.metrics["kl"]) == pytest.approx(0.0, abs=1e-6)  # the same masks as when it acted


# ---- recurrence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
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
@pytest.mark.parametrize("overrides", [["model=lstm"], ["model=mlp", "model@critic_model=gru"]])
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


def test_the_policy_forgets_where_an_episode_begins():
    algorithm = make(overrides=["model=lstm"])
    batch = segment(algorithm)
    with torch.no_grad():
        dist, _ = algorithm.net.dist(batch, tree.map(lambda x: x[0], batch["carry"]))
        for start, end, column in ((6, T + 1, 2), (10, T + 1, 3), (0, 6, 2)):
            carry = algorithm.net.torso.initial_carry(1)
            for t in range(start, end):
                features, carry = algorithm.net.torso(
                    batch["obs"][t, column][None], carry, torch.zeros(1, dtype=torch.bool)
                )
                torch.testing.assert_close(dist.params[t, column], algorithm.net.policy(features).params[0])
                if t < T:
                    torch.testing.assert_close(batch["dist"][t, column], algorithm.net.policy(features).params[0])


def test_advantages_are_normalised_over_valid_rows():
    algorithm = make(overrides=["model=lstm"], sgd_minibatch_size=T * B, num_sgd_iter=1)
    learner = RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)
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


def test_minibatches_of_chunks_have_as_many_rows_as_asked():
    algorithm = make(overrides=["model=lstm"], max_seq_len=4, sgd_minibatch_size=16)
    losses, count = update(algorithm)
    assert count == 2 * 4  # 16 chunks of 4 rows, in fours
    assert all(torch.isfinite(x) for x in (losses.terms | losses.metrics).values())


def test_recurrent_minibatches_smaller_than_a_chunk_are_refused():
    with pytest.raises(ConfigError, match="max_seq_len"):
        make(overrides=["model=lstm"], max_seq_len=8, sgd_minibatch_size=4)


def test_a_memory_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="vf_share_layers"):
        make(overrides=["model=mlp", "model@critic_model=lstm"], vf_share_layers=True, max_seq_len=8)


def test_chunks_without_a_transition_are_not_learned_from(tmp_path):
    """5 rows in chunks of 4: the second chunk is often a final observation alone."""
    words = ["algo=ppo", "model=lstm", "env=gymnasium", "env.id=rlplug.testing.worlds:World-v0", "num_envs=1"]
    words += ["env.vectorization=list", "rollout_fragment_length=5", "algo.max_seq_len=4"]
    words += ["algo.sgd_minibatch_size=4", "total_steps=100", "eval.every=0", "eval.episodes=1", "logger.only=[]"]
    rlplug.train([*words, f"hydra.run.dir={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [([], False), ([], True), (["model=lstm"], False), (["model=lstm"], True), (["model@critic_model=gru"], False)],
    ids=["mlp", "mlp shared", "lstm", "lstm shared", "memory of the critic"],
)
def test_the_policy_judges_as_it_acted_while_its_weights_are_the_same(overrides, shared):
    algorithm = make(overrides=overrides, vf_share_layers=shared)
    batch = segment(algorithm)
    torch.testing.assert_close(algorithm.logp(batch), batch["logp"])
    carry = batch.get("carry", {})
    for t in range(T + 1):  # every row by itself, from the state that was stored before it
        row = {key: batch[key][t : t + 1] for key in ("obs", "is_first")}
        value = algorithm.net.values(row, tree.map(lambda x, t=t: x[t], carry))[0]
        torch.testing.assert_close(algorithm.values(batch)[t], value)
    with torch.no_grad():
        for p in algorithm.parameters():
            p += 0.1
    assert (algorithm.logp(batch) - batch["logp"]).abs().max() > 1e-3
    assert algorithm.values(batch).shape == (T + 1, B)


def test_the_policy_judges_with_masks():
    algorithm = make()
    mask = torch.zeros(T + 1, B, 2, dtype=torch.bool)
    mask[..., 1] = True
    batch = segment(algorithm, mask)
    torch.testing.assert_close(algorithm.logp(batch), torch.zeros(T + 1, B))
