"""Ape-X on DQN and on DDPG: first priorities of the actors, noise by environment, and exactness in one process.

Over actors: tests/contract/tenants/test_asynchronous.py. Parts of the replay: test_buffers.py.
"""

from __future__ import annotations

import copy
import csv

import pytest
import torch
from torch.testing import assert_close

from rlplug import testing, tree
from rlplug.config import compose
from rlplug.functional.sequences import n_step_transitions
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.exploration.discrete import EpsilonGreedy
from rlplug.plugins.exploration.noise import Gaussian, OrnsteinUhlenbeck
from rlplug.registry import hookimpl
from rlplug.run.launch import train
from rlplug.run.measure import least_exploring
from rlplug.testing.checks.runs import Case, play
from tests.plugins.acting import T, segment

SMALL = (
    *("tuned=none", "hardware=cpu", "model.hidden=[16]", "rollout_fragment_length=8", "train_batch_size=16"),
    *("replay_ratio=0.0625", "num_steps_sampled_before_learning_starts=64", "num_envs=4"),
)
RUNS = {
    "apex_dqn": ("cartpole", (*SMALL, "algo.hiddens=[16]", "buffer.capacity=400")),
    "apex_ddpg": ("pendulum", (*SMALL, "buffer.capacity=400")),
}


def make(name: str, **changes) -> DQN | DDPG:
    torch.manual_seed(0)
    spec = testing.spec(3, 3 if name == "apex_dqn" else testing.box(2))
    cfg, cls = testing.config(f"algo/{name}", **changes), {"apex_dqn": DQN, "apex_ddpg": DDPG}[name]
    ctx = testing.context(spec, overrides=[f"algo={name}", "model.hidden=[8]"], needs=cls.needs(cfg, spec))
    return cls(cfg, ctx)


# ---- first priorities ------------------------------------------------------------------------------------------------

ALGORITHMS = [
    ("apex_dqn", {}),
    ("apex_dqn", {"n_step": 1}),
    ("apex_dqn", {"double_q": False, "num_atoms": 5, "v_min": -2.0, "v_max": 9.0}),
    ("apex_dqn", {"value_rescaling": 1e-3, "noisy": True, "n_step": 5}),
    ("apex_ddpg", {}),
    ("apex_ddpg", {"twin_q": True, "n_step": 2}),
]


@pytest.mark.parametrize(("name", "changes"), ALGORITHMS)
def test_they_are_what_the_learner_would_feed_back_if_its_targets_were_the_acting_networks(name, changes):
    algorithm = make(name, **changes)
    batch, n = segment(algorithm), algorithm.cfg.n_step
    if changes.get("noisy"):  # the learner draws other noise; the actor's priorities have none
        for layer in (*algorithm.online.noisy, *algorithm.target.noisy):
            layer.noise_in.zero_(), layer.noise_out.zero_()
        algorithm.prepare = lambda batch: n_step_transitions(batch, algorithm.cfg.gamma)
    with torch.no_grad():
        first = algorithm.initial_priorities(batch)
        assert first.shape == (T, 4)
        for t in range(T - n + 1):
            window = algorithm.prepare(tree.map(lambda x, t=t: x[t : t + n + 1], batch))
            wanted = algorithm.forward(window, ["critic"]).feedback["priority"]
            valid = batch["valid"][t]
            assert_close(first[t][valid], wanted[valid])


def test_the_last_rows_of_a_segment_look_less_far_ahead():
    algorithm = make("apex_dqn", n_step=3, gamma=0.5)
    batch = segment(algorithm)
    with torch.no_grad():
        q, _ = algorithm.online(batch, {}, noisy=False)
        last, before = batch["reward"][T - 1], batch["reward"][T - 2] + 0.5 * batch["reward"][T - 1]
        for t, folded, power in ((T - 1, last, 0.5), (T - 2, before, 0.25)):
            chosen = q[t].gather(-1, batch["action"][t][:, None])[:, 0]
            wanted = (folded + power * q[T].amax(-1) - chosen).abs()
            assert_close(algorithm.initial_priorities(batch)[t], wanted)


def test_an_action_that_is_not_allowed_bootstraps_nothing():
    algorithm = make("apex_dqn", n_step=1, gamma=1.0)
    mask = torch.ones(T + 1, 4, 3, dtype=torch.bool)
    mask[..., 1:] = False
    batch = segment(algorithm, mask)
    with torch.no_grad():
        q, _ = algorithm.online(batch, {}, noisy=False)
        first = algorithm.initial_priorities(batch)
    goes_on = batch["valid"][:-1] & ~batch["terminated"][:-1]
    wanted = (batch["reward"][:-1] + q[1:, :, 0] - q[:-1, :, 0]).abs()
    assert_close(first[goes_on], wanted[goes_on])


