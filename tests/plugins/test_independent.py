"""Independent and shared learners, and MAPPO."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from rlplug import tree
from rlplug.config import compose, composed, default_node
from rlplug.plugins.algo.a2c import A2C
from rlplug.run.build import build
from rlplug.types import ConfigError
from tests.contract.tenants.agents import FILES
from tests.installing import installed

QUIET = ("hardware=cpu", "logger.only=[]", "eval.every=0", "compile=off", "model.hidden=[8]")
SMALL = (*QUIET, "num_envs=3", "rollout_fragment_length=24", "algo.algo.sgd_minibatch_size=16")


teams = installed("rlplug-teams", "rlplug_teams", FILES)


def made(tmp_path, *words):
    return build(compose(words), tmp_path / "run")


# ---- exact values ----------------------------------------------------------------------------------------------------


def own_streams(batch, agent: int, keys) -> dict:
    """Cut out the lives of one agent by hand: rows where it is alive and the one after; each is a column of its own."""
    lives = []
    alive, valid = batch["alive"][..., agent], batch["valid"]
    for b in range(valid.shape[1]):
        t = 0
        while t < len(valid):
            if not alive[t, b] or (not valid[t, b] and t < len(valid) - 1):
                t += 1
                continue
            end = t
            while end < len(valid) - 1 and alive[end, b] and valid[end, b]:
                end += 1
            if end > t:
                lives.append((b, t, end))
            t = end + (not alive[end, b] or not valid[end, b])
    longest = max(end - t for _, t, end in lives)
    columns = []
    for b, t, end in lives:
        rows = torch.arange(t, t + longest + 1).clamp(max=end)
        own = {key: tree.map(lambda x: x[rows, b, agent], batch[key]) for key in keys}  # noqa: B023
        steps = torch.arange(longest + 1)
        columns.append(own | {"valid": steps < end - t, "is_first": (steps == 0) & (t > 0 or batch["is_first"][0, b])})
    return tree.map(lambda *x: torch.stack(x, 1), *columns)


@pytest.mark.parametrize("agent", [0, 1, 2], ids=["stays", "comes and goes", "late"])
def test_ppo_on_agents_that_die_equals_ppo_on_their_own_streams(tmp_path, agent):
    """Gradients of a rollout where agents die, come back and come late, against streams of each life."""
    trainer = made(tmp_path, "algo=independent", "env=relay", *SMALL, "seed=3")
    trainer.collect()
    batch, independent = trainer.buffer.sample(), trainer.algorithm
    name = trainer.ctx.spec.groups["runners"].agents[agent]
    ppo, seen = independent.named_policy(name), independent.view(batch, name)
    stream = own_streams(batch, agent, ("obs", "action", "reward", "terminated", "truncated", "logp", "dist"))
    assert stream["valid"].sum() == seen["valid"][:-1].sum() > 10
    assert seen["is_first"].sum() >= (3 if agent else 2)
    gradients = []
    for rows in (seen, stream):
        with torch.no_grad():
            prepared = ppo.prepare(rows)
        valid = prepared["valid"].clone()
        valid[-1] = False
        advantage = prepared["advantage"][valid].sort().values
        losses = ppo.forward(prepared, ("policy",))
        loss = sum(torch.where(valid, term, 0.0).sum() / valid.sum() for term in losses.terms.values())
        found = torch.autograd.grad(loss, [*ppo.parameters()])
        gradients.append((advantage, found))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    for one, other in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(one, other)
    trainer.close()


def test_td_targets_of_an_agent_that_is_gone_are_in_no_loss(tmp_path):
    """A replayed row of an agent that is not alive has no weight in DQN's loss and no part in its priority."""
    words = ("algo=shared_dqn", "env=relay", *QUIET, "buffer=prioritized", "num_envs=2", "algo.algo.hiddens=[8]")
    trainer = made(tmp_path, *words, "num_steps_sampled_before_learning_starts=0")
    for _ in range(12):
        trainer.collect("random")
    batch, shared = trainer.buffer.sample(), trainer.algorithm
    prepared = shared.prepare(batch)["runners"]
    assert torch.equal(prepared["valid"], batch["alive"][0].flatten())
    assert not prepared["valid"].all()
    child = shared.named_policy("runners")
    wrong = prepared | {"returns": torch.where(prepared["valid"], prepared["returns"], 1e9)}
    losses = [trainer.learner.steps.forward(rows, child, ("critic",)).losses for rows in (prepared, wrong)]
    assert losses[0].terms["critic"] == losses[1].terms["critic"]
    errors = losses[0].feedback["priority"].view(-1, 3)
    back = shared._feedback({"runners": (losses[0].feedback, prepared["valid"])})["priority"]
    alive = batch["alive"][0]
    torch.testing.assert_close(back, torch.stack([x[mine].mean() for x, mine in zip(errors, alive, strict=True)]))
    trainer.close()


