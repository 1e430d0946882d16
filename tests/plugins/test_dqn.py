from functools import cache
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from rlplug import testing
from rlplug.api import Window
from rlplug.context import RunContext
from rlplug.functional.distributional import project
from rlplug.functional.td import inverse_rescale, rescale
from rlplug.plugins.algo.dqn import DQN
from rlplug.types import ConfigError

ACTIONS = 3
RAINBOW = {"double_q": True, "dueling": True, "noisy": True, "num_atoms": 7, "v_min": -2.0, "v_max": 3.0, "n_step": 3}
SEQUENCES = {"sequence_length": 4, "stride": 2}


@cache
def slots(model):
    """The models of a run, small."""
    small = {"mlp": ["model.hidden=[8]"], "attention": ["model.dim=8", "model.torso.hidden=[8]"]}
    words = small.get(model, ["model.hidden=8", "model.torso.hidden=[8]"])
    return testing.context(overrides=["algo=dqn", f"model={model}", *words]).slots


def make(model="mlp", action=ACTIONS, seed=0, **changes) -> DQN:
    torch.manual_seed(seed)
    cfg, spec = testing.config("algo/dqn", **{"hiddens": [6], **changes}), testing.spec(5, action)
    needs = DQN.needs(cfg, spec)
    if model != "mlp":
        needs = DQN.recurrent(cfg, needs)
    algorithm = DQN(cfg, RunContext(spec=spec, slots=slots(model), needs=needs, seed=seed))
    for p in algorithm.target.parameters():  # another network than the online one
        p.add_(0.3 * torch.randn(p.shape))
    return algorithm


def sample(algorithm: DQN, columns: int = 6, seed: int = 1):
    """Rows as a buffer gives them. Column 0 terminates early, column 1 is truncated, column 2 ends a little later."""
    g, needs = torch.Generator().manual_seed(seed), algorithm.ctx.needs
    rows = needs.window.burn_in + needs.window.length + 1
    batch = {
        "obs": torch.randn(rows, columns, 5, generator=g),
        "action": torch.randint(algorithm.actions, (rows, columns), generator=g),
        "reward": torch.randn(rows, columns, generator=g),
        "action_mask": torch.rand(rows, columns, algorithm.actions, generator=g) < 0.5,
        "weight": torch.rand(columns, generator=g),
    }
    batch["action_mask"].scatter_(-1, batch["action"][..., None], True)
    for key in ("terminated", "truncated", "is_first"):
        batch[key] = torch.zeros(rows, columns, dtype=torch.bool)
    batch["valid"] = torch.ones(rows, columns, dtype=torch.bool)
    for column, (end, row) in enumerate([("terminated", 0), ("truncated", 0), ("terminated", 2)]):
        row += needs.window.burn_in
        if row + 1 < rows:
            batch[end][row, column], batch["valid"][row + 1, column] = True, False
            batch["reward"][row + 1, column] = 1e6
            batch["is_first"][row + 2 : row + 3, column] = True
    if needs.window.stride:
        carry = algorithm.initial_carry(columns)
        batch["carry"] = {key: torch.randn(1, *x.shape, generator=g) for key, x in carry.items()}
    return batch


# ---- the loss, by its definition -------------------------------------------------------------------------------------


def walk(network, batch, column):
    """What the network says of every row of one column, asked one row after the other: ``[R, A, atoms]``."""
    carry, said = {key: x[0, column : column + 1] for key, x in batch.get("carry", {}).items()}, []
    for row in range(len(batch["obs"])):
        step = {key: batch[key][row, column : column + 1] for key in ("obs", "is_first")}
        out, carry = network(step, carry, True)
        said.append(out[0].view(ACTIONS, -1))  # without atoms the network leaves their axis out
    return torch.stack(said)


def learned(algorithm: DQN) -> int:
    """How many rows of a sample are learned from."""
    return algorithm.cfg.sequence_length if algorithm.sequences else 1


