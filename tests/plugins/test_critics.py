"""What holds for every algorithm of critics and windows; the file of each has what its own paper says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from rlplug import testing
from rlplug.plugins.algo.cql import CQL
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.iql import IQL
from rlplug.plugins.algo.sac import SAC
from rlplug.types import ConfigError
from tests.plugins.acting import gradients, learner_of, make, weights, windows

BOX = testing.spec(3, testing.box(2))
IMAGE = testing.spec(spaces.Box(0, 255, (3, 12, 12), np.uint8), testing.box(2))
SMALL, LSTM = ("model=cnn", "model.filters=[[4, 3, 2]]", "model.hidden=[8]"), ("model=lstm",)
WINDOWS = {"sequence_length": 4, "burn_in": 2}
SAC_PARTS = {"critic": {"critic"}, "actor": {"model", "policy"}, "alpha": {"log_alpha"}}
TD3_PARTS = {"critic": {"critic"}, "actor": {"actor"}}
CQL_PARTS = {**SAC_PARTS, "weight": {"log_weight"}}
IQL_PARTS = {"critic": {"critic"}, "value": {"value"}, "actor": {"net"}}
GRAPHS = {
    "sac": (SAC, "sac", BOX, (), WINDOWS, SAC_PARTS),
    "sac, images": (SAC, "sac", IMAGE, SMALL, WINDOWS, SAC_PARTS),
    "sac, choices": (SAC, "sac", testing.spec(3, spaces.MultiDiscrete([3, 2])), (), WINDOWS, SAC_PARTS),
    "sac, memory": (SAC, "sac", BOX, LSTM, WINDOWS, SAC_PARTS),
    "sac, choices and memory": (SAC, "sac", testing.spec(3, 4), LSTM, WINDOWS, SAC_PARTS),
    "td3": (DDPG, "td3", BOX, (), WINDOWS, TD3_PARTS),
    "td3, images": (DDPG, "td3", IMAGE, SMALL, WINDOWS, TD3_PARTS),
    "td3, memory": (DDPG, "td3", BOX, LSTM, WINDOWS, TD3_PARTS),
    "td3, memory of the policy": (*(DDPG, "td3", BOX, ("model@critic_model=mlp", "model=gru")), *(WINDOWS, TD3_PARTS)),
    "td3_bc": (DDPG, "td3_bc", BOX, (), {}, TD3_PARTS),
    "cql": (CQL, "cql", BOX, (), {"lagrangian_thresh": 5.0, "bc_iters": 0}, CQL_PARTS),
    "iql": (IQL, "iql", BOX, (), {}, IQL_PARTS),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph_gives_the_gradients_of_losses_computed_one_by_one(name):
    """Each for the parameters of its part, and all of those that learn have one."""
    cls, option, spec, overrides, changes, parts = GRAPHS[name]
    algorithm = make(cls, option, spec, overrides, **changes)
    batch = algorithm.prepare(windows(algorithm))
    together, apart = gradients(algorithm, batch, (*parts,)), [gradients(algorithm, batch, (part,)) for part in parts]
    assert [{key.split(".")[0] for key in found} for found in apart] == [*parts.values()]
    merged = {key: grad for found in apart for key, grad in found.items()}
    assert merged.keys() == together.keys() == {n for n, p in algorithm.named_parameters() if p.requires_grad}
    for key, grad in merged.items():
        assert_close(together[key], grad, rtol=1e-5, atol=1e-7)


WEIGHTED = {
    "sac": (SAC, BOX, ("critic", "actor", "alpha")),
    "sac, choices": (SAC, testing.spec(3, 4), ("critic", "actor", "alpha")),
    "td3": (DDPG, BOX, ("critic", "actor")),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_importance_weights_scale_the_critics_loss_alone(name):
    cls, spec, parts = WEIGHTED[name]
    algorithm = make(cls, name.partition(",")[0], spec)
    batch, weight = algorithm.prepare(windows(algorithm)), torch.linspace(0.0, 1.0, 6)
    plain, weighted = (algorithm.forward(x, parts) for x in (batch, batch | {"weight": weight}))
    assert_close(weighted.terms["critic"], weight * plain.terms["critic"])
    assert all(torch.equal(weighted.terms[key], plain.terms[key]) for key in parts[1:])
    assert torch.equal(weighted.feedback["priority"], plain.feedback["priority"])
    assert torch.equal(algorithm.prepare(windows(algorithm) | {"weight": weight})["weight"], weight)


@pytest.mark.parametrize(("cls", "name"), [(SAC, "sac"), (DDPG, "td3"), (DQN, "dqn")])
def test_targets_follow_at_their_frequency(cls, name):
    changes = {"policy_delay": 1} if name == "td3" else {}
    spec = testing.spec(3, 4) if name == "dqn" else BOX
    algorithm = make(cls, name, spec, target_update_period=3, tau=0.5, **changes)
    learner, moved, target = learner_of(algorithm), [], algorithm.target if name != "td3" else algorithm.target_critic
    for update in range(6):
        learner.progress.updates = update
        before = weights(target)
        learner.minimize(algorithm.prepare(windows(algorithm)), algorithm)
        moved.append(not torch.equal(weights(target), before))
        if moved[-1]:
            assert_close(
                weights(target), 0.5 * (before + weights(algorithm.online if name == "dqn" else algorithm.critic))
            )
    assert moved == [False, False, True] * 2


@pytest.mark.parametrize(("cls", "name"), [(CQL, "cql"), (IQL, "iql"), (DDPG, "td3_bc"), (SAC, "sac")])
def test_values_are_of_what_was_executed(cls, name):
    """A Gaussian policy's recorded actions reach beyond the bounds, where the environment clips them."""
    algorithm = make(cls, name, BOX)
    batch = windows(algorithm)
    batch["action"] = 3.0 * batch["action"]
    clipped = batch | {"action": batch["action"].clamp(-1.0, 1.0)}
    assert not torch.equal(batch["action"], clipped["action"])

    def critic(batch):
        algorithm.ctx.generators["learner"].manual_seed(0)
        return algorithm.forward(algorithm.prepare(batch), ("critic",)).terms["critic"]

    assert_close(critic(batch), critic(clipped), rtol=0.0, atol=0.0)


