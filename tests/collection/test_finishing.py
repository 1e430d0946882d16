"""What becomes of a segment before it leaves where it was collected, and how outputs of a device come to the host."""

import numpy as np
import pytest
import torch

from rlplug import testing, tree
from rlplug.api import Algorithm, Needs
from rlplug.collection.finishing import finished, transforms
from rlplug.host import OneCopy

SPEC = testing.spec(2, 2)


class Ranked(Algorithm):
    """Gives every valid row the priority of its doubled reward."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def postprocess(self, data):
        own = {"priority": torch.full_like(data["reward"], 7.0)} if self.own else {}
        return data | own | {"reward": 2 * data["reward"], "left": data["reward"]}

    def initial_priorities(self, batch):
        assert "left" not in batch
        return batch["reward"][:-1] + batch["obs"][:-1].sum(-1)


def segment():
    valid = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    ends = torch.zeros(3, 2).bool()
    rows = {"reward": torch.arange(6.0).view(3, 2), "obs": torch.ones(3, 2, 2), "action": torch.zeros(3, 2)}
    return rows | {"valid": valid, "is_first": ends, "terminated": ends, "truncated": ends}


@pytest.mark.parametrize("own", [False, True])
def test_initial_priorities_are_those_of_finished_rows_as_the_learner_sees_them(own):
    ctx = testing.context(SPEC, needs=Needs(keys=("obs", "priority")))
    scaled = transforms(Ranked(own), ctx, ctx.needs.keys, lambda batch: batch | {"obs": 10 * batch["obs"]})
    found = finished(segment(), scaled)
    assert found.keys() == {"obs", "reward", "valid", "is_first", "terminated", "truncated", "priority"}
    expected = torch.full((3, 2), 7.0) if own else torch.tensor([[20.0, 22.0], [24.0, 0.0], [0.0, 0.0]])
    assert torch.equal(found["priority"], expected)
    assert torch.equal(found["obs"], torch.ones(3, 2, 2)), "what is stored is raw"


def test_one_copy_brings_leaves_of_every_size():
    """A bool of three bytes in front of wider numbers: none of them has to be aligned."""
    copy, seen = OneCopy(), []
    for k in range(3):
        batch = {
            "mask": torch.tensor([True, False, k > 0]),
            "dist": {"mean": torch.randn(3, 2), "n": torch.arange(3) + k},
        }
        batch |= {"value": torch.randn(3, dtype=torch.float64)}
        found = copy.arrays(copy.packed(batch))
        for (path, x), (_, y) in zip(tree.items(batch), tree.items(found), strict=True):
            np.testing.assert_array_equal(x.numpy(), y, err_msg=str(path))
            assert y.dtype == x.numpy().dtype
        seen.append(found)
    assert seen[0]["dist"]["n"] is seen[2]["dist"]["n"], "the memory is written again"
    less = {"value": torch.ones(1)}
    np.testing.assert_array_equal(copy.arrays(copy.packed(less))["value"], [1.0])
