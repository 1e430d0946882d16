"""What holds for every algorithm of segments; the file of each has what its own paper says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.plugins.algo.a2c import A2C
from rlplug.plugins.algo.appo import APPO
from rlplug.plugins.algo.impala import IMPALA
from rlplug.plugins.algo.ppo import PPO
from rlplug.types import ConfigError
from tests.plugins import acting
from tests.plugins.acting import B, T, learner_of, move, segment, weights

ALGORITHMS = {"a2c": A2C, "ppo": PPO, "appo": APPO, "impala": IMPALA}
OPTIONS = {
    "ppo": {"sgd_minibatch_size": 16, "num_sgd_iter": 2, "max_seq_len": 8},
    "appo": {"max_seq_len": 8, "normalize_advantage": False},
}
LSTM, CRITIC = ["model=lstm"], ["model=mlp", "model@critic_model=gru"]
TORSOS = {
    "mlp": ([], False),
    "mlp shared": ([], True),
    "lstm": (LSTM, False),
    "lstm shared": (LSTM, True),
    "memory of the critic": (CRITIC, False),
}
every = pytest.mark.parametrize("name", ALGORITHMS)
torsos = pytest.mark.parametrize(("overrides", "shared"), TORSOS.values(), ids=TORSOS)


def make(name: str, spec=None, overrides=(), **changes):
    run = {"num_envs": B, "rollout_length": T}
    return acting.make(ALGORITHMS[name], name, spec, overrides, run, **OPTIONS.get(name, {}) | changes)


def update(algorithm, batch, times: int = 1) -> None:
    learner = learner_of(algorithm)
    for _ in range(times):
        with torch.no_grad():
            prepared = algorithm.prepare(dict(batch))
        algorithm.update(prepared, learner)
        learner.progress.updates += 1


@every
@torsos
def test_one_pass_over_the_rows_is_what_acted(name, overrides, shared):
    algorithm = make(name, overrides=overrides, vf_share_layers=shared)
    batch = segment(algorithm)
    logp, values = algorithm.logp(batch), algorithm.values(batch)
    assert values.shape == (T + 1, B)
    if "logp" in batch:
        assert_close(logp, batch["logp"])
    for t in range(T + 1):  # every row by itself, from the state that was stored before it
        row = tree.map(lambda x, t=t: x[t : t + 1], {key: batch[key] for key in batch if key != "reward"})
        assert_close(algorithm.logp(row)[0], logp[t])
        assert_close(algorithm.values(row)[0], values[t])
    move(algorithm)
    assert (algorithm.logp(batch) - logp).abs().max() > 1e-3


@every
@pytest.mark.parametrize("distribution", ["squashed_gaussian", "beta"])
def test_bounded_actions_are_those_of_the_distribution_that_acted(name, distribution):
    spec = testing.spec(3, spaces.Box(-1.0, 1.0, (2,), np.float32))
    algorithm = make(name, spec, distribution=distribution, entropy_coeff=0.1)
    batch = segment(algorithm)
    assert batch["action"].abs().max() < 1.0
    logp = algorithm.logp(batch)
    if "logp" in batch:
        assert_close(logp, batch["logp"])
    update(algorithm, batch, 2)
    assert algorithm.logp(batch).isfinite().all()
    assert (algorithm.logp(batch) - logp).abs().max() > 1e-3


@every
@pytest.mark.parametrize("overrides", [[], LSTM, CRITIC], ids=["mlp", "lstm", "memory of the critic"])
def test_rows_that_begin_no_transition_change_nothing(name, overrides):
    found = []
    for junk in (0.0, 1e3):
        algorithm = make(name, overrides=overrides)
        batch = segment(algorithm)
        for row, column in ((5, 2), (9, 3), (T, 0)):
            batch["action"][row, column] = int(junk > 0)
            for key in {"reward", "logp"} & batch.keys():
                batch[key][row, column] = junk
        before = weights(algorithm)
        update(algorithm, batch)
        found.append(weights(algorithm))
        assert not torch.equal(before, found[-1])
    assert torch.equal(*found)


@pytest.mark.parametrize("term", ["policy", "value"])
@pytest.mark.parametrize("name", ["a2c", "impala"])
def test_memory_reaches_back_through_the_segment_and_no_further_than_its_episode(name, term):
    algorithm = make(name, overrides=LSTM)
    batch = segment(algorithm)
    batch["obs"].requires_grad_()
    algorithm.forward(batch, ("policy",)).terms[term][T - 1].sum().backward()
    reached = batch["obs"].grad.abs().sum(-1) > 0
    assert reached[:T, :2].all()
    assert reached[:T, 2].tolist() == [False] * 6 + [True] * (T - 6)  # an episode of column 2 begins in row 6
    assert reached[:T, 3].tolist() == [False] * 10 + [True] * (T - 10)  # and of column 3 in row 10
    assert not reached[T].any()


@every
@pytest.mark.parametrize("action", [spaces.Discrete(4), spaces.MultiDiscrete([3, 2])], ids=str)
def test_forbidden_actions_get_no_gradient(name, action):
    algorithm = make(name, testing.spec(3, action), entropy_coeff=0.1)
    mask = torch.ones(T + 1, B, 4 if isinstance(action, spaces.Discrete) else 5, dtype=torch.bool)
    mask[..., 1] = False  # choice 1 of the first factor
    batch = segment(algorithm, mask)
    assert (batch["action"].view(T + 1, B, -1)[..., 0] != 1).all()
    with torch.no_grad():
        prepared = algorithm.prepare(batch)
    terms = algorithm.forward(prepared, ("policy",)).terms
    assert all(term[prepared["valid"]].isfinite().all() for term in terms.values())
    sum(term[prepared["valid"]].mean() for term in terms.values()).backward()
    gradient = algorithm.net.policy.linear.weight.grad
    assert (gradient[1] == 0).all()
    assert (gradient[[0, 2]] != 0).all()


@every
def test_updates_make_the_rewarded_action_more_likely(name):
    algorithm = make(name, lr=1e-2, gamma=0.0)
    batch = segment(algorithm)
    batch["reward"] = (batch["action"] == 1).float()
    ones = batch | {"action": torch.ones_like(batch["action"])}
    before = algorithm.logp(ones).exp().mean()
    update(algorithm, batch, 30)
    assert algorithm.logp(ones).exp().mean() > before + 0.07


@pytest.mark.parametrize("name", ["a2c", "impala"])
def test_the_first_step_of_rmsprop(name):
    """``m = (1 - decay) g^2`` and ``lr g / (sqrt(m) + epsilon)``."""
    algorithm = make(name, opt_type="rmsprop", lr=0.01, decay=0.9, epsilon=0.1, grad_clip=None)
    batch, start = segment(algorithm), weights(algorithm)
    terms = algorithm.forward(batch, ("policy",)).terms
    sum(term[batch["valid"]].mean() for term in terms.values()).backward()
    g = torch.cat([p.grad.flatten() for p in algorithm.parameters()])
    learner_of(algorithm).minimize(batch, algorithm)
    assert_close(weights(algorithm), start - 0.01 * g / ((0.1 * g * g).sqrt() + 0.1))


@every
def test_a_memory_that_nothing_reads_is_refused(name):
    with pytest.raises(ConfigError, match="vf_share_layers"):
        make(name, overrides=["model=mlp", "model@critic_model=lstm"], vf_share_layers=True)


@pytest.mark.parametrize(("name", "what"), [("appo", "ratios divide"), ("impala", "V-trace divides")])
def test_rows_without_the_log_probabilities_of_who_acted_are_refused(name, what):
    algorithm = make(name)
    batch = segment(algorithm)
    del batch["logp"]
    with pytest.raises(ConfigError, match=rf"buffer: gives rows without logp.*{what} by; collect them with"):
        algorithm.prepare(batch)


# ---- without a value -------------------------------------------------------------------------------------------------

BARE = {"use_critic": False, "lambda_": 1.0}


@pytest.mark.parametrize("name", ["a2c", "ppo"])
@pytest.mark.parametrize("overrides", [[], LSTM], ids=["mlp", "lstm"])
def test_without_a_critic_advantages_are_discounted_returns(name, overrides):
    whole = {"max_seq_len": T} if name == "ppo" else {}
    algorithm = make(name, overrides=overrides, gamma=0.9, **BARE, **whole)
    assert not [name for name, _ in algorithm.named_parameters() if "value" in name]
    assert algorithm.optimizers().keys() == {"policy"}
    batch = segment(algorithm)
    expected = torch.zeros(T, B)
    for b in range(B):
        ret = 0.0
        for t in reversed(range(T)):  # an episode that is open at the end, and one that is truncated, end with 0
            ret = (
                float(batch["reward"][t, b]) + 0.9 * ret * bool(batch["valid"][t + 1, b])
                if batch["valid"][t, b]
                else 0.0
            )
            expected[t, b] = ret
    valid = batch["valid"][:-1]
    if name == "ppo":
        batch = algorithm.prepare(batch)
        assert_close(batch["advantage"][:T][valid], expected[valid])
    losses = algorithm.forward(batch, ["policy"])
    assert losses.terms.keys() <= {"policy", "entropy"}
    if name == "a2c":
        assert_close(losses.metrics["advantage"][:T][valid], expected[valid])
    with pytest.raises(NotImplementedError, match="no value function"):
        algorithm.values(segment(algorithm))


@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_settings_that_need_the_critic_are_refused(name):
    with pytest.raises(
        ConfigError, match=r"^algo\.lambda_: 0\.9 weights values, but algo\.use_critic=false has none; use 1"
    ):
        make(name, use_critic=False, lambda_=0.9)
    with pytest.raises(ConfigError, match=r"^algo\.critic_lr: is the step size of a value, but algo\.use_critic=false"):
        make(name, critic_lr=0.1, **BARE)
