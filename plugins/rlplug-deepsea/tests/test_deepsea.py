from pathlib import Path

import numpy as np
import pytest
import rlplug
import torch
from rlplug import testing

from rlplug_deepsea.env import DeepSea
from rlplug_deepsea.exploration import Counts

PACKAGE = Path(__file__).parent.parent / "rlplug_deepsea"


def sea(columns=2, **options):
    return DeepSea(testing.config("env/deepsea", **options), testing.context(num_envs=columns))


def dive(env, right, length):
    """Return rewards and ends ``[length, B]`` of columns that move right where ``right [B]`` is true."""
    env.reset(range(len(right)))
    rows = []
    for _ in range(length):
        cell = np.minimum(env.row, env.cfg.size - 1), env.column
        rows.append(env.step(np.where(right, env.right[cell], 1 - env.right[cell])))
    return [np.stack([row[key] for row in rows]) for key in ("reward", "terminated", "obs")]


def test_always_right_finds_the_treasure_and_never_right_costs_nothing():
    reward, ended, obs = dive(sea(size=5), np.array([True, False]), 5)
    assert reward.sum(0) == pytest.approx([0.99, 0.0])
    assert reward[:, 0] == pytest.approx([-0.002] * 4 + [0.998])
    assert ended.tolist() == [[False, False]] * 4 + [[True, True]]
    assert [divmod(int(row.argmax()), 5) for row in obs[:-1, 0]] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [divmod(int(row.argmax()), 5) for row in obs[:-1, 1]] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert not obs[-1].any()


def test_the_step_after_the_last_one_begins_anew():
    reward, ended, obs = dive(sea(size=3), np.array([True, True]), 4)
    assert (reward[3], ended[3]) == (pytest.approx([0.0, 0.0]), pytest.approx([False, False]))
    assert obs[3, :, 0, 0].tolist() == [1.0, 1.0]


def test_the_mapping_is_drawn_from_its_seed():
    one, same, other = sea(mapping_seed=1), sea(mapping_seed=1), sea(mapping_seed=2)
    assert (one.right == same.right).all()
    assert 0.2 < (one.right != other.right).mean() < 0.8


def test_a_slip_drifts_to_the_left_and_costs_what_was_tried():
    reward, _, obs = dive(sea(columns=2000, size=2, slip=0.25), np.ones(2000, bool), 2)
    assert obs[0, :, 1, 1].mean() == pytest.approx(0.75, abs=0.04)
    assert (reward[1] > 0.5).mean() == pytest.approx(0.75**2, abs=0.04)
    assert reward[0] == pytest.approx(-0.005)


def test_counting_finds_the_treasure_and_chance_does_not(tmp_path, monkeypatch):
    """Random dives of 10 steps find it with probability 1/1024, and PPO first learns to avoid the cost."""
    monkeypatch.chdir(tmp_path)
    run = ["algo=ppo", "env=deepsea", "total_steps=20_000", "seed=1", "logger=[]", "eval.every=0", "hardware=cpu"]
    assert rlplug.train([*run, "hydra.run.dir=with"]) > 0.9
    assert rlplug.train([*run, "hydra.run.dir=without", "exploration=[]"]) < 0.1


def test_the_package_is_small():
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml")]
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert len(files) == 6
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) < 150


def segment():
    """Return rows of a walk over 3 places, in two columns; column 1 has a final observation in row 2."""
    obs = torch.eye(3)[torch.tensor([[0, 0], [1, 1], [1, 1], [2, 0], [2, 1]])]
    valid = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
    return {"obs": obs, "valid": valid}


class Alone:
    def gather(self, x):
        return x


def test_the_bonus_is_beta_over_the_root_of_the_visits():
    """To place 0: none; 1: rows 0 to 1 twice, 1 to 2 twice, 3 to 4 once; 2: twice."""
    counts = Counts(testing.config("exploration/counts", beta=0.5), testing.context(testing.spec(3)))
    counts.observe(rlplug.Segment(segment()), Alone())
    assert sorted(counts.visits[counts.visits > 0].tolist()) == [2, 5]
    one, two = 0.5 / 5**0.5, 0.5 / 2**0.5
    expected = torch.tensor([[one, one], [one, one], [two, 0.0], [two, one], [0.0, 0.0]])
    torch.testing.assert_close(counts.intrinsic_reward(segment()), expected)


def test_what_was_never_seen_has_the_full_bonus():
    counts = Counts(testing.config("exploration/counts", beta=0.5), testing.context(testing.spec(3)))
    assert counts.intrinsic_reward(segment())[0].tolist() == [0.5, 0.5]
