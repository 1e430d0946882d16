"""MADDPG against loops over rows and agents in float64, with agents that end one by one and groups of other spaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import one_hot
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.config import compose
from rlplug.plugins.algo.maddpg import MADDPG
from rlplug.run.build import build
from rlplug.testing import box
from rlplug.types import ConfigError, EnvSpec, Group
from tests.plugins.acting import learner_of

B = 9
SCOUTS = Group(box(3), spaces.Discrete(4), ("north", "south"), {"action_mask": spaces.MultiBinary(4)})
SPEC = EnvSpec({"scouts": SCOUTS, "base": Group(box(2), box(2))}, {}, 9)
NAMES, SIZES = ("north", "south", "base"), (4, 4, 2)
PARTS = tuple(f"{name}/{part}" for name in NAMES for part in ("critic", "actor", "others"))


def make(of: EnvSpec = SPEC, run: Any = None, **changes: Any) -> MADDPG:
    torch.manual_seed(0)
    cfg = testing.config("algo/maddpg", **changes)
    ctx = testing.context(of, overrides=["algo=maddpg", "model.hidden=[5]"], needs=MADDPG.needs(cfg, of), **run or {})
    algorithm = MADDPG(cfg, ctx).double()
    for player in (*algorithm.online, *algorithm.target):
        for net in (player.critic, *player.policies):
            net.torso.flatten = lambda x: x  # which converts to float32
    with torch.no_grad():
        for p in algorithm.target.parameters():  # other networks than the online ones
            p += 0.3 * torch.randn(p.shape)
    return algorithm


def sample() -> Any:
    """Transitions in which scouts terminate, are truncated, have left before, or come next; undefined rewards: NaN."""
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    alive, terminated = torch.ones(2, B, 2, dtype=torch.bool), torch.zeros(2, B, 2, dtype=torch.bool)
    terminated[0, 0, 0], alive[1, 0, 0] = True, False  # north terminates
    alive[1, 1, 1] = False  # south is truncated
    alive[:, 2, 0] = False  # north has left
    alive[0, 3, 1] = False  # south comes with the next row
    terminated[0, 4], alive[1, 4] = True, False  # both
    mask = torch.rand(2, B, 2, 4, generator=g) < 0.6
    action = torch.randint(4, (2, B, 2), generator=g)
    mask.scatter_(-1, action[..., None], True)
    scouts = {"obs": normal(2, B, 2, 3), "action": action, "reward": normal(2, B, 2).masked_fill(~alive, torch.nan)}
    scouts |= {"alive": alive, "terminated": terminated, "action_mask": mask}
    base = {"obs": normal(2, B, 2), "action": 1.5 * normal(2, B, 2), "reward": normal(2, B)}  # beyond the bounds
    base |= {"alive": torch.ones(2, B, dtype=torch.bool), "terminated": torch.zeros(2, B, dtype=torch.bool)}
    base["terminated"][0, 5], base["alive"][1, 5] = True, False
    first, valid = torch.zeros(2, B, dtype=torch.bool), torch.ones(2, B, dtype=torch.bool)
    return {"scouts": scouts, "base": base, "is_first": first, "valid": valid, "weight": torch.rand(B, generator=g)}


def doubled(batch: Any) -> Any:
    return tree.map(lambda x: x.double() if x.is_floating_point() else x, batch)


def losses_by_hand(algorithm: MADDPG, batch: Any, noise: Any, row: int) -> dict[str, Tensor]:
    """All losses of one row, by the definitions, from the raw rows."""
    cfg, losses = algorithm.cfg, {}
    own = [{key: x[:, row, k] for key, x in batch["scouts"].items()} for k in (0, 1)]
    own.append({key: x[:, row] for key, x in batch["base"].items()})

    def there(k: int, t: int) -> bool:
        return bool(own[k]["alive"][t]) or (t == 1 and bool(own[k]["alive"][0]) and not bool(own[k]["terminated"][0]))

    def hard(k: int, out: Tensor, draw: Tensor, t: int) -> Tensor:
        if k == 2:
            return torch.tanh(out)
        best = (out + draw).masked_fill(~own[k]["action_mask"][t], -1e9).argmax()
        return one_hot(best, 4).double()

    def joint(actions: list[Tensor], t: int) -> Tensor:
        obs = [own[k]["obs"][t] * there(k, t) for k in range(3)]
        return torch.cat([*obs, *(a * there(k, t) for k, a in enumerate(actions))])

    def policy(i: int, k: int, players: Any) -> Any:
        return players[i].policies[k] if cfg.infer_policies else players[k].actor

    taken = [one_hot(own[k]["action"][0], 4).double() for k in (0, 1)] + [own[2]["action"][0].clamp(-1.0, 1.0)]
    for i, name in enumerate(NAMES):
        if not own[i]["alive"][0]:
            continue
        with torch.no_grad():
            after = [policy(i, k, algorithm.target)(own[k]["obs"][1]) for k in range(3)]
            after = [hard(k, out, noise[NAMES[k]]["next_noise"][row], 1) for k, out in enumerate(after)]
            y = own[i]["reward"][0]
            if not own[i]["terminated"][0]:
                y = y + cfg.gamma * algorithm.target[i].critic(joint(after, 1))[0]
        q = algorithm.online[i].critic(joint(taken, 0))[0]
        losses[f"{name}/critic"] = 0.5 * (q - y) ** 2 * batch["weight"][row]
        out = policy(i, i, algorithm.online)(own[i]["obs"][0])
        if i < 2:
            perturbed = (out + noise[name]["noise"][row]) / cfg.temperature
            action = perturbed.masked_fill(~own[i]["action_mask"][0], -1e30).softmax(-1)
            if cfg.relaxation == "straight_through":
                action = one_hot(action.argmax(), 4) + action - action.detach()
        else:
            action = torch.tanh(out)
        played = [action if k == i else taken[k] for k in range(3)]
        value = algorithm.online[i].critic(joint(played, 0))[0]
        losses[f"{name}/actor"] = cfg.output_reg * out.square().mean() - value
    for i, name in enumerate(NAMES):
        terms = []
        for k in range(3):
            if cfg.infer_policies and k != i and own[k]["alive"][0]:
                out = policy(i, k, algorithm.online)(own[k]["obs"][0])
                if k < 2:
                    logp = out.masked_fill(~own[k]["action_mask"][0], -1e30).log_softmax(-1)
                    entropy = -(logp.exp() * logp)[own[k]["action_mask"][0]].sum()
                    terms.append(-logp[own[k]["action"][0]] - cfg.inference_entropy * entropy)
                else:
                    terms.append((torch.tanh(out) - taken[k]).square().mean())
        if terms:
            losses[f"{name}/others"] = sum(terms)
    return losses


@pytest.mark.parametrize(("infer", "relaxation"), [(False, "soft"), (False, "straight_through"), (True, "soft")])
def test_gradients_are_those_of_a_loop_over_rows_and_agents(infer, relaxation):
    """1706.02275, equations 5 to 7, in float64: each network gets the gradient of its own loss only."""
    changes = {"gamma": 0.5, "temperature": 0.7, "output_reg": 0.1, "inference_entropy": 0.2}
    algorithm = make(infer_policies=infer, relaxation=relaxation, **changes)
    raw = sample()
    prepared = doubled(algorithm.prepare(raw))
    losses = algorithm.forward(prepared, tuple(algorithm.optimizers()))
    sum(term.mean() for term in losses.terms.values()).backward()  # type: ignore[union-attr]
    found = {name: p.grad for name, p in algorithm.online.named_parameters()}
    rows = [losses_by_hand(algorithm, doubled(raw), prepared["agents"], row) for row in range(B)]
    checked = 0
    for i, name in enumerate(NAMES):
        player = algorithm.online[i]
        others = [net for net in player.policies if net is not player.actor]
        for part, nets in (("critic", [player.critic]), ("actor", [player.actor]), ("others", others)):
            per_row = torch.stack([row.get(f"{name}/{part}", torch.zeros((), dtype=torch.float64)) for row in rows])
            if not nets:
                continue
            assert_close(losses.terms[f"{name}/{part}"], per_row)
            params = [p for net in nets for p in net.parameters()]
            expected = torch.autograd.grad(per_row.mean(), params, retain_graph=True)
            names = {id(p): key for key, p in algorithm.online.named_parameters()}
            for p, grad in zip(params, expected, strict=True):
                assert_close(found[names[id(p)]], grad, rtol=1e-9, atol=1e-12)
                checked += 1
    assert checked == len(found) == (48 if infer else 24)


def test_metrics_and_priorities_are_means_over_the_agents_alive():
    algorithm = make()
    batch = doubled(algorithm.prepare(sample()))
    losses = algorithm.forward(batch, tuple(algorithm.optimizers()))
    rows = doubled(sample())
    loss = {name: losses.terms[f"{name}/critic"] / rows["weight"] for name in NAMES}
    alive = torch.stack([rows["scouts"]["alive"][0, :, 0], rows["scouts"]["alive"][0, :, 1], torch.ones(B).bool()])
    error = torch.stack([(2.0 * loss[name]).sqrt() for name in NAMES])
    assert_close(losses.feedback["priority"], (error * alive).sum(0) / alive.sum(0))
    assert_close(losses.metrics["td_error"], losses.feedback["priority"])


def test_every_agent_has_optimizers_of_its_own():
    algorithm = make(infer_policies=True)
    parts = algorithm.optimizers()
    assert tuple(parts) == PARTS
    every = [p for part in parts.values() for group in part.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in every} == {id(p) for p in algorithm.online.parameters()}
    assert len(every) == len({id(p) for p in every})
    assert [key for key in make().optimizers() if "others" in key] == []


def test_actors_get_the_policies_alone():
    for infer in (False, True):
        algorithm = make(infer_policies=infer)
        kept = {name: x for name, x in algorithm.state_dict().items() if name in algorithm.actor_keys()}
        assert sum(x.numel() for x in kept.values()) == sum(
            p.numel() for player in algorithm.online for p in player.actor.parameters()
        )


def test_actions_of_every_mode():
    """Random ones are uniform among the allowed, greedy ones have no noise, exploring ones are samples."""
    algorithm = make(run={"num_envs": 3000}, action_noise=0.2).float()
    rows = {"obs": torch.ones(3000, 2, 3), "alive": torch.ones(3000, 2).bool()}
    rows["action_mask"] = torch.tensor([True, True, False, True]).expand(3000, 2, 4)
    step = {"scouts": rows, "base": {"obs": torch.ones(3000, 2), "alive": torch.ones(3000).bool()}}
    step["is_first"] = torch.zeros(3000, dtype=torch.bool)
    with torch.no_grad():
        outs = {mode: algorithm.act(step, {}, mode)[0] for mode in ("random", "greedy", "explore")}  # type: ignore[arg-type]
        logits = algorithm.online[1].actor(torch.ones(3))
        mean = torch.tanh(algorithm.online[2].actor(torch.ones(2)))
    shares = {mode: one_hot(out["scouts"]["action"][:, 1], 4).float().mean(0) for mode, out in outs.items()}
    assert_close(shares["random"], torch.tensor([1.0, 1.0, 0.0, 1.0]) / 3, atol=0.05, rtol=0.0)
    logits[2] = -torch.inf
    assert_close(shares["explore"], logits.softmax(-1), atol=0.05, rtol=0.0)
    assert shares["greedy"].tolist() == one_hot(logits.argmax(), 4).tolist()
    base = {mode: out["base"]["action"] for mode, out in outs.items()}
    assert_close(base["greedy"], mean.expand(3000, 2))
    assert (base["random"].std(0) - 3**-0.5).abs().max() < 0.02
    assert base["random"].abs().max() < 1.0
    assert ((base["explore"] - mean).std(0) - 0.2).abs().max() < 0.02


def test_targets_follow_slowly():
    algorithm = make(tau=0.25, target_update_period=2)
    learner = learner_of(algorithm)
    before = [p.clone() for p in algorithm.target.parameters()]
    learner.minimize(doubled(algorithm.prepare(sample())), algorithm)
    assert all(torch.equal(a, b) for a, b in zip(before, algorithm.target.parameters(), strict=True))
    learner.minimize(doubled(algorithm.prepare(sample())), algorithm)
    online = algorithm.online.parameters()
    for old, new, source in zip(before, algorithm.target.parameters(), online, strict=True):
        assert_close(new, 0.75 * old + 0.25 * source)


def test_estimates_learn_the_policies_of_the_others():
    """Agents that always do the same are soon predicted: section 4.2."""
    algorithm = make(infer_policies=True, inference_entropy=0.0, grad_clip=None)
    raw = sample()
    raw["scouts"]["action"][:] = 1
    raw["scouts"]["action_mask"][:] = True
    raw["base"]["action"][:] = torch.tensor([0.5, -0.5])
    learner, batch = learner_of(algorithm), doubled(algorithm.prepare(raw))
    terms = [learner.minimize(batch, algorithm).terms for _ in range(120)]
    assert terms[0]["base/others"] > 1.0
    assert all(terms[-1][f"{name}/others"] < 0.05 for name in NAMES)


REFUSED = {
    "one agent": (("env=cartpole",), "env", "needs several agents, but the environment has one; use algo=ddpg"),
    "recurrent": (("env=two_step", "model=lstm"), "model", "MADDPG cannot learn with a recurrent model"),
    "buffer": (("env=two_step", "buffer=episodes"), "buffer", "maddpg learns from windows of older data"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_starts(tmp_path, what):
    words, key, said = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        build(compose(["algo=maddpg", "hardware=cpu", "logger.only=[]", *words]), tmp_path / "run").close()
    assert caught.value.key == key
    assert said in str(caught.value)


def test_other_actions_are_refused():
    of = EnvSpec({"team": Group(box(2), spaces.MultiDiscrete([2, 2]), ("a", "b"))})
    with pytest.raises(
        ConfigError, match="maddpg needs Discrete actions, or Box actions within bounds, but those of team"
    ):
        MADDPG.needs(testing.config("algo/maddpg"), of)
