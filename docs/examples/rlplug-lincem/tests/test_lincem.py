import pytest
import rlplug
import torch
from gymnasium import spaces
from rlplug import testing

from rlplug_lincem.algo import Cem


def build(action=2, **options):
    """Build the algorithm for observations `[3]` in four environments, without a run."""
    ctx = testing.context(testing.spec(obs=3, action=action), num_envs=4)
    return Cem(testing.config("algo/lincem", **options), ctx)


def test_the_elite_says_what_the_next_mean_and_deviation_are():
    algo = build(elite_share=0.5, extra_std=3.0)
    theta = torch.arange(4.0)[:, None].expand(4, 8)
    reward = torch.tensor([[9.0, 1.0, 1.0, 0.0], [9.0, 2.0, 3.0, 1.0], [9.0, 9.0, 9.0, 9.0]])
    valid = torch.tensor([[False, True, True, True], [False, True, True, True], [False] * 4])
    losses = algo.update({"reward": reward, "valid": valid, "theta": theta.expand(3, 4, 8)}, None)
    assert algo.mean.tolist() == [1.5] * 8  # returns are 0, 3, 4, 1
    torch.testing.assert_close(algo.std, torch.full((8,), (0.25 + 9.0) ** 0.5))
    assert losses.metrics["return"] == 2.0


def test_an_episode_is_played_by_the_weights_that_it_began_with():
    algo, first = build(), torch.tensor([True, True, True, True])
    step = {"obs": torch.ones(4, 3), "is_first": first}
    out, carry = algo.act(step, algo.initial_carry(4), "explore")
    assert len(out["theta"].unique(dim=0)) == 4
    step["is_first"] = torch.tensor([False, True, False, False])
    after, _ = algo.act(step, carry, "explore")
    assert (after["theta"] == out["theta"]).all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize(("action", "expected"), [(2, [0, 1]), (testing.box(1), [[-0.964], [0.964]])])
def test_the_policy_is_linear(action, expected):
    algo = build(action)
    algo.mean.view(4, -1)[:, -1] = torch.tensor([0.0, 1.0, 0.0, 2.0])  # the last output is x_1 + 2
    step = {"obs": torch.tensor([[5.0, -4.0, 5.0], [5.0, 0.0, 5.0]]), "is_first": torch.tensor([True, True])}
    action = algo.act(step, algo.initial_carry(2), "greedy")[0]["action"]
    torch.testing.assert_close(action, torch.tensor(expected), atol=1e-3, rtol=0)


def test_actions_that_it_cannot_choose_are_refused():
    spec = testing.spec(action=spaces.MultiBinary(3))
    with pytest.raises(rlplug.ConfigError, match="algo: lincem cannot choose actions of MultiBinary"):
        Cem.needs(testing.config("algo/lincem"), spec)


@pytest.mark.slow
def test_it_balances_the_pole(tmp_path):
    for seed in (1, 2):
        words = ["algo=lincem", f"seed={seed}", "logger.only=[]", f"hydra.run.dir={tmp_path / str(seed)}"]
        assert rlplug.train(words) == 500


def test_it_begins_to_balance_the_pole(tmp_path):
    """A random policy balances the pole for 22 steps."""
    words = [
        "algo=lincem",
        "total_steps=8_000",
        "train_batch_size=32",
        "eval.every=0",
        "eval.episodes=5",
        "logger.only=[]",
    ]
    assert rlplug.train([*words, f"hydra.run.dir={tmp_path}"]) > 100