def test_agent_ids_and_central_inputs(tmp_path):
    trainer = made(tmp_path, "algo=mappo", "env=signals", *QUIET, "num_envs=3", "rollout_fragment_length=8")
    trainer.collect()
    batch, mappo = trainer.buffer.sample(), trainer.algorithm
    rows = mappo.view(batch, "scouts")
    obs, central = rows["obs"].unflatten(1, (3, 2)), rows["central"].unflatten(1, (3, 2))
    alive = batch["scouts"]["alive"].unsqueeze(-1)
    everything = torch.cat(
        [(batch["scouts"]["obs"] * alive).flatten(2), batch["base"]["obs"] * batch["base"]["alive"].unsqueeze(-1)], -1
    )
    for i in range(2):
        code = torch.eye(2)[i].expand(9, 3, 2)
        assert torch.equal(obs[:, :, i], torch.cat([batch["scouts"]["obs"][:, :, i], code], -1))
        assert torch.equal(central[:, :, i], torch.cat([everything, code], -1))
    assert torch.equal(mappo.view(batch, "base")["central"], everything)
    trainer.close()


def test_a_central_critic_bootstraps_from_final_observations_of_truncated_agents(tmp_path):
    trainer = made(tmp_path, "algo=mappo", "env=signals", *QUIET, "num_envs=3", "rollout_fragment_length=8")
    trainer.collect()
    batch = trainer.buffer.sample()
    scouts = batch["scouts"]
    scouts["alive"][:4] = True
    scouts["alive"][4] = False
    scouts["terminated"][3] = torch.tensor([False, True])
    central = trainer.algorithm.view(batch, "scouts")["central"].unflatten(1, (3, 2))
    seen = central[4, :, 0, : scouts["obs"][4].flatten(1).shape[1]].unflatten(1, (2, -1))
    assert torch.equal(seen[:, 0], scouts["obs"][4, :, 0])
    assert scouts["obs"][4].abs().sum() > 0.0
    assert not seen[:, 1].any()
    trainer.close()


def test_value_normalization_learns_the_scale_of_returns(tmp_path):
    trainer = made(
        tmp_path, "algo=mappo", "env=two_carts", *QUIET, "algo.normalize_value=0.9", "rollout_fragment_length=8"
    )
    child, learner = trainer.algorithm.named_policy("carts"), trainer.learner
    returns = torch.tensor([[10.0, 14.0], [12.0, 900.0], [0.0, 0.0]])
    valid = torch.tensor([[True, True], [True, False], [False, False]])
    for _ in range(3):
        child.observe_returns({"returns": returns, "valid": valid}, learner)
    mean, std = child.scale()
    assert mean.item() == pytest.approx(12.0, rel=1e-5)
    assert std.item() == pytest.approx(torch.tensor([10.0, 14.0, 12.0]).std(correction=0).item(), rel=1e-3)
    trainer.close()


# ---- policies --------------------------------------------------------------------------------------------------------

HUNT = ("env=signals", *QUIET, "num_envs=2", "rollout_fragment_length=16", "algo.algo.sgd_minibatch_size=8")


def players(algorithm):
    return {name: [agent.name for agent in own] for name, own in algorithm.players.items()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"north": ["north"], "south": ["south"], "base": ["base"]}),
        (("algo.one_per=group",), {"scouts": ["north", "south"], "base": ["base"]}),
        (("algo.policies={scouts:{algo:{name:a2c,gamma:0.5}}}",), {"scouts": ["north", "south"], "base": ["base"]}),
        (
            ("algo.policy_of={scouts:one,north:two,b*:three}",),
            {"two": ["north"], "one": ["south"], "three": ["base"]},
        ),
    ],
    ids=["agents", "groups", "own policy", "named"],
)
def test_who_plays_what(tmp_path, words, expected):
    trainer = made(tmp_path, "algo=independent", *HUNT, *words)
    assert players(trainer.algorithm) == expected
    trainer.close()


def test_policies_have_algorithms_and_models_of_their_own(tmp_path):
    """A node with a name takes the rest from its YAML; settings below it are set as any other."""
    words = (
        "algo.policies={scouts:{algo:a2c},base:{algo:{name:ppo,gamma:0.5},model:{name:mlp,hidden:[5]}}}",
        "algo.policies.base.algo.sgd_minibatch_size=4",
        "algo.train=[scouts]",
    )
    run = compose(["algo=independent", *HUNT, *words])
    base = run.raw["algo"]["policies"]["base"]["algo"]
    assert (base["gamma"], base["sgd_minibatch_size"], base["num_sgd_iter"]) == (0.5, 4, 10)
    trainer = build(run, tmp_path / "run")
    scouts, base = trainer.algorithm.named_policy("scouts"), trainer.algorithm.named_policy("base")
    assert [type(x).__name__ for x in (scouts, base)] == ["A2C", "PPO"]
    assert base.net.torso.out_dim == 5
    assert scouts.net.torso.out_dim == 8
    before = tree.map(torch.clone, dict(trainer.algorithm.state_dict()))
    trainer.collect()
    losses = trainer.update()
    assert {key.partition("/")[0] for key in losses.terms} == {"scouts"}
    moved = {key.split(".")[1] for key, x in trainer.algorithm.state_dict().items() if not torch.equal(x, before[key])}
    assert moved == {"scouts"}
    trainer.close()


