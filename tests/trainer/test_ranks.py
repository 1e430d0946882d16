"""Ranks that stay alive answer many calls, and report a failure."""

import pytest
import torch

from rlplug.testing.rank_pool import Ranks


def total(fabric, x):
    return fabric.all_reduce(torch.tensor(x + fabric.global_rank), reduce_op="sum")


def fails_on_the_last(fabric):
    if fabric.global_rank == fabric.world_size - 1:
        raise ValueError("this rank has no share")
    return total(fabric, 0.0)


def test_answers_and_a_failure():
    ranks = Ranks(2)
    assert [answer.item() for answer in ranks(total, 3.0)] == [7.0, 7.0]
    assert [answer.item() for answer in ranks(total, 4.0)] == [9.0, 9.0]
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:(.|\n)*ValueError: this rank has no share"):
        ranks(fails_on_the_last)
    for process in ranks.processes:
        process.join(10)
        assert process.exitcode is not None


def test_a_rank_that_never_answers_is_given_up():
    ranks = Ranks(2, patience=0.0)
    with pytest.raises(RuntimeError, match=r"only the ranks \[\] of 2 answered"):
        ranks(total, 1.0)
    for process in ranks.processes:
        process.join(10)
        assert process.exitcode is not None
