"""``spread_torch`` against MPE2's ``simple_spread_v3``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpe2 import simple_spread_v3

from rlplug.plugins.env.teams import SimpleSpread


def state_of(world) -> dict[str, torch.Tensor]:
    agents, landmarks = world.agents, world.landmarks
    found = {
        "position": [one.state.p_pos for one in agents],
        "velocity": [one.state.p_vel for one in agents],
        "landmark": [one.state.p_pos for one in landmarks],
    }
    return {key: torch.from_numpy(np.array(rows))[None] for key, rows in found.items()}


@pytest.mark.parametrize(("agents", "local_ratio"), [(3, 0.5), (2, 0.25)])
def test_steps_and_rewards_are_those_of_mpe2(agents, local_ratio):
    theirs = simple_spread_v3.parallel_env(N=agents, local_ratio=local_ratio, max_cycles=200)
    theirs.reset(seed=1)
    world, game, rng = theirs.unwrapped.world, SimpleSpread(agents, local_ratio), np.random.default_rng(0)
    for one in world.agents:
        one.state.p_pos = rng.uniform(-0.3, 0.3, 2)  # close together: they collide
    state, collided = state_of(world), 0
    for _ in range(200):
        action = rng.integers(5, size=agents)
        obs, reward, *_ = theirs.step({f"agent_{i}": int(a) for i, a in enumerate(action)})
        state, result = game.move(state, torch.from_numpy(action)[None])
        row = game.row(state)
        names = list(reward)
        np.testing.assert_allclose(row["obs"][0], np.stack([obs[name] for name in names]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result["reward"][0], [reward[name] for name in names], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(row["state"][0], theirs.state(), rtol=1e-5, atol=1e-5)
        collided += len({*reward.values()}) > 1
    assert collided > 3 or agents == 2