def by_definition(algorithm: DQN, batch):
    """Loss and error of every row that is learned from, ``[L, B]``, in Python; None where the row is not valid."""
    cfg, support, burn = algorithm.cfg, algorithm.support, algorithm.ctx.needs.window.burn_in
    eps = cfg.value_rescaling

    def expected(out):
        z = support if cfg.num_atoms > 1 else None
        if z is None:
            return inverse_rescale(out[..., 0], eps) if eps else out[..., 0]
        return out.softmax(-1) @ (inverse_rescale(z, eps) if eps else z)

    losses, errors, length = [], [], learned(algorithm)
    for column in range(batch["valid"].shape[1]):
        online = walk(algorithm.online, batch, column)
        target = walk(algorithm.target, batch, column).detach()
        for row in range(burn, burn + length):
            if not batch["valid"][row, column]:
                losses.append(None), errors.append(None)
                continue
            ret, discount, k = 0.0, 1.0, row
            while k < row + cfg.n_step and batch["valid"][k, column]:
                ret += discount * batch["reward"][k, column]
                discount *= 0.0 if batch["terminated"][k, column] else cfg.gamma
                k += 1
            judge = expected(online[k].detach() if cfg.double_q else target[k])
            allowed = range(ACTIONS)
            if "action_mask" in batch:
                allowed = [a for a in allowed if batch["action_mask"][k, column, a]] or [0]
            best = max(allowed, key=lambda a: float(judge[a]))
            chosen = online[row, batch["action"][row, column]]
            if cfg.num_atoms == 1:
                goal = ret + discount * expected(target[k])[best]
                error = (rescale(goal, eps) if eps else goal) - chosen[0]
                small = error.abs() <= 1.0
                loss = 0.5 * error**2 if small or cfg.td_error_loss_fn == "mse" else error.abs() - 0.5
                losses.append(loss), errors.append(error.detach().abs())
            else:
                atoms = ret + discount * (inverse_rescale(support, eps) if eps else support)
                mass = project(target[k, best].softmax(-1), rescale(atoms, eps) if eps else atoms, support)
                loss = sum(m * (m.log() - q) for m, q in zip(mass, chosen.log_softmax(-1), strict=True) if m > 0)
                losses.append(loss), errors.append(loss.detach())
    return [losses[i::length] for i in range(length)], [errors[i::length] for i in range(length)]


SWITCHES = [
    {"double_q": double, "num_atoms": atoms, "value_rescaling": eps, "n_step": n, "v_min": -2.0, "v_max": 3.0}
    for double, atoms, eps, n in product((False, True), (1, 7), (None, 1e-2), (1, 3))
]
KINDS = [("mlp", {}), ("lstm", {**SEQUENCES, "burn_in": 0}), ("gru", {**SEQUENCES, "burn_in": 2})]
KINDS += [("attention", {**SEQUENCES, "burn_in": 0})]


@pytest.mark.parametrize(("model", "rows"), KINDS, ids=[model for model, _ in KINDS])
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(str(x) for x in list(s.values())[:4]))
def test_every_combination_is_its_definition(switches, model, rows):
    """The other switches take turns, so that each one meets each one."""
    turn = SWITCHES.index(switches).bit_count() + KINDS.index((model, rows))
    masked, both = turn % 2 == 0, turn // 2 % 2 == 0
    loss_fn = "mse" if both else "huber"
    algorithm = make(model, **switches, **rows, dueling=both, noisy=not both, td_error_loss_fn=loss_fn)
    batch = sample(algorithm)
    if not masked:
        del batch["action_mask"]
    prepared = algorithm.prepare(batch)
    losses = algorithm.forward(prepared, ("critic",))
    shape, length = prepared["returns"].shape, learned(algorithm)
    assert shape == ((length, 6) if algorithm.sequences else (6,))  # every sample's first row is valid
    valid = prepared["valid"] if algorithm.sequences else batch["valid"][:1]
    term, error = losses.terms["critic"].view(length, 6), losses.metrics["td_error"].view(length, 6)
    wanted, errors = by_definition(algorithm, batch)
    total = torch.zeros(())
    for row, column in product(range(length), range(6)):
        loss = wanted[row][column]
        assert (loss is not None) == bool(valid[row, column])
        if loss is not None:
            assert_close(term[row, column], batch["weight"][column] * loss, rtol=1e-4, atol=1e-5)
            assert_close(error[row, column], errors[row][column], rtol=1e-4, atol=1e-5)
            total = total + batch["weight"][column] * loss
    for column in range(6):
        of = [errors[row][column] for row in range(length) if errors[row][column] is not None]
        priority = 0.9 * max(of) + 0.1 * sum(of) / len(of)
        assert_close(losses.feedback["priority"][column], priority, rtol=1e-4, atol=1e-5)
    mine = torch.autograd.grad(torch.where(valid, term, 0.0).sum(), algorithm.online.parameters())
    if rows.get("burn_in"):
        return  # by definition the gradient goes on through the rows that warm up
    for gradient, theirs in zip(mine, torch.autograd.grad(total, algorithm.online.parameters()), strict=True):
        assert_close(gradient, theirs, rtol=1e-3, atol=1e-5)


