"""QMIX, VDN and independent Q-learning against their definitions, computed column by column and agent by agent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.api import Losses
from rlplug.config import compose
from rlplug.plugins.algo.qmix import QMIX
from rlplug.run.build import build
from rlplug.testing import box
from rlplug.types import ConfigError, EnvSpec, Group
from tests.plugins.acting import learner_of

N, A, F = 3, 4, 2
SMALL = {"mlp": ["model.hidden=[6]"], "gru": ["model.hidden=5", "model.torso.hidden=[6]"]}
WINDOWS = {"batch_mode": "windows", "sequence_length": 4, "burn_in": 2, "stride": 2}


def spec(state: bool = True, masks: bool = True, agents: int = N) -> EnvSpec:
    group = Group(box(F), spaces.Discrete(A), tuple(f"agent{i}" for i in range(agents)))
    extras: dict[str, Any] = {"state": box(5)} if state else {}
    return EnvSpec({"team": group}, extras | ({"action_mask": spaces.MultiBinary(A)} if masks else {}), 9)


def make(model: str = "gru", of: EnvSpec | None = None, run: Any = None, **changes: Any) -> QMIX:
    torch.manual_seed(0)
    cfg, of = testing.config("algo/qmix", **{"mixing_embed_dim": 4, **changes}), of or spec()
    needs = QMIX.needs(cfg, of)
    if model == "gru":
        needs = QMIX.recurrent(cfg, needs)
    overrides = ["algo=qmix", f"model={model}", *SMALL[model]]
    algorithm = QMIX(cfg, testing.context(of, overrides=overrides, needs=needs, **run or {}))
    with torch.no_grad():
        for p in algorithm.target.parameters():  # another network than the online one
            p += 0.3 * torch.randn(p.shape)
    return algorithm


def sample(algorithm: QMIX, columns: int = 7):
    """Rows of teams whose agents terminate and are truncated one by one, come late, and end together; masks; weights.

    Undefined rewards are NaN.
    """
    g, window = torch.Generator().manual_seed(1), algorithm.ctx.needs.window
    whole = algorithm.ctx.needs.data == "episodes"
    rows = 8 if whole else window.rows
    lead = rows, columns, N
    batch = {"obs": torch.randn(*lead, F, generator=g), "action": torch.randint(A, lead, generator=g)}
    batch |= {"reward": torch.randn(lead, generator=g), "prev_action": torch.randint(A, lead, generator=g)}
    batch |= {
        "action_mask": torch.rand(*lead, A, generator=g) < 0.6,
        "state": torch.randn(rows, columns, 5, generator=g),
    }
    batch["action_mask"].scatter_(-1, batch["action"][..., None], True)
    alive, terminated = torch.ones(lead, dtype=torch.bool), torch.zeros(lead, dtype=torch.bool)
    valid, first = torch.ones(rows, columns, dtype=torch.bool), torch.zeros(rows, columns, dtype=torch.bool)
    at = window.burn_in  # nothing ends in the burn-in
    if rows - at > 2:
        alive[at + 1 :, 1, 0], terminated[at, 1, 0] = False, True  # the first agent terminates; the others go on
        alive[at + 1 :, 2, 1] = False  # the second is truncated
        alive[: at + 1, 3, 2] = False  # the third comes late
    for column, ends in ((4, True), (5, False)):  # all agents at once
        terminated[at, column], alive[at + 1, column], valid[at + 1, column] = ends, False, False
        if whole:
            alive[at + 1 :, column], valid[at + 1 :, column] = False, False
        else:
            first[at + 2 : at + 3, column] = True
    if whole:
        first[0], valid[-1], alive[-1] = True, False, False  # those that are left are truncated
    batch["reward"][~(alive & valid[..., None])] = torch.nan
    batch |= {"alive": alive, "terminated": terminated, "valid": valid, "is_first": first}
    before = torch.cat((torch.zeros_like(alive[:1]), (alive & valid[..., None])[:-1]))
    batch["agent_is_first"] = alive & (first[..., None] | ~before)
    if not whole:  # who was alive before is not known
        batch["agent_is_first"][0] = False
    if "carry" in algorithm.ctx.needs.keys:
        batch["carry"] = tree.map(lambda x: torch.randn(1, *x.shape, generator=g), algorithm.initial_carry(columns))
    if not whole:
        batch["weight"] = torch.rand(columns, generator=g)
    return batch


def rolled(algorithm: QMIX, network: Any, batch: Any, column: int, agent: int) -> torch.Tensor:
    """Values ``[T, A]`` of one agent's rows, one row at a time, by the layers of the network."""
    carry = {key: x[0, column, agent][None] for key, x in batch.get("carry", {}).items()}
    out = []
    for t in range(len(batch["valid"])):
        fresh = batch["agent_is_first"][t, column, agent]
        if fresh or not carry:
            carry = network.torso.initial_carry(1)
        last = torch.zeros(A)
        if not fresh:
            last[batch["prev_action"][t, column, agent]] = 1.0
        x = {"obs": batch["obs"][t, column, agent][None], "agent": torch.eye(N)[agent][None], "last_action": last[None]}
        features, carry = network.torso(x, carry, None)
        out.append(network.head(features)[0])
    return torch.stack(out)


