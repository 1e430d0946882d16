"""DreamerV3 against the authors' formulas: losses, rows at the ends of episodes, feedback of states, bad input."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from gymnasium import spaces
from torch.nn.functional import log_softmax

from rlplug import testing
from rlplug.buffer.samples import predictions
from rlplug.config import compose
from rlplug.functional import symexp_bins, symlog, two_hot
from rlplug.nn.rssm import RSSM as Dynamics  # noqa: N811
from rlplug.nn.rssm import SIZES, STOCH, Decoder, DenseHead, Encoder
from rlplug.plugins.algo.dreamerv3 import DreamerV3
from rlplug.plugins.model.rssm import RSSM
from rlplug.run.build import build
from rlplug.testing.checks.runs import CPU
from rlplug.types import Batch, ConfigError
from tests.contract.worlds import stream
from tests.plugins import acting

ROWS, COLUMNS, STEPS = 6, 3, 4
SMALL = ("model.size=1m", "train_batch_size=4", "algo.batch_length=8", "algo.imagination_length=2")


def make(spec=None, **changes) -> DreamerV3:
    changes = {"batch_length": ROWS, "imagination_length": STEPS, "bins": 31, **changes}
    return acting.make(DreamerV3, "dreamerv3", spec, **changes)


def a_sample(algorithm: DreamerV3) -> Batch:
    batch = stream(ROWS, COLUMNS)
    batch["carry"] = {key: x[None] for key, x in algorithm.initial_carry(COLUMNS).items()}
    return batch | {"valid": torch.cat((batch["valid"][:-1], torch.ones(1, COLUMNS, dtype=torch.bool)))}


def in_double(batch):
    if isinstance(batch, dict):
        return {key: in_double(x) for key, x in batch.items()}
    return batch.double() if batch.is_floating_point() else batch


# ---- the losses, as in dreamerv3/agent.py of danijar/dreamerv3, time second ----------------------------------------


def lambda_return(last, term, rew, boot, disc, lam):
    rets, live, cont = [boot[:, -1]], (1 - term.double())[:, 1:] * disc, (1 - last.double())[:, 1:] * lam
    state = rew[:, 1:] + (1 - cont) * live * boot[:, 1:]
    for t in reversed(range(live.shape[1])):
        rets.append(state[:, t] + live[:, t] * cont[:, t] * rets[-1])
    return torch.stack(list(reversed(rets))[:-1], 1)


class Value:
    def __init__(self, head, bins, x):
        self.logits, self.bins = head(x), bins

    def pred(self):
        return (self.logits.softmax(-1) * self.bins).sum(-1)

    def loss(self, target):
        return -(two_hot(target, self.bins) * log_softmax(self.logits, -1)).sum(-1)


def imag_loss(rew, con, logp, ent, value, slow, scale, lam=0.95, actent=3e-4):
    weight = torch.cumprod(con, 1)
    ret = lambda_return(torch.zeros_like(con), 1 - con, rew, value.pred(), 1, lam)
    adv = (ret - value.pred()[:, :-1]) / scale
    policy = weight[:, :-1] * -(logp * adv + actent * ent)
    padded = torch.cat([ret, 0 * ret[:, -1:]], 1)
    return policy.mean(1), (weight[:, :-1] * (value.loss(padded) + value.loss(slow.pred()))[:, :-1]).mean(1), ret


def repl_loss(last, term, rew, boot, value, slow, horizon=333, lam=0.95):
    ret = lambda_return(last, term, rew, boot, 1 - 1 / horizon, lam)
    padded = torch.cat([ret, 0 * ret[:, -1:]], 1)
    return (1 - last.double())[:, :-1] * (value.loss(padded) + value.loss(slow.pred()))[:, :-1]


@pytest.mark.parametrize("action", [2, spaces.MultiDiscrete([3, 2]), testing.box(2)], ids=["one", "two", "box"])
def test_every_loss_equals_the_original(action):
    algorithm = make(testing.spec(3, action))
    batch = a_sample(algorithm)
    batch["prev_action"] = torch.zeros(ROWS, COLUMNS, *algorithm.shape, dtype=torch.long if algorithm.choices else None)
    with torch.no_grad():
        for p in algorithm.parameters():  # heads that are 0 at first, and a slow critic that is the critic
            p.add_(0.1 * torch.randn_like(p))
        algorithm.return_range.fill_(2.5)
        batch = in_double(algorithm.prepare(batch))
        algorithm = algorithm.double()
        algorithm.bins = symexp_bins(31).double()
        for split in (algorithm.encoder.encoder.split, algorithm.decoder.split):
            split.squash = lambda x: symlog(x.double())
        terms = algorithm(batch, ("all",)).terms

        state = algorithm.states(batch, {k: x[0] for k, x in batch["carry"].items()}, batch["noise"]["states"])
        x, bins = algorithm.features(state), algorithm.bins
        deter, stoch = (state[key].transpose(0, 1).flatten(0, 1) for key in ("deter", "stoch"))  # [B * T, ...]
        noise = {key: leaf.transpose(0, 1).flatten(0, 1) for key, leaf in batch["noise"].items()}
        feats, actions = [torch.cat((deter, stoch), -1)], []
        for h in range(STEPS):
            actions.append(algorithm.policy(algorithm.actor(feats[-1])).sample(noise["actions"][:, h]))
            encoded = algorithm.encode(actions[-1])
            deter, stoch = algorithm.dynamics.imagine(deter, stoch, encoded, noise["imagined"][:, h])
            feats.append(torch.cat((deter, stoch), -1))
        inp = torch.stack(feats, 1)
        policy = algorithm.policy(algorithm.actor(inp[:, :-1]))
        value, slow = (Value(head, bins, inp) for head in (algorithm.critic, algorithm.slow_critic))
        rew, con = Value(algorithm.reward, bins, inp).pred(), algorithm.cont(inp).squeeze(-1).sigmoid()
        logp = policy.logp(torch.stack(actions, 1))
        actor, critic, ret = imag_loss(rew, con, logp, policy.entropy(), value, slow, 2.5)

        value, slow = (Value(head, bins, x.transpose(0, 1)) for head in (algorithm.critic, algorithm.slow_critic))
        term, last = batch["terminal"].T, batch["last"].T
        boot = ret[:, 0].view(COLUMNS, ROWS)
        replay = repl_loss(last, term, batch["reward"].T, boot, value, slow)

        expected = {"actor": actor.view(COLUMNS, ROWS).T, "critic": critic.view(COLUMNS, ROWS).T}
        expected["reward"] = Value(algorithm.reward, bins, x).loss(batch["reward"]) * batch["rewarded"]
        target, p = (1 - batch["terminal"].double()) * (1 - 1 / 333), algorithm.cont(x).squeeze(-1).sigmoid()
        expected["cont"] = -(target * p.log() + (1 - target) * (1 - p).log()) * batch["known"]
        guess = algorithm.decoder.dense(x)
        expected["vector"] = (guess - batch["obs"].sign() * batch["obs"].abs().log1p()).square().sum(-1)
        post, prior = state["p"], algorithm.dynamics.prior(state["deter"]).unflatten(-1, (STOCH, -1)).softmax(-1)
        prior = 0.99 * prior + 0.01 / prior.shape[-1]
        kl = (post * (post.log() - prior.log())).sum((-2, -1)).clamp(min=1.0)
        expected |= {"dyn": kl, "rep": 0.1 * kl}
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, atol=1e-8, rtol=1e-8, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(terms["replay_value"].mean(), 0.3 * replay.mean())
    assert terms.keys() == {*expected, "replay_value"}


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_ends_of_episodes_by_hand():
    algorithm, bits = make(), torch.tensor
    batch = a_sample(algorithm)
    # a final observation, an episode that terminates in row 4, its final observation, another episode
    batch["valid"][:, 0] = bits([0, 1, 1, 1, 0, 1]).bool()
    batch["is_first"][:, 0] = bits([0, 1, 0, 0, 0, 1]).bool()
    batch["terminated"][:, 0] = bits([1, 0, 0, 1, 1, 0]).bool()  # undefined on final observations
    # an environment that is replaced in row 2, and a truncated episode
    batch["valid"][:, 1] = bits([1, 1, 1, 1, 0, 1]).bool()
    batch["is_first"][:, 1] = bits([0, 0, 1, 0, 0, 1]).bool()
    batch["terminated"][:, 1] = False
    out = algorithm.prepare(batch)
    assert out["terminal"][:, :2].T.int().tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]]
    assert out["last"][:, :2].T.int().tolist() == [[1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0]]
    assert out["known"][:, :2].T.int().tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert out["rewarded"][:, :2].T.int().tolist() == [[0, 1, 1, 1, 1, 1]] * 2
    reward = batch["reward"]
    expected = [
        [0, 0, reward[1, 0], reward[2, 0], reward[3, 0], 0],
        [0, reward[0, 1], 0, reward[2, 1], reward[3, 1], 0],
    ]
    torch.testing.assert_close(out["reward"][:, :2].T, torch.tensor(expected))
    assert out["valid"].all()  # a final observation has losses, too


def test_actor_and_critic_leave_the_world_model_alone():
    algorithm = make(replay_value_scale=0.0)
    terms = algorithm(algorithm.prepare(a_sample(algorithm)), ("all",)).terms
    (terms["actor"].sum() + terms["critic"].sum()).backward()
    assert {name.split(".")[0] for name, p in algorithm.named_parameters() if p.grad is not None} == {"actor", "critic"}


def test_the_range_of_returns_and_the_slow_critic_follow():
    algorithm = make(return_rate=0.25, slow_critic_rate=0.5)
    batch, learner = a_sample(algorithm), acting.learner_of(algorithm)
    algorithm.critic.out.weight.data.normal_()
    with torch.no_grad():
        prepared = algorithm.prepare(batch)
        returns = algorithm(prepared, ("all",)).feedback["returns"].flatten()
    before = [p.clone() for p in algorithm.slow_critic.parameters()]
    losses = learner.minimize(prepared, algorithm)
    assert losses.feedback.keys() == {"carry"}
    expected = 0.25 * (returns.quantile(0.95) - returns.quantile(0.05))
    torch.testing.assert_close(algorithm.return_range, expected)
    for was, slow, now in zip(before, algorithm.slow_critic.parameters(), algorithm.critic.parameters(), strict=True):
        torch.testing.assert_close(slow, torch.lerp(was, now.detach(), 0.5))


@pytest.mark.parametrize("stride", [1, 3])
def test_sequences_begin_with_what_the_model_knows(stride, tmp_path):
    words = ("algo=dreamerv3", "env=cartpole", *CPU, *SMALL, f"algo.stride={stride}", "buffer.capacity=200")
    trainer = build(compose([*words, "num_steps_sampled_before_learning_starts=40", "num_envs=2"]), tmp_path)
    for _ in range(40):
        trainer.collect("explore")
    ring = next(iter(trainer.buffer.rings))
    batch = trainer.buffer.sample()
    with torch.no_grad():
        losses = trainer.algorithm(trainer.algorithm.prepare(batch), ("all",))
    carry = losses.feedback["carry"]
    assert len(carry["deter"]) == 7 // stride + 1
    trainer.buffer.feedback(batch["index"], {"carry": carry})
    row, column = batch["index"][0].item() // 2, batch["index"][0].item() % 2
    again = ring.read(torch.tensor([row + stride]).numpy(), torch.tensor([column]).numpy(), 2)
    same = (batch["index"] // 2 <= row + stride) & (batch["index"] % 2 == column)
    newest = min(batch["index"][same].tolist())  # the sequence that was unrolled over the most rows counts
    place = (row + stride - newest // 2) // stride
    of = batch["index"].tolist().index(newest)
    assert torch.equal(again["carry"]["deter"][0, 0], carry["deter"][place, of])
    assert again["carry"]["deter"].abs().sum() > 0
    trainer.close()


# ---- the policy ------------------------------------------------------------------------------------------------------


def test_continuous_policies_keep_their_bounds():
    algorithm = make(testing.spec(3, testing.box(2)), std_bounds=[0.2, 0.5])
    policy = algorithm.policy(1e3 * torch.randn(50, 4))
    std = policy.log_std.exp()
    assert std.min() >= 0.2 - 1e-6
    assert std.max() <= 0.5 + 1e-6
    assert policy.mean.abs().max() <= 1.0
    assert algorithm.encode(torch.tensor([[2.0, -0.5]])).tolist() == [[1.0, -0.5]]


def test_discrete_policies_mix_in_the_uniform_one():
    algorithm = make(testing.spec(3, spaces.MultiDiscrete([3, 2])), unimix=0.3)
    p = algorithm.policy(torch.tensor([50.0, 0, 0, 0, 50.0])).log_probs.exp()
    torch.testing.assert_close(p, torch.tensor([[0.8, 0.1, 0.1], [0.15, 0.85, 0.0]]))
    assert algorithm.encode(torch.tensor([[2, 0]])).tolist() == [[0, 0, 1, 1, 0]]


# ---- bad input, and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["algo.batch_length=1"], "algo.batch_length", "at least 2"),
        (["num_envs=4"], "num_steps_sampled_before_learning_starts", "use 256"),
        (["buffer.capacity=50"], "buffer.capacity", "at least 64"),
        (["model=mlp"], "model", "model=rssm"),
        (["model=lstm"], "model", "recurrent"),
        (["buffer=prioritized"], "buffer", "buffer=sequence"),
        (["env=masked_cartpole"], "", "mask"),
    ],
)
def test_what_does_not_fit_is_refused(words, key, said, tmp_path):
    config = ["algo=dreamerv3", "env=cartpole", *CPU, "num_steps_sampled_before_learning_starts=64", *words]
    with pytest.raises(ConfigError, match=said) as caught:
        build(compose(config), tmp_path)
    assert caught.value.key.startswith(key)


@pytest.mark.parametrize("size", ["1m", "200m"])
def test_a_size_is_its_number_of_parameters(size):
    assert [*SIZES] == [*get_args(get_type_hints(RSSM.Config)["size"])]
    image = spaces.Box(0, 255, (64, 64, 3), "uint8")
    of = SIZES[size]
    with torch.device("meta"):
        encoder, decoder = (cls(image, of, torch.tanh) for cls in (Encoder, Decoder))
        dynamics = Dynamics(of, encoder.out_dim, 6)
        deep, flat = [dynamics.out_dim, *[of.units] * 3], [dynamics.out_dim, of.units]
        heads = [DenseHead(flat, 255), DenseHead(flat, 1), DenseHead(deep, 255), DenseHead(deep, 6)]
    algorithm = torch.nn.ModuleList([encoder, decoder, dynamics, *heads])
    count = sum(p.numel() for p in algorithm.parameters()) / 1e6
    assert 0.5 * float(size[:-1]) < count < 1.1 * float(size[:-1])


# ---- what it imagines ------------------------------------------------------------------------------------------------


def test_the_open_loop_error_is_measured_at_times_and_pictures_draw_nothing(tmp_path, monkeypatch):
    words = ("algo=dreamerv3", "env=cartpole", *CPU, *SMALL, "algo.open_loop_every=2", "buffer.capacity=200")
    trainer = build(compose([*words, "num_steps_sampled_before_learning_starts=32"]), tmp_path)
    for _ in range(32):
        trainer.collect("random")
    rows = [trainer.learner.update().metrics for _ in range(3)]
    assert [{"open_loop_vector", "open_loop_reward"} <= row.keys() for row in rows] == [True, False, True]
    given = (trainer.algorithm, trainer.buffer, trainer.ctx, trainer.policy.normalizer.normalized)
    assert predictions(*given) is None, "vectors are not drawn"
    monkeypatch.setattr(DreamerV3, "pictures", lambda self, batch: batch["obs"])
    before = [generator.get_state() for generator in trainer.ctx.generators.values()]
    first, second = predictions(*given), predictions(*given)
    assert (first == second).all()
    assert all(map(torch.equal, before, (generator.get_state() for generator in trainer.ctx.generators.values())))
    trainer.close()
