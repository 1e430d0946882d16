"""Actors play tasks with weights of their own: the update is that of one process, to the bit."""

from __future__ import annotations

import pytest
import torch

from rlplug.config import compose
from tests.actors.conftest import TWO
from tests.plugins import test_mbmpo
from tests.plugins.test_maml import SMALL, updated


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("small", [SMALL, test_mbmpo.SMALL], ids=["maml", "mbmpo"])
def test_two_actors_make_the_update_of_one_process(small):
    words = (*small, "num_envs=2")
    alone, both = updated(None, compose([*words]).raw), updated(None, compose([*words, *TWO]).raw)
    assert alone[1:] == both[1:]
    assert all(torch.equal(x, both[0][key]) for key, x in alone[0].items())