def test_burn_in_has_no_gradient_and_matters():
    algorithm = make("lstm", **SEQUENCES, burn_in=3)
    batch = sample(algorithm)
    batch["obs"].requires_grad_()
    loss = algorithm.forward(algorithm.prepare(batch), ("critic",)).terms["critic"].sum()
    (gradient,) = torch.autograd.grad(loss, batch["obs"])
    assert not gradient[:3].any()
    assert gradient[3 : 3 + 4].any(-1).all()
    with torch.no_grad():
        batch["obs"][0] += 1.0
        assert algorithm.forward(algorithm.prepare(batch), ("critic",)).terms["critic"].sum() != loss


def test_a_forbidden_action_cannot_be_bootstrapped_from_even_where_it_would_be_the_best():
    algorithm = make(gamma=0.9)
    batch = sample(algorithm)
    with torch.no_grad():
        q = algorithm.q(algorithm.target({key: batch[key] for key in ("obs", "is_first")}, {}, True)[0])[1]
    batch["action_mask"][1] = torch.nn.functional.one_hot(q.argmin(-1), ACTIONS).bool()
    batch["action_mask"][1, 0] = False  # nothing to choose from, where the episode has terminated
    error = algorithm.forward(algorithm.prepare(batch), ("critic",)).metrics["td_error"]
    with torch.no_grad():
        out, _ = algorithm.online({key: batch[key][:1] for key in ("obs", "is_first")}, {}, True)
    alive = torch.tensor([0.0, 1, 1, 1, 1, 1])
    goal = batch["reward"][0] + 0.9 * alive * q.amin(-1)
    assert_close(error, (goal - out[0, torch.arange(6), batch["action"][0]]).abs())


# ---- acting ----------------------------------------------------------------------------------------------------------


def step(columns=4, mask=None):
    row = {"obs": torch.randn(columns, 5, generator=torch.Generator().manual_seed(3))}
    row["is_first"] = torch.zeros(columns, dtype=torch.bool)
    return row if mask is None else row | {"action_mask": mask}


def test_greedy_acts_by_the_means_and_exploring_by_new_noise():
    algorithm = make(noisy=True)
    algorithm.ctx.shard.env_ids = range(4)
    means = algorithm.act(step(), {}, "greedy")[0]["q"]
    first, second = (algorithm.act(step(), {}, "explore")[0]["q"] for _ in range(2))
    assert not torch.allclose(first, means)
    assert not torch.allclose(first, second)
    assert_close(algorithm.act(step(), {}, "greedy")[0]["q"], means, rtol=0, atol=0)
    again = make(noisy=True)
    assert_close(again.act(step(), {}, "explore")[0]["q"], first, rtol=0, atol=0)


def test_prepare_draws_noise_for_both_networks():
    algorithm = make(**RAINBOW)
    batch = sample(algorithm)
    algorithm.prepare(batch)
    online, target = ([x.noise_in.clone() for x in net.noisy] for net in (algorithm.online, algorithm.target))
    assert len(online) == 4  # a hidden and an output layer, of value and advantages
    assert all(not torch.equal(a, b) for a, b in zip(online, target, strict=True))
    algorithm.prepare(batch)
    assert all(not torch.equal(a, x.noise_in) for a, x in zip(online, algorithm.online.noisy, strict=True))
    assert all(not torch.equal(a, x.noise_in) for a, x in zip(target, algorithm.target.noisy, strict=True))