def by_hand(algorithm: QMIX, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors of learned rows ``[L, B]``, or ``[L, B, N]`` without a mixer, NaN where there is no transition."""
    cfg, burn = algorithm.cfg, algorithm.ctx.needs.window.burn_in
    rows, columns = batch["valid"].shape
    length = rows - 1 if algorithm.ctx.needs.data == "episodes" else rows - burn - cfg.n_step
    every = itertools.product(range(columns), range(N))
    values = {
        (b, i): [rolled(algorithm, net, batch, b, i) for net in (algorithm.online, algorithm.target)] for b, i in every
    }
    alive, term, valid = batch["alive"], batch["terminated"], batch["valid"]
    mask = batch["action_mask"]

    def best(t: int, b: int, i: int) -> torch.Tensor:
        online, target = (x[t].clone() for x in values[b, i])
        judge = online if cfg.double_q else target.clone()
        return target[judge.masked_fill(~mask[t, b, i], -1e9).argmax()]

    def counts(t: int, b: int, i: int) -> bool:
        return bool(alive[t, b, i] or (alive[t - 1, b, i] and not term[t - 1, b, i]))

    def mixed(network: Any, q: list[Any], t: int, b: int) -> torch.Tensor:
        return network.mixer(torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in q]), batch["state"][t, b])

    errors = torch.full((length, columns) if algorithm.team else (length, columns, N), torch.nan)
    for t, b in itertools.product(range(length), range(columns)):
        s = t + burn
        if not valid[s, b]:
            continue
        for i in [None] if algorithm.team else [i for i in range(N) if alive[s, b, i]]:
            ret, k, over = 0.0, 0, False
            while (
                k < cfg.n_step
                and s + k < rows - 1
                and valid[s + k, b]
                and (i is None or alive[s + k, b, i])
                and not over
            ):
                paid = [batch["reward"][s + k, b, j] for j in range(N) if alive[s + k, b, j]]
                ret += cfg.gamma**k * (sum(paid) / N if i is None else batch["reward"][s + k, b, i])
                k += 1
                over = not any(counts(s + k, b, j) for j in range(N)) if i is None else bool(term[s + k - 1, b, i])
            e = s + k
            taken = [values[b, j][0][s][batch["action"][s, b, j]] if alive[s, b, j] else 0.0 for j in range(N)]
            if i is None:
                following = [best(e, b, j) if counts(e, b, j) else 0.0 for j in range(N)]
                future, value = mixed(algorithm.target, following, e, b), mixed(algorithm.online, taken, s, b)
            else:
                future, value = best(e, b, i), taken[i]
            error = value - (ret + (0.0 if over else cfg.gamma**k) * future)
            errors[(t, b) if i is None else (t, b, i)] = error
    return errors.square(), errors.abs()


@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
@pytest.mark.parametrize(("model", "mode"), [("gru", "complete_episodes"), ("gru", "windows"), ("mlp", "windows")])
@pytest.mark.parametrize(("n_step", "double_q"), [(1, True), (2, False)])
def test_the_loss_of_every_row_is_that_of_the_definition(mixer, model, mode, n_step, double_q):
    changes = WINDOWS | {"batch_mode": mode, "mixer": mixer, "n_step": n_step, "double_q": double_q}
    algorithm = make(model, gamma=0.9, **changes)
    batch = sample(algorithm)
    with torch.no_grad():
        losses = algorithm.forward(algorithm.prepare(batch), ("critic",))
        expected, error = by_hand(algorithm, batch)
    found, there = losses.terms["critic"], ~expected.isnan()
    weight = batch.get("weight", torch.ones(7)).view(-1, *[1] * (expected.ndim - 2))
    assert there.sum() > 4
    assert_close(found[there], (expected * weight)[there], atol=1e-5, rtol=1e-4)
    assert_close(losses.metrics["td_error"][there], error[there], atol=1e-5, rtol=1e-4)
    if mode == "windows" and mixer != "none":
        error = error.nan_to_num(0.0)
        eta, mean = algorithm.cfg.eta, error.sum(0) / (~expected.isnan()).sum(0).clamp(min=1)
        assert_close(losses.feedback["priority"], eta * error.amax(0) + (1 - eta) * mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["qmix", "vdn", "none"])
def test_absent_agents_and_rows_without_a_transition_change_nothing(mixer):
    algorithm = make("gru", mixer=mixer)
    batch = sample(algorithm)
    learner = learner_of(algorithm)
    learner.steps.compute(algorithm.prepare(batch), algorithm, ("critic",))
    before = {name: p.grad.clone() for name, p in algorithm.named_parameters() if p.grad is not None}
    gone = ~(batch["alive"] & batch["valid"][..., None])
    other = dict(batch)
    other["action"] = torch.where(gone, (batch["action"] + 1) % A, batch["action"])
    algorithm.zero_grad()
    learner_of(algorithm).steps.compute(algorithm.prepare(other), algorithm, ("critic",))
    for name, p in algorithm.named_parameters():
        if p.grad is not None:
            assert_close(p.grad, before[name])
    assert len(before) >= 8


@pytest.mark.parametrize("state", [True, False])
def test_without_a_global_state_the_mixer_reads_the_observations_of_who_is_present(state):
    algorithm = make("gru", spec(state))
    batch = sample(algorithm)
    seen = algorithm.prepare({key: x for key, x in batch.items() if state or key != "state"})["mixer_state"]
    if state:
        assert torch.equal(seen, batch["state"])
        return
    assert seen.shape == (8, 7, N * F)
    parts = seen.view(8, 7, N, F)
    assert_close(parts[:, 0], batch["obs"][:, 0])
    assert not parts[1:, 1, 0].any()  # it terminated
    assert_close(parts[1, 2, 1], batch["obs"][1, 2, 1])  # it was truncated: its final observation
    assert not parts[2:, 2, 1].any()
    assert not parts[0, 3, 2].any()  # it comes late


@pytest.mark.parametrize("mixer", ["qmix", "none"])
def test_initial_priorities_are_those_of_an_update_with_the_network_as_its_own_target(mixer):
    algorithm = make("gru", mixer=mixer, worker_side_prioritization=True, **WINDOWS | {"burn_in": 0})
    algorithm.target.load_state_dict(algorithm.online.state_dict())
    batch = sample(algorithm)
    with torch.no_grad():
        found = algorithm.initial_priorities(batch)
        losses = algorithm.forward(algorithm.prepare(batch), ("critic",))
    assert found.shape == (len(batch["valid"]) - 1, 7)
    error, prepared = losses.metrics["td_error"], algorithm.prepare(batch)
    if mixer == "none":
        error = (error * prepared["alive"]).sum(-1) / prepared["alive"].sum(-1).clamp(min=1)
    there = prepared["valid"]
    assert_close(found[: len(error)][there], error[there])
    assert "online.mixer.b1.weight" in algorithm.actor_keys() or mixer == "none"
    assert not any("mixer" in key for key in make("gru").actor_keys())


def test_acting_unrolls_what_the_learner_unrolls():
    """Masked actions are never taken; the state is that of the agent's own rows."""
    algorithm = make("gru")
    batch = sample(algorithm)
    carry, values = algorithm.initial_carry(7), []
    with torch.no_grad():
        for t in range(8):
            step = {key: batch[key][t] for key in ("obs", "action_mask", "prev_action", "agent_is_first", "is_first")}
            out, carry = algorithm.act(step, carry, "greedy")
            assert step["action_mask"].gather(-1, out["action"][..., None]).all()
            values.append(out["q"])
        expected = algorithm._unroll(algorithm.online, batch).masked_fill(~batch["action_mask"], torch.finfo().min)
    assert carry["h"].shape == (7, N, 5)
    assert_close(torch.stack(values), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["qmix", "none"])
def test_the_value_of_a_row_is_that_of_the_best_allowed_actions(mixer):
    algorithm = make("gru", mixer=mixer)
    batch = sample(algorithm)
    with torch.no_grad():
        found = algorithm.values(batch)
        for t, b in ((0, 0), (1, 1), (1, 2), (1, 4)):  # all; one terminated; one truncated; all terminated
            best = torch.zeros(N)
            for i in range(N):
                if batch["alive"][t, b, i] or (t and not batch["terminated"][t - 1, b, i]):
                    q = rolled(algorithm, algorithm.online, batch, b, i)[t]
                    best[i] = q[batch["action_mask"][t, b, i]].max()
            mixed = algorithm.online.mixer(best, batch["state"][t, b]) if mixer == "qmix" else best.mean()
            assert_close(found[t, b], mixed, atol=1e-5, rtol=1e-4)


def test_random_actions_are_allowed_and_advance_the_state():
    algorithm = make("gru", run={"num_envs": 7})
    batch = sample(algorithm)
    step = {key: batch[key][0] for key in ("obs", "action_mask", "prev_action", "agent_is_first", "is_first")}
    _, after = algorithm.act(step, algorithm.initial_carry(7), "greedy")
    drawn = [algorithm.act(step, algorithm.initial_carry(7), "random") for _ in range(30)]
    counts = sum(torch.nn.functional.one_hot(out["action"], A) for out, _ in drawn)
    assert torch.equal(counts > 0, step["action_mask"] & (counts > 0))
    assert (counts[step["action_mask"]] > 0).float().mean() > 0.95
    assert_close(drawn[0][1], after)


def test_the_target_follows_after_environment_steps():
    """500 steps at 0.25 updates a step are 125 updates; without a ratio, there is one update a round."""
    assert make(run={"replay_ratio": 0.25}).target_every == 125
    assert make(run={"replay_ratio": None, "rollout_length": 5, "num_envs": 20}).target_every == 5
    assert make(run={"replay_ratio": 1e-6}).target_every == 1
    algorithm = make("mlp", target_network_update_freq=2, run={"replay_ratio": 1.0}, **WINDOWS)
    learner, batch = learner_of(algorithm), sample(algorithm)

    def behind() -> bool:
        pairs = zip(algorithm.target.parameters(), algorithm.online.parameters(), strict=True)
        return any(not torch.equal(a, b) for a, b in pairs)

    found = []
    for _ in range(4):
        learner.minimize(algorithm.prepare(batch), algorithm)
        found.append(behind())
    assert found == [True, False, True, False]


def test_rmsprop_and_adam():
    def kind(**changes: Any) -> Any:
        return algorithm_optimizer(make("mlp", **changes))

    def algorithm_optimizer(algorithm: QMIX) -> Any:
        return algorithm.optimizers()["critic"].optimizer

    rmsprop = kind(optim_alpha=0.9)
    assert (type(rmsprop).__name__, rmsprop.param_groups[0]["alpha"]) == ("RMSprop", 0.9)
    assert rmsprop.param_groups[0]["eps"] == 1e-5
    assert type(kind(opt_type="adam")).__name__ == "Adam"


@pytest.mark.parametrize(("ids", "last"), [*itertools.product([True, False], repeat=2)])
def test_agents_differ_by_their_number_and_last_action_alone(ids, last):
    algorithm = make("mlp", agent_ids=ids, last_action=last)
    assert ("prev_action" in algorithm.ctx.needs.keys) == last
    step = {"obs": torch.ones(1, N, F), "agent_is_first": torch.zeros(1, N, dtype=torch.bool)}
    step |= {"prev_action": torch.tensor([[0, 1, 1]]), "is_first": torch.zeros(1, dtype=torch.bool)}
    q = algorithm.act(step, {}, "greedy")[0]["q"][0]
    assert torch.allclose(q[1], q[2], atol=1e-6) == (not ids)
    assert torch.allclose(q[0], q[1], atol=1e-6) == (not ids and not last)


# ---- exact values ----------------------------------------------------------------------------------------------------


def two_step_windows() -> Any:
    """All transitions of the two-step game, each once: state, joint action, reward, next state."""
    payoff = torch.tensor([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])
    rows = []
    for place, first, second in itertools.product(range(3), range(2), range(2)):
        paid = float(payoff[place - 1, first, second]) if place else 0.0
        rows.append((place, [first, second], paid, 1 + first if place == 0 else 0, place > 0))
    state = torch.stack([torch.eye(3)[[r[0] for r in rows]], torch.eye(3)[[r[3] for r in rows]]])
    ends = torch.tensor([r[4] for r in rows])[None, :, None].repeat(2, 1, 2)
    action = torch.tensor([r[1] for r in rows])[None].repeat(2, 1, 1)
    batch = {"obs": state[:, :, None].repeat(1, 1, 2, 1), "state": state, "action": action, "terminated": ends}
    batch["reward"] = torch.tensor([r[2] for r in rows])[None, :, None].repeat(2, 1, 2)
    batch["valid"] = torch.ones(2, 12, dtype=torch.bool)
    batch["alive"] = torch.stack([torch.ones(12, 2, dtype=torch.bool), ~ends[0]])
    batch["agent_is_first"] = torch.zeros(2, 12, 2, dtype=torch.bool)
    return batch


def learned(mixer: str) -> torch.Tensor:
    """Joint values ``[3, 2, 2]`` after learning the whole game, gamma 0.99."""
    group = Group(spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(2), ("one", "other"))
    of = EnvSpec({"team": group}, {"state": spaces.Box(0.0, 1.0, (3,))}, 2)
    changes = {"opt_type": "adam", "lr": [[0, 0.02], [1, 0.02]], "grad_clip": None, "mixing_embed_dim": 8}
    changes |= {"last_action": False, "target_network_update_freq": 20, "batch_mode": "windows", "mixer": mixer}
    torch.manual_seed(0)
    cfg = testing.config("algo/qmix", **changes)
    ctx = testing.context(
        of, overrides=["algo=qmix", "model=mlp", "model.hidden=[16]"], needs=QMIX.needs(cfg, of), replay_ratio=1.0
    )
    algorithm = QMIX(cfg, ctx)
    learner, batch = learner_of(algorithm), two_step_windows()
    for step in range(600):
        if step == 450:
            algorithm.lr.fill_(0.002)
        learner.minimize(algorithm.prepare(batch), algorithm)
    with torch.no_grad():
        rows = algorithm.prepare(batch)
        value, _ = algorithm._values(rows, *[algorithm._unroll(algorithm.online, rows)] * 2, algorithm.online.mixer)
    return value[0].view(3, 2, 2, *value.shape[2:])


def test_qmix_represents_the_two_step_game():
    """1803.11485, section 5: what VDN cannot."""
    expected = torch.tensor([[[6.93, 6.93], [7.92, 7.92]], [[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])
    assert_close(learned("qmix"), expected, atol=0.05, rtol=0.0)


def test_vdn_fits_the_closest_sum():
    """The additive fit of [[0, 1], [1, 8]] is [[-1.5, 2.5], [2.5, 6.5]], so state 2B seems to be worth 6.5 < 7."""
    first = [[0.99 * 7.0] * 2, [0.99 * 6.5] * 2]
    expected = torch.tensor([first, [[7.0, 7.0], [7.0, 7.0]], [[-1.5, 2.5], [2.5, 6.5]]])
    assert_close(learned("vdn"), expected, atol=0.05, rtol=0.0)


def test_independent_agents_average_over_each_other():
    """In 2B an action is worth the mean over the other's actions: 0.5 or 4.5; so both prefer 2A, worth 7."""
    values = learned("none")  # [3, 2, 2, agent]
    assert_close(values[2, ..., 0], torch.tensor([[0.5, 0.5], [4.5, 4.5]]), atol=0.05, rtol=0.0)
    assert_close(values[2, ..., 1], torch.tensor([[0.5, 4.5], [0.5, 4.5]]), atol=0.05, rtol=0.0)
    assert_close(values[0, ..., 0], torch.tensor([[6.93, 6.93], [4.455, 4.455]]), atol=0.05, rtol=0.0)


# ---- bad input -------------------------------------------------------------------------------------------------------

REFUSED = {
    "one agent": (
        ("env=cartpole",),
        "env",
        "qmix needs one group of agents with equal spaces, but there are: one agent",
    ),
    "groups": (("env=chase",), "env", "qmix needs one group of agents with equal spaces, but there are: "),
    "buffer": (("env=two_step", "buffer=replay"), "buffer", "qmix learns from whole episodes; use buffer=episodes"),
    "states": (
        ("env=two_step", "algo.batch_mode=windows", "buffer=replay"),
        "buffer",
        "replay keeps no recurrent states, which qmix's model needs",
    ),
    "priorities": (
        ("env=two_step", "algo.worker_side_prioritization=true"),
        "buffer",
        "episodes has no priorities, but qmix's actors compute them",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_starts(tmp_path, what):
    words, key, said = REFUSED[what]
    with pytest.raises(ConfigError) as caught:
        build(compose(["algo=qmix", "hardware=cpu", "logger.only=[]", *words]), tmp_path / "run").close()
    assert caught.value.key == key
    assert said in str(caught.value)


def test_continuous_actions_are_refused():
    of = EnvSpec({"team": Group(box(2), box(1), ("a", "b"))})
    with pytest.raises(ConfigError, match="qmix needs Discrete actions, but those of team are Box"):
        QMIX.needs(testing.config("algo/qmix"), of)


def test_losses_have_the_axis_of_agents_if_nothing_is_mixed():
    for mixer, ndim in (("none", 3), ("vdn", 2)):
        algorithm = make("mlp", mixer=mixer)
        losses = algorithm.forward(algorithm.prepare(sample(algorithm)), ("critic",))
        assert isinstance(losses, Losses)
        assert {x.ndim for x in (*losses.terms.values(), *losses.metrics.values())} == {ndim}
