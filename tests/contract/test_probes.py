"""Probes: what is said to be exact in them is, and recordings of them are whole."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from rlplug.testing import probes
from rlplug.testing.probes import PROBES
from rlplug.testing.probes.trying import Found, _settled, record
from rlplug.testing.probes.worlds import make


def play(name, kind, best, episodes, cut=150):
    """Return the discounted returns from the first visit of every state on, in episodes of the best actions, or random
    ones; what is truncated goes on, up to ``cut`` steps."""
    probe, dice, found = PROBES[name], np.random.default_rng(0), {}
    right = probe.target if kind == "box" and probe.target else probe.best
    env = make(name, kind)
    for episode in range(episodes):
        obs, info = env.reset(seed=episode)
        seen, states, rewards, terminated = [obs], [], [], False
        while not terminated and len(rewards) < cut:
            states.append(int(probe.label(np.array(seen)[:, None])[-1, 0]))
            allowed = np.flatnonzero(info["action_mask"]) if probe.mask else np.arange(probe.choices)
            knows = best and states[-1] in right
            if kind == "discrete":
                action = int(right[states[-1]] if knows else dice.choice(allowed))
            else:
                number = right[states[-1]] if knows else dice.uniform(-1, 1)
                action = np.array([number if probe.target or not knows else 2.0 * number - 1.0], np.float32)
            obs, reward, terminated, truncated, info = env.step(action)
            rewards.append(reward)
            seen.append(obs)
            if truncated:
                env.left = cut
        total, returns = 0.0, {}
        for state, reward in zip(reversed(states), reversed(rewards), strict=True):
            returns[state] = total = reward + probe.gamma * total
        for state, total in returns.items():
            found.setdefault(state, []).append(total)
    return found


@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if probe.values])
def test_values_are_those_of_the_best_actions(name):
    for kind in PROBES[name].kinds:
        found = play(name, kind, best=True, episodes=20 if name in ("absorbing", "ends") else 1000)
        for state, value in PROBES[name].values.items():
            assert np.mean(found[state]) == pytest.approx(value, abs=0.12), (kind, state)


@pytest.mark.parametrize("name", [name for name, probe in PROBES.items() if probe.best or probe.target])
def test_the_best_actions_pay_more_than_random_ones(name):
    for kind in PROBES[name].kinds:
        best, random = (play(name, kind, how, 400) for how in (True, False))
        right = PROBES[name].target if kind == "box" and PROBES[name].target else PROBES[name].best
        assert all(np.mean(best[state]) > np.mean(random[state]) + 0.2 for state in right)


def test_recordings_have_what_follows_every_step():
    for probe in PROBES.values():
        rows = record(probe, probe.kinds[-1], random=0.5)
        going = ~(rows["terminals"] | rows["timeouts"])
        going[-1] = False
        assert np.array_equal(rows["next_observations"][going], rows["observations"][1:][going[:-1]])
        assert len({len(column) for column in rows.values()}) == 1
        assert ("action_mask" in rows) == probe.mask


SERVED = {
    "dqn": "absorbing ends split delayed masked cue bandit rare",
    "ppo": "absorbing ends split delayed masked cue bandit rare target",
    "impala": "absorbing ends split delayed masked cue bandit rare stale target",
    "td3": "absorbing ends split delayed cue rare target",
    "cql": "absorbing ends split delayed rare target",
    "iql": "absorbing ends split delayed masked bandit rare target",
    "bc": "delayed masked cue bandit target",
    "linucb": "bandit",
}


@pytest.mark.parametrize("algorithm", SERVED)
def test_who_serves_what_follows_from_spaces_and_needs(algorithm):
    assert SERVED[algorithm].split() == [name for name, x in PROBES.items() if probes.kind_of(algorithm, x)]


def test_settings_of_a_manifest_and_of_the_caller_count_more():
    from rlplug.testing.probes.trying import _config

    words = ("algo.lr=0.5", "num_envs=3", "env=pendulum", "model.hidden=[7]")
    config = _config("ppo", PROBES["ends"], "discrete", words)
    assert (config.raw["algo"]["lr"], config.raw["num_envs"], config.raw["model"]["hidden"]) == (0.5, 3, [7])
    assert (config.raw["algo"]["gamma"], config.raw["env"]["id"]) == (0.9, probes.trying.ID)


def test_a_value_that_passes_by_is_not_taken_for_one_that_stays():
    """Termination ignored: the value passes 1, which is exact, on its way to 10."""
    probe = PROBES["ends"]

    def looks(*values):
        found = [abs(x - 1.0) / probe.tolerance for x in values]
        return [Found({0: 0.0}, {}, ["far"] if x > 1 else [], 1000 + i, x) for i, x in enumerate(found)]

    assert not _settled(looks(0.5), 500)
    assert not _settled(looks(0.0, 1.0), 500)
    assert not _settled(looks(0.0, 1.0, 2.5), 500) or looks(0.0, 1.0, 2.5)[-1].wrong
    assert _settled(looks(0.9, 1.1), 500)
    assert _settled(looks(9.0, 9.9, 10.0), 500)


def test_a_learner_that_knows_nothing_is_told_what_is_exact():
    with pytest.raises(AssertionError, match=r"probe 'ends' .*the value of state 1 is -?\d\.\d\d, but 10 is exact"):
        probes.check_probe("ppo", PROBES["ends"], "discrete", ["algo.lr=0.0"])


def test_environments_keep_to_their_space():
    for name, probe in PROBES.items():
        for kind in probe.kinds:
            with closing(make(name, kind)) as env:
                obs, _ = env.reset(seed=0)
                assert env.observation_space.contains(obs)
                with pytest.raises(ValueError, match="outside of"):
                    env.step(99 if kind == "discrete" else np.array([2.0], np.float32))
