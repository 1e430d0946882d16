"""CQL, IQL and TD3+BC beside their papers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.testing import assert_close

from rlplug import testing
from rlplug.distributed.fabric import one_rank
from rlplug.nn import FeatureCritic, InputCritic
from rlplug.plugins.algo.cql import CQL
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.iql import IQL
from rlplug.plugins.algo.sac import SAC
from rlplug.trainer.learner import RankLearner
from rlplug.types import ConfigError

ALGORITHMS = {"cql": CQL, "iql": IQL, "td3_bc": DDPG, "discrete_cql": DQN, "sac": SAC, "dqn": DQN}
IMAGE = spaces.Box(0, 255, (3, 12, 12), np.uint8)
CONTINUOUS = {
    "vector": testing.box(2),
    "matrix": spaces.Box(-1.0, 1.0, (2, 2)),
    "number": spaces.Box(-1.0, 1.0, ()),
}
DISCRETE = {
    "discrete": spaces.Discrete(3),
    "multi": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
}
CQL_PARTS, IQL_PARTS = ("critic", "actor", "alpha"), ("critic", "value", "actor")


def make(name, action=CONTINUOUS["vector"], obs=3, hidden="[8]", overrides=(), **changes):
    torch.manual_seed(0)
    cls, spec, cfg = ALGORITHMS[name], testing.spec(obs, action), testing.config(f"algo/{name}", **changes)
    words = [f"algo={name}", "tuned=none", *(overrides or (f"model.hidden={hidden}",))]
    return cls(cfg, testing.context(spec, overrides=words, needs=cls.needs(cfg, spec)))


def learner_of(algorithm):
    return RankLearner(fabric=one_rank(), ctx=algorithm.ctx, algorithm=algorithm, buffer=None)


def sample(algorithm, n=6, mask=None):
    """Windows as a buffer gives them; the first one terminates."""
    g, space = torch.Generator().manual_seed(1), algorithm.ctx.spec.single_agent
    rows = algorithm.ctx.needs.window.length + 1

    def draw(space):
        match space:
            case spaces.Box(dtype=np.uint8):
                return torch.randint(256, (rows, n, *space.shape), generator=g, dtype=torch.uint8)
            case spaces.Box():
                return torch.rand(rows, n, *space.shape, generator=g) * 2 - 1
            case spaces.Discrete():
                return torch.randint(int(space.n), (rows, n), generator=g)
        most = torch.as_tensor(space.nvec if isinstance(space, spaces.MultiDiscrete) else [2] * space.n)
        return (torch.rand(rows, n, len(most), generator=g) * most).long()

    batch = {"obs": draw(space.obs), "action": draw(space.action), "reward": torch.randn(rows, n, generator=g)}
    batch["valid"] = torch.ones(rows, n, dtype=torch.bool)
    batch["terminated"] = torch.zeros(rows, n, dtype=torch.bool)
    batch["terminated"][0, 0] = True
    return batch | ({} if mask is None else {"action_mask": mask.expand(rows, n, -1)})


def gradients(algorithm, batch, parts):
    algorithm.zero_grad()
    sum(term.mean() for term in algorithm.forward(batch, parts).terms.values()).backward()
    return {name: p.grad.clone() for name, p in algorithm.named_parameters() if p.grad is not None}


def owners(found):
    return {name.split(".")[0] for name in found}


def separate(algorithm, parts, owned):
    """Check that one graph has the gradients of its losses, each for the parameters of its part alone."""
    batch = algorithm.prepare(sample(algorithm))
    together, apart = gradients(algorithm, batch, parts), [gradients(algorithm, batch, (part,)) for part in parts]
    assert [owners(found) for found in apart] == owned
    merged = {name: grad for found in apart for name, grad in found.items()}
    assert merged.keys() == together.keys() == {n for n, p in algorithm.named_parameters() if p.requires_grad}
    for name, grad in merged.items():
        assert_close(together[name], grad, rtol=1e-5, atol=1e-7)


def acts_and_learns(algorithm, mask=None):
    """Check actions of every mode, and one step on finite losses."""
    n, batch, space = 6, sample(algorithm, mask=mask), algorithm.ctx.spec.single_agent.action
    step = {"obs": batch["obs"][0], "is_first": torch.ones(n, dtype=torch.bool)}
    step |= {key: batch[key][0] for key in ("action_mask",) if key in batch}
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = n, range(n)
    for mode in ("explore", "greedy", "random"):
        out, _ = algorithm.act(step, {}, mode)
        assert out["action"].shape == (n, *space.shape)
    losses = learner_of(algorithm).minimize(algorithm.prepare(batch), algorithm)
    assert all(torch.isfinite(x) for x in (losses.terms | losses.metrics).values())
    assert losses.feedback["priority"].shape == (n,)
    assert algorithm.values(batch).shape == batch["valid"].shape
    return losses


# ---- CQL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [True, False])
def test_without_the_term_it_is_sac(entropy):
    """The same losses of the same networks and draws; deterministic targets lack the entropy alone."""
    cql = make("cql", min_q_weight=0, bc_iters=0, deterministic_backup=not entropy, initial_alpha=0.5)
    sac = make("sac", hidden="[8]")
    shared = {key: value for key, value in cql.state_dict().items() if key in sac.state_dict()}
    sac.load_state_dict(shared)
    batch = cql.prepare(sample(cql))
    found, expected = (algorithm.forward(batch, CQL_PARTS).terms for algorithm in (cql, sac))
    assert found.keys() == expected.keys()
    for key in ("actor", "alpha"):
        assert_close(found[key], expected[key])
    assert torch.allclose(found["critic"], expected["critic"]) == entropy
    assert_close(found["critic"][0], expected["critic"][0])  # it terminated


@pytest.mark.parametrize("kind", CONTINUOUS)
@pytest.mark.parametrize("changes", [{}, {"lagrangian_thresh": 5.0}, {"n_step": 3, "twin_q": False}], ids=str)
def test_cql_acts_and_learns(kind, changes):
    acts_and_learns(make("cql", CONTINUOUS[kind], **changes))


def test_cql_learns_from_images():
    words = ("model=cnn", "model.filters=[[4, 3, 2]]", "model.hidden=[8]")
    algorithm = make("cql", obs=IMAGE, overrides=words)
    assert isinstance(algorithm.critic, FeatureCritic)
    acts_and_learns(algorithm)


def test_every_parameter_of_cql_has_the_gradient_of_its_own_loss():
    owned = [{"critic"}, {"model", "policy"}, {"log_alpha"}, {"log_weight"}]
    separate(make("cql", lagrangian_thresh=5.0, bc_iters=0), (*CQL_PARTS, "weight"), owned)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_term_is_the_integral_over_all_actions(temperature):
    """Critics without hidden layers are linear in the action, ``b + v a``: the integral is 2 sinh(v / T) T / v."""
    algorithm = make("cql", testing.box(1), hidden="[]", num_actions=20_000, temperature=temperature, min_q_weight=1)
    with torch.no_grad():
        algorithm.critic.head.weight[..., -1, :] = 2.0  # the action comes last
    batch = algorithm.prepare(sample(algorithm, n=3))
    q = algorithm.critic(batch["obs"], batch["action"])
    base = algorithm.critic(batch["obs"], torch.zeros(3, 1))
    v = algorithm.critic(batch["obs"], torch.ones(3, 1)) - base
    exact = base + temperature * (2 * torch.sinh(v / temperature) * temperature / v).log() - q
    loss = algorithm.forward(batch, ("critic",))
    assert_close(loss.metrics["conservative"], exact.mean(0), rtol=0.02, atol=0.02)
    algorithm.cfg = replace(algorithm.cfg, min_q_weight=0.0)
    plain = algorithm.forward(batch, ("critic",)).terms["critic"]
    assert_close(loss.terms["critic"] - plain, exact.sum(0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("threshold", "grows"), [(1e-3, True), (1e3, False)])
def test_the_weight_grows_while_the_term_is_above_its_threshold(threshold, grows):
    algorithm = make("cql", lagrangian_thresh=threshold, min_q_weight=2)
    losses = learner_of(algorithm).minimize(algorithm.prepare(sample(algorithm)), algorithm)
    assert losses.metrics["conservative"] > 1e-3
    assert (algorithm.log_weight > math.log(2.0)) == grows
    assert losses.metrics["min_q_weight"] == pytest.approx(2.0)


def test_the_policy_imitates_at_the_start():
    algorithm = make("cql", bc_iters=2)
    batch = algorithm.prepare(sample(algorithm))

    def actor():
        return algorithm.forward(batch, ("actor",)).terms["actor"]

    dist = algorithm.dist(batch["obs"])
    _, logp = dist.sample_and_logp(batch["noise"])
    assert_close(actor(), algorithm.log_alpha.exp() * logp - dist.logp(batch["action"]))
    for moved in (False, True):  # the values do not matter before the second update is made
        learner_of(algorithm).minimize(batch, algorithm, ("critic",))
        before = actor()
        with torch.no_grad():
            algorithm.critic.head.bias += 1.0
        assert torch.equal(before, actor()) != moved


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_actions_that_nobody_took_are_worth_less(weight):
    """One state, one action, return 1: the critics learn it, and with the term that others have less."""
    algorithm = make("cql", testing.box(1), hidden="[32]", min_q_weight=weight, critic_lr=3e-3, num_actions=4)
    learner, obs = learner_of(algorithm), torch.zeros(2, 16, 3)
    batch = sample(algorithm, 16) | {"obs": obs, "action": torch.full((2, 16, 1), 0.8), "reward": torch.ones(2, 16)}
    batch["terminated"][:] = True
    for _ in range(150):
        learner.minimize(algorithm.prepare(batch), algorithm, ("critic",))
    with torch.no_grad():
        taken, other = (algorithm.critic(obs[0, :1], torch.tensor([[a]])).mean() for a in (0.8, -0.8))
    assert (taken - other > 1.0) == bool(weight)
    if not weight:
        assert taken == pytest.approx(1.0, abs=0.1)


def test_densities_of_explored_and_of_random_actions():
    algorithm = make("cql")
    object.__setattr__(algorithm.ctx.needs, "recorded", ("logp",))
    algorithm.ctx.needs.__dict__.pop("stored", None)
    step = {"obs": torch.randn(4, 3), "is_first": torch.ones(4, dtype=torch.bool)}
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 4, range(4)
    out, _ = algorithm.act(step, {}, "explore")
    assert_close(out["logp"], algorithm.logp({"obs": step["obs"][None], "action": out["action"][None]})[0])
    assert_close(algorithm.act(step, {}, "random")[0]["logp"], torch.full((4,), -2 * math.log(2.0)))
    assert "logp" not in algorithm.act(step, {}, "greedy")[0]


@pytest.mark.parametrize("feature", [False, True])
@pytest.mark.parametrize("members", [1, 2])
def test_critics_judge_several_actions_in_every_row(feature, members):
    class Torso(nn.Module):
        out_dim = 4

        def forward(self, obs, carry, is_first):
            x = torch.cat((obs["obs"], obs["action"]), -1)[..., :4] if isinstance(obs, dict) else obs
            return x if members == 1 else x.expand(members, *x.shape), carry

    critic = FeatureCritic(Torso(), 2, members) if feature else InputCritic(Torso(), members)
    obs, action = torch.randn(5, 4 if feature else 3), torch.randn(7, 5, 2)
    code, _ = critic.encode(obs, {}, None)
    found = critic.several(code, action)
    assert found.shape == (members, 7, 5)
    assert_close(found, torch.stack([critic(code, each) for each in action], 1))


# ---- of Discrete actions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_atoms": 5}, {"dueling": True, "td_error_loss_fn": "mse"}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_term_beside_that_of_dqn(changes, masked):
    mask = torch.tensor([True, False, True]) if masked else None
    algorithm = make("discrete_cql", DISCRETE["discrete"], min_q_weight=0.5, hiddens=[6], **changes)
    batch = sample(algorithm, mask=mask)
    batch["action"] = torch.where(batch["action"] == 1, 2, batch["action"])
    batch = algorithm.prepare(batch)
    with torch.no_grad():
        features, _ = algorithm.online.torso(batch["obs"], {}, None)
        q = algorithm.q(algorithm.online.head(features, True))
    allowed = q[:, [0, 2]] if masked else q
    term = allowed.exp().sum(-1).log() - q[torch.arange(6), batch["action"]]
    found = algorithm.forward(batch, ("critic",))
    algorithm.cfg = replace(algorithm.cfg, min_q_weight=0.0)
    plain = algorithm.forward(batch, ("critic",))
    assert_close(found.terms["critic"] - plain.terms["critic"], 0.5 * term)
    assert_close(found.metrics["conservative"], term)
    assert "conservative" not in plain.metrics
    assert torch.equal(found.feedback["priority"], plain.feedback["priority"])


# ---- IQL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTINUOUS | DISCRETE)
def test_iql_acts_and_learns(kind):
    acts_and_learns(make("iql", (CONTINUOUS | DISCRETE)[kind], n_step=2))


def test_iql_heeds_masks():
    algorithm = make("iql", DISCRETE["discrete"])
    acts_and_learns(algorithm, torch.tensor([True, False, True]))
    batch = sample(algorithm, mask=torch.tensor([True, False, True]))
    assert (algorithm.logp(batch | {"action": torch.ones(2, 6, dtype=torch.long)}) < -1e30).all()


def test_every_parameter_of_iql_has_the_gradient_of_its_own_loss():
    separate(make("iql"), IQL_PARTS, [{"critic"}, {"value"}, {"net"}])


def test_iql_by_its_equations():
    algorithm = make("iql", gamma=0.9, expectile=0.8, beta=2.0, max_weight=0.4)
    with torch.no_grad():
        for p in algorithm.target.parameters():  # another network than the online one
            p += 0.3 * torch.randn(p.shape)
    raw, batch = sample(algorithm), algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        obs, action, value = raw["obs"][0], raw["action"][0], algorithm.value(raw["obs"])
        goal = raw["reward"][0] + 0.9 * torch.tensor([0.0, 1, 1, 1, 1, 1]) * value[1]
        u = algorithm.target(obs, action).min(0).values - value[0]
        expected = {
            "critic": 0.5 * (algorithm.critic(obs, action) - goal).square().sum(0),
            "value": (0.8 - (u < 0).float()).abs() * u**2,
            "actor": -torch.exp(2.0 * u).clamp(max=0.4) * algorithm.net.dist({"obs": obs}, {})[0].logp(action),
        }
        found = algorithm.forward(batch, IQL_PARTS)
    assert (found.metrics["weight"] == 0.4).any()
    assert (found.metrics["weight"] < 0.4).any()
    for key, term in expected.items():
        assert_close(found.terms[key], term)


def test_iql_finds_the_better_of_two_recorded_actions():
    """Action 0 earns 0 and action 1 earns 1, each half of the time: V goes to the expectile, and the policy to 1."""
    fast = dict.fromkeys(("actor_lr", "critic_lr", "value_lr"), 0.02)
    algorithm = make("iql", DISCRETE["discrete"], expectile=0.9, tau=0.1, **fast)
    learner, action = learner_of(algorithm), torch.arange(16) % 2
    batch = sample(algorithm, 16) | {"obs": torch.zeros(2, 16, 3), "action": action.expand(2, 16)}
    batch |= {"reward": action.float().expand(2, 16), "terminated": torch.ones(2, 16, dtype=torch.bool)}
    batch = algorithm.prepare(batch)
    for _ in range(200):
        learner.minimize(batch, algorithm)
    assert algorithm.value(torch.zeros(1, 3)).item() == pytest.approx(0.9, abs=0.05)
    p = algorithm.net.dist({"obs": torch.zeros(1, 3)}, {})[0].params.exp()[0]
    assert p[1] > 0.9


# ---- TD3+BC ---------------------------------------------------------------------------------------------------------


def test_td3_bc_imitates_beside_the_value_of_the_policy_s_actions():
    algorithm = make("td3_bc", bc_alpha=2.5)
    batch = algorithm.prepare(sample(algorithm))
    algorithm.q_scale.fill_(4.0)
    with torch.no_grad():
        action, _ = algorithm.actor(batch["obs"], {}, None)
        value = algorithm.critic(batch["obs"], action)[0]
        expected = (action - batch["action"]).square().mean(-1) - 2.5 / 4.0 * value
        assert_close(algorithm.forward(batch, ("actor",)).terms["actor"], expected)


def test_values_are_measured_by_their_own_size():
    """By the mean of ``|Q|`` of the last update; without ``bc_alpha`` nothing is kept."""
    algorithm = make("td3_bc")
    batch = algorithm.prepare(sample(algorithm))
    with torch.no_grad():
        expected = algorithm.critic(batch["obs"], batch["action"])[0].abs().mean()
    learner_of(algorithm).minimize(batch, algorithm)
    assert_close(algorithm.q_scale, expected)
    assert "q_scale" not in make("td3_bc", bc_alpha=None).state_dict()


def test_td3_bc_acts_and_learns():
    acts_and_learns(make("td3_bc"))
    separate(make("td3_bc"), ("critic", "actor"), [{"critic"}, {"actor"}])


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "action", "changes", "said"),
    [
        ("cql", 2, {}, "^algo: cql needs continuous actions .* algo=discrete_cql supports"),
        ("cql", spaces.Box(-np.inf, np.inf, (2,)), {}, "^algo: cql needs continuous actions within bounds"),
        ("cql", testing.box(1), {"min_q_weight": 0, "lagrangian_thresh": 1.0}, r"^algo\.min_q_weight: 0 cannot grow"),
        ("discrete_cql", testing.box(1), {}, "^algo: dqn needs one Discrete action"),
        ("td3_bc", 2, {}, "^algo: needs continuous actions"),
        ("iql", 2, {"expectile": 1.0}, r"^algo\.expectile: 1\.0 should be greater than 0 and less than 1"),
    ],
)
def test_what_cannot_be_served(name, action, changes, said):
    with pytest.raises(ConfigError, match=said):
        make(name, action, **changes)


@pytest.mark.parametrize("name", ["cql", "iql", "td3_bc", "sac"])
def test_values_are_of_what_was_executed(name):
    """A Gaussian policy's recorded actions reach beyond the bounds, where the environment clips them."""
    algorithm = make(name)
    batch = sample(algorithm)
    batch["action"] = 3.0 * batch["action"]
    clipped = batch | {"action": batch["action"].clamp(-1.0, 1.0)}
    assert not torch.equal(batch["action"], clipped["action"])

    def critic(batch):
        algorithm.ctx.generators["learner"].manual_seed(0)
        return algorithm.forward(algorithm.prepare(batch), ("critic",)).terms["critic"]

    assert_close(critic(batch), critic(clipped), rtol=0.0, atol=0.0)