@pytest.mark.parametrize("mode", ["explore", "greedy", "random"])
def test_the_recurrent_state_goes_on_in_every_mode(mode):
    algorithm = make("lstm", **SEQUENCES)
    algorithm.ctx.shard.num_envs, algorithm.ctx.shard.env_ids = 4, range(4)
    carry = algorithm.initial_carry(4)
    _, after = algorithm.act(step(), carry, mode)
    assert all(not torch.equal(after[key], carry[key]) for key in carry)
    _, wanted = algorithm.online.torso(step()["obs"], carry, step()["is_first"])
    for key in carry:
        assert_close(after[key], wanted[key])


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_what_it_lives_on():
    cfg, spec = testing.config("algo/dqn", n_step=3, sequence_length=10, burn_in=4, stride=5), testing.spec(5, 3)
    plain = DQN.needs(cfg, spec)
    assert (plain.window, plain.off_policy, plain.perturbable) == (Window(3), True, True)
    recurrent = DQN.recurrent(cfg, plain)
    assert recurrent.window == Window(12, 4, 5, 2)
    assert {"action_mask", "carry"} <= set(recurrent.keys)


@pytest.mark.parametrize(("model", "changes"), [("mlp", {}), ("mlp", RAINBOW), ("lstm", {**SEQUENCES, "burn_in": 0})])
def test_the_value_of_a_row_is_that_of_the_greedy_action(model, changes):
    algorithm = make(model, **changes)
    batch = sample(algorithm)
    carry = {key: x[0] for key, x in batch.get("carry", {}).items()}
    for t, value in enumerate(algorithm.values(batch)):
        row = {key: batch[key][t] for key in ("obs", "is_first", "action_mask")}
        out, carry = algorithm.act(row, carry, "greedy")
        assert_close(value, out["q"].gather(-1, out["action"][:, None])[:, 0])


@pytest.mark.parametrize(("model", "changes"), [("mlp", {}), ("mlp", {"num_atoms": 7}), ("lstm", SEQUENCES)])
def test_it_samples_from_the_softmax_of_its_values(model, changes):
    """Its log-probabilities while it acts are those of the stored rows, and masked actions have probability 0."""
    algorithm = make(model, temperature=[[0, 0.5], [100, 2.0]], **changes)
    algorithm.ctx.schedules.refresh(100)
    batch = sample(algorithm)
    policy = algorithm.distribution(batch)
    q, mask = algorithm.judged(batch)
    wanted = (q / 2.0).masked_fill(~mask, -torch.inf).softmax(-1)
    assert_close(policy.params.exp(), wanted)
    carry = {key: x[0] for key, x in batch.get("carry", {}).items()}
    for t in range(len(batch["obs"])):
        row = {key: batch[key][t] for key in ("obs", "is_first", "action_mask")}
        out, carry = algorithm.act(row, carry, "explore")
        assert_close(out["logp"], wanted[t].gather(-1, out["action"][:, None])[:, 0].log())


def test_without_a_temperature_its_policy_is_greedy():
    algorithm = make()
    batch = sample(algorithm)
    batch["action"] = algorithm.distribution(batch).mode()
    for t, action in enumerate(batch["action"]):
        out, _ = algorithm.act({key: batch[key][t] for key in ("obs", "is_first", "action_mask")}, {}, "explore")
        assert torch.equal(out["action"], action)
        assert "logp" not in out
    assert (algorithm.logp(batch) == 0.0).all()
    assert (algorithm.logp(batch | {"action": (batch["action"] + 1) % ACTIONS}) < -1e30).all()


def test_random_actions_are_uniform_and_have_their_log_probability():
    algorithm = make()
    mask = torch.tensor([[True, False, True], [True, True, True]]).repeat_interleave(500, 0)
    out, _ = algorithm.act({"is_first": mask[:, 0], "action_mask": mask}, {}, "random")
    assert_close(out["logp"], -mask.sum(-1).float().log())


def test_noisy_layers_and_a_temperature_exclude_each_other():
    with pytest.raises(ConfigError, match=r"^algo\.temperature: explores already, as noisy layers do; use null"):
        make(noisy=True, temperature=1.0)