ENDLESS = spaces.Box(-np.inf, np.inf, (2,))
REFUSED = [
    (CQL, "cql", spaces.Discrete(2), {}, "^algo: cql needs continuous actions .* algo=discrete_cql supports"),
    (CQL, "cql", ENDLESS, {}, "^algo: cql needs continuous actions within bounds"),
    (
        CQL,
        "cql",
        testing.box(1),
        {"conservative_weight": 0, "lagrangian_thresh": 1.0},
        r"^algo\.conservative_weight: 0 cannot grow",
    ),
    (DQN, "discrete_cql", testing.box(1), {}, "^algo: dqn needs one Discrete action"),
    (DDPG, "td3_bc", spaces.Discrete(2), {}, "^algo: needs continuous actions"),
    (DDPG, "td3", ENDLESS, {}, r"^algo: needs continuous actions within bounds, .*algo=ppo"),
    (
        IQL,
        "iql",
        spaces.Discrete(2),
        {"expectile": 1.0},
        r"^algo\.expectile: 1\.0 should be greater than 0 and less than 1",
    ),
    (SAC, "sac", ENDLESS, {}, r"^algo: sac"),
    (SAC, "sac", spaces.Text(3), {}, r"^algo: sac"),
    (DQN, "dqn", spaces.MultiDiscrete([2, 3]), {}, r"dqn needs one Discrete action, but .*use algo=ppo"),
    (DQN, "dqn", spaces.MultiBinary(2), {}, r"dqn needs one Discrete action, but .*use algo=ppo"),
    (DQN, "dqn", spaces.Discrete(3), {"num_atoms": 51, "v_min": 1.0, "v_max": 1.0}, r"algo\.v_max: 1\.0 should be abo"),
]


@pytest.mark.parametrize(("cls", "name", "action", "changes", "said"), REFUSED)
def test_what_cannot_be_served(cls, name, action, changes, said):
    with pytest.raises(ConfigError, match=said):
        make(cls, name, testing.spec(3, action), **changes)


@pytest.mark.parametrize(("cls", "name"), [(SAC, "sac"), (DDPG, "td3")])
def test_a_memory_of_the_critics_alone_is_refused(cls, name):
    with pytest.raises(ConfigError, match=r"^model: has no recurrent state, but critic_model has"):
        make(cls, name, BOX, ["model=mlp", "model@critic_model=lstm"])
