"""Means of metrics over an interval, which a checkpoint keeps."""

from __future__ import annotations

import pytest
import torch

from rlplug.trainer.metrics import Means


def test_means_are_those_of_all_values_since_the_last_row():
    means, resumed = Means(), Means()
    for value in (1.0, 2.0, 6.0, torch.inf):
        means.add({"loss": torch.tensor(value), "kl": torch.tensor(0.5)}, finite=True)
    resumed.load(means.state())
    assert means.drain() == resumed.drain() == {"loss": 3.0, "kl": 0.5}
    assert means.drain() == {}


@pytest.mark.parametrize("values", [torch.tensor(1.0), torch.zeros(3, 0, 2), torch.zeros(2, 2)])
def test_values_of_another_shape_are_refused(values: torch.Tensor):
    with pytest.raises(ValueError, match=r"the values of loss should have the shape \[n\], and are a tensor of shape"):
        Means().load({"loss": values})