class Again:
    """A hook that computes first priorities once more, as segments arrive, by the weights of their version."""

    def __init__(self):
        self.weights, self.ages = {}, set()

    @hookimpl
    def rlplug_collected(self, run, segment):
        self.ages.add(run.progress.updates - segment.version)
        if segment.version not in self.weights:
            version, weights = run.collector._weights
            assert weights is None or version == segment.version
            self.weights[segment.version] = copy.deepcopy(run.algorithm)
            self.weights[segment.version].load_state_dict(weights or {}, strict=False)
        with torch.inference_mode():
            batch = run.policy.normalizer.normalized(segment.batch)
            first = self.weights[segment.version].initial_priorities(batch)
        assert torch.equal(segment.batch["priority"][:-1], torch.where(batch["valid"][:-1], first, 0.0))


WAYS = {
    "older weights": ("loop.in_flight=1",),
    "as the learner sees them": (
        *("loop=alternate", "preprocess.normalize_obs=true"),
        *("preprocess.scale_reward=3.0", "preprocess.clip_reward=1.0"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RUNS)
def test_they_are_computed_where_rows_are_played(name, way):
    """By the weights that played them. The learner sees other rewards and observations than the buffer keeps."""
    env, words = RUNS[name]
    trainer, again = Case(name, env, (*words, *WAYS[way])).build(), Again()
    play(trainer, updates=20, also=again)
    trainer.close()
    assert max(again.ages) > 2 if way == "older weights" else again.ages == {0}


@pytest.mark.parametrize("name", RUNS)
def test_a_memory_goes_on_from_where_the_segment_began(name):
    env, words = RUNS[name]
    short = ("algo.sequence_length=4", "algo.burn_in=2", "algo.stride=2", "loop=alternate")
    words = [word for word in words if not word.startswith("model.")]
    words = (*words, "model=lstm", "model.hidden=8", "model.torso.hidden=[8]", "buffer=sequence", *short)
    trainer, again = Case(name, env, words).build(), Again()
    record = play(trainer, updates=6, also=again)
    trainer.close()
    carry = record.segment["carry"]
    without = tree.map(torch.zeros_like, carry)
    with torch.inference_mode():
        first, other = (trainer.algorithm.initial_priorities(record.segment | {"carry": x}) for x in (carry, without))
    assert not torch.allclose(first[0], other[0])


# ---- who explores how much -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "size"), [(Gaussian, "std"), (OrnsteinUhlenbeck, "sigma")])
def test_noise_falls_geometrically_over_the_environments(cls, size):
    name = {"std": "gaussian", "sigma": "ornstein_uhlenbeck"}[size]
    ctx = testing.context(testing.spec(3, testing.box(2)), num_envs=3)
    extra = cls(testing.config(f"exploration/{name}", **{size: 0.4, "ape_x_ratio": 0.01}), ctx)
    assert_close(extra.noise_by_env(), torch.tensor([0.4, 0.04, 0.004]))
    again = cls(testing.config(f"exploration/{name}", **{size: 0.4}), ctx)
    assert again.noise_by_env() is None
    actions = []
    for noise in (extra, again):
        ctx.generators["learner"].manual_seed(1)
        out, _ = noise.perturb(
            {"action": torch.zeros(3, 2)}, {"is_first": torch.ones(3, dtype=torch.bool)}, noise.initial_carry(3)
        )
        actions.append(out["action"])
    assert_close(actions[0], actions[1] * torch.tensor([[1.0], [0.1], [0.01]]))


@pytest.mark.parametrize(("num_envs", "least"), [(2, {1}), (4, {2, 3}), (9, {6, 7, 8})])
def test_the_least_exploring_are_a_third_of_the_environments(num_envs, least):
    ctx = testing.context(testing.spec(3, 2), num_envs=num_envs)
    exploration = testing.config("exploration/ape_x_epsilon_greedy")
    assert least_exploring([EpsilonGreedy(exploration, ctx)]) == least
    alike = testing.config("exploration/epsilon_greedy")
    assert least_exploring([EpsilonGreedy(alike, ctx)]) == set()


def test_their_returns_are_logged(tmp_path):
    """Every environment is its own: the one that hardly explores always does the same, and soon falls."""
    env, words = RUNS["apex_dqn"]
    words = [*words, "algo=apex_dqn", f"env={env}", "algo.lr=0.0", "exploration.ape_x_epsilon_greedy.epsilon=0.8"]
    words += ["total_steps=2000", "num_steps_sampled_before_learning_starts=16", "eval.every=0", "eval.episodes=1"]
    train(compose([*words, "log.every=2000", "logger=[]"]), tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["episode/return"]]
    all_of_them, least = (float(rows[-1][f"episode/return{end}"]) for end in ("", "_least_exploring"))
    assert least < 12 < all_of_them
