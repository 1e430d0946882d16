"""What ranks hold of a run's data, and what they agree on after a round."""

import signal

import pytest
import torch

from rlplug.distributed.collectives import Collectives
from rlplug.distributed.fabric import AnyFabric, one_rank
from rlplug.testing.rank_pool import Ranks, ranks
from rlplug.trainer.agreement import Agreement
from rlplug.trainer.placement import Placement


def held(fabric: AnyFabric, replicated: bool):
    """The share of five items of this rank's part, and what comes of this rank's number, a row and a column."""
    place, rank = Placement(Collectives(fabric), replicated), fabric.global_rank
    row, column = torch.tensor([rank]), torch.tensor([[rank], [10 + rank]])
    merged = place.merge({"row": row, "column": column})
    return (
        (place.collects, [*range(5)][place.share(5)], place.exchange(rank), place.gather(row).tolist()),
        (merged["row"].tolist(), merged["column"].tolist()),
    )


def test_every_rank_has_its_part():
    first, second = ranks(2)(held, False)
    assert first == ((True, [0, 1], [0, 1], [0, 1]), ([0], [[0], [10]]))
    assert second == ((True, [2, 3, 4], [0, 1], [0, 1]), ([1], [[1], [11]]))


def test_all_ranks_have_the_same_and_learn_from_shares_of_it():
    first, second = ranks(2)(held, True)
    assert first == ((True, [0, 1, 2, 3, 4], [0], [0]), ([0, 1], [[0, 1], [10, 11]]))
    assert second == ((False, [0, 1, 2, 3, 4], [1], [1]), ([0, 1], [[0, 1], [10, 11]]))


def test_one_rank_has_all():
    assert held(one_rank(), False) == ((True, [0, 1, 2, 3, 4], [0], [0]), ([0], [[0], [10]]))


def agreed(fabric: AnyFabric, replicated: bool):
    """The steps of a round of three on each rank, whether they save, and what they stop with as the last is asked."""
    first, last = fabric.global_rank == 0, fabric.global_rank == fabric.world_size - 1
    agreement = Agreement(Placement(Collectives(fabric), replicated), lambda: first, [])
    before = agreement.reach(3), agreement.may_save, agreement.stop
    if last:
        agreement.request_stop(signal.SIGINT)
    agreement.conclude()  # they have agreed on this round already
    meanwhile = agreement.stop
    agreement.conclude()
    return before, meanwhile, agreement.stop


@pytest.mark.parametrize(("replicated", "steps"), [(False, 6), (True, 3)])
def test_ranks_stop_in_the_same_round(replicated: bool, steps: int):
    assert ranks(2)(agreed, replicated) == [((steps, True, 0), 0, signal.SIGINT)] * 2


def test_one_rank_agrees_with_itself_at_once():
    assert agreed(one_rank(), False) == ((3, True, 0), signal.SIGINT, signal.SIGINT)


def reduced(fabric: AnyFabric, op: str):
    """A reduction of rows of which the second rank has none that counts."""
    collectives, x = Collectives(fabric), torch.tensor([[1.0, -4.0], [3.0, 8.0]])
    where = torch.tensor([True, fabric.global_rank == 0])
    return float(collectives.reduce(x - fabric.global_rank * 2, op, where))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["mean", "std", "sum", "max", "min"])
def test_reductions_are_those_of_all_rows(op: str):
    rows = torch.tensor([1.0, -4.0, 3.0, 8.0, -1.0, -6.0])
    expected = rows.std(correction=0) if op == "std" else getattr(rows, op)()
    assert ranks(2)(reduced, op) == [pytest.approx(float(expected))] * 2


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