REFUSED = {
    "idle policy": (
        ("algo.policies={wolf:{algo:ppo}}",),
        "algo.policies.wolf",
        "plays no agent; the agents are north, south",
    ),
    "no policy": (("algo.policy_of={scouts:one}",), "algo.policy_of", "names no policy for base"),
    "no agent": (("algo.policy_of={*:one,wolf:two}",), "algo.policy_of", "'wolf' is no agent or group"),
    "spaces": (("algo.policy_of={*:one}",), "algo.policy_of", "different spaces: north .* and base"),
    "data": (
        ("algo.policies={base:{algo:dqn}}",),
        "algo.policies.base.algo",
        "dqn learns from windows of older data, but ppo of 'north' from the last round",
    ),
    "key": (
        ("algo.policies={base:{algo:ppo}}", "algo.policies.base.algo.gama=1"),
        "algo.policies.base.algo.gama",
        "mean algo.policies.base.algo.gamma",
    ),
    "value": (("algo.policies={base:{algo:{name:ppo,gamma:2}}}",), "algo.policies.base.algo.gamma", "out of range"),
    "name": (("algo.policies={base:{algo:pop}}",), "algo.policies.base.algo.name", "ppo"),
    "slot": (
        ("algo.policies={base:{algo:ppo,modelx:{name:mlp}}}",),
        "algo.policies.base.modelx",
        "did you mean algo.policies.base.model",
    ),
    "train": (("algo.train=[wolf]",), "algo.train", "there is no policy 'wolf'; the policies are north, south, base"),
    "nobody learns": (("algo.train=[]",), "algo.train", "no policy learns"),
    "continuous": (("algo.policies={base:{algo:td3}}",), "algo.policies.base.algo", "Discrete"),
    "one agent": (("env=cartpole",), "env", "independent needs several agents, but gets one"),
    "jobs": (("algo.algo={name:es}",), "algo.algo", "es trains a single policy, by a loop of its own"),
    "names": (("algo.policy_of={*:a_b,base:a.b}",), "algo", "the policies 'a_b' and 'a.b' differ in punctuation only"),
    "gradients": (("algo.policies={base:{algo:a3c}}",), "algo.policies.base.algo", ""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_starts(tmp_path, what):
    words, key, said = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, "algo=independent", *HUNT, *words).close()
    assert caught.value.key == key
    assert re.search(said, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_masks_that_an_algorithm_would_ignore_are_refused(tmp_path, monkeypatch):
    needs = A2C.needs.__func__

    def without(cls, cfg, spec):
        found = needs(cls, cfg, spec)
        return replace(found, keys=tuple(key for key in found.keys if key != "action_mask"))

    monkeypatch.setattr(A2C, "needs", classmethod(without))
    with pytest.raises(ConfigError, match=r"algo.policies.base.algo: a2c does not support the action masks of base"):
        made(tmp_path, "algo=independent", *HUNT, "env=masked_signals", "algo.policies={base:{algo:a2c}}")


def test_a_nested_algorithm_is_chosen_by_name(tmp_path):
    """Settings that were tuned for the former one are dropped, and those of the command line are added."""
    words = ("algo=independent", "env=two_carts", *QUIET, "algo.algo=a2c", "algo.algo.gamma=0.9")
    node = compose(words).raw["algo"]["algo"]
    assert (node["name"], node["gamma"]) == ("a2c", 0.9)
    assert "num_sgd_iter" not in node


@pytest.mark.parametrize("node", ["{name:a2c,gamma:0.9}", "{gamma:0.9,name:a2c}"])
def test_a_nested_algorithm_is_chosen_with_its_settings(node):
    """The others are those of its YAML file."""
    found = compose(("algo=independent", "env=two_carts", *QUIET, f"algo.algo={node}")).raw["algo"]["algo"]
    assert found == default_node("algo", "a2c", {"gamma": 0.9})


def test_groups_and_joint_agents_are_written_as_options():
    words = ("algo=independent", "env=simple_adversary", *QUIET, "env.joint={team: [agent_*]}", "env.groups={all: [*]}")
    env = compose(words).raw["env"]
    assert (env["joint"], env["groups"]) == ({"team": ["agent_*"]}, {"all": ["*"]})


def test_an_option_whose_name_ends_like_a_models_is_no_node():
    words = ("algo=slateq", "env=interest_evolution", "algo.choice_model=multinomial_proportional")
    assert composed(words).algo.choice_model == "multinomial_proportional"


def test_ids_need_vectors(tmp_path):
    with pytest.raises(ConfigError, match=r"algo.critic_sees: the environment has no state; use observations"):
        made(tmp_path, "algo=mappo", "env=carts", *QUIET, "algo.critic_sees=state")
