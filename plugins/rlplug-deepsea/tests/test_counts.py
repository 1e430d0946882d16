import rlplug
import torch
from rlplug import testing

from rlplug_deepsea.exploration import Counts


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
