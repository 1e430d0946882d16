"""CartPole's vector is gymnasium's own, to the bit."""

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlplug.envs.cartpole import FEW, CartPoleVector
from rlplug.envs.making import find, make_native


@pytest.mark.parametrize("n", [1, 8, FEW + 1])
def test_cartpole_steps_as_gymnasiums(n: int) -> None:
    ours, theirs = CartPoleVector(n, max_episode_steps=20), CartPoleVectorEnv(n, max_episode_steps=20)
    np.testing.assert_array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    rng, terminated, truncated = np.random.default_rng(0), 0, 0
    for t in range(300):
        action = rng.integers(2, size=n) if t % 100 < 50 else np.full(n, t % 2)  # balances for 20 steps
        mine, own = ours.step(action), theirs.step(action)
        for a, b in zip(mine[:4], own[:4], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        for name in ("state", "steps", "prev_done"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        terminated, truncated = terminated + mine[2].sum(), truncated + mine[3].sum()
    assert terminated
    assert truncated


def test_the_faster_vector_is_taken_and_its_options_are_served() -> None:
    env = make_native(find("CartPole-v1"), 2, {"sutton_barto_reward": True})
    try:
        assert isinstance(env.env.unwrapped, CartPoleVector)
        env.reset([0, 1])
        rewards = [env.step(np.ones(2, np.int64))["reward"] for _ in range(12)]
        assert np.min(rewards) == -1.0
    finally:
        env.close()
