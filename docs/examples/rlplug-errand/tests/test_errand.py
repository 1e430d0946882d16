import torch

from rlplug_errand.env import ErrandGame

GAME = ErrandGame(size=5, lasts=3, device=torch.device("cpu"))


def step(state, cell, move):
    return GAME.move(state, {"manager": torch.tensor([cell]), "worker": torch.tensor([move])})


def test_a_choice_lasts_until_the_worker_arrives_or_time_is_over():
    state = GAME.initial(torch.zeros(1, 6)) | {"parcel": torch.tensor([[4, 4]]), "door": torch.tensor([[4, 0]])}
    row = GAME.row(state)
    assert row["manager"]["action_mask"].all()
    assert row["worker"]["action_mask"].tolist() == [[True, False, False, False, False]]
    state, paid = step(state, cell=2, move=1)  # to (0, 2); the worker only waits
    assert state["worker"].tolist() == [[0, 0]]
    assert paid["worker"]["reward"].tolist() == [0.0]
    for _ in range(2):
        row = GAME.row(state)
        assert row["manager"]["action_mask"].nonzero().tolist() == [[0, 2]]
        assert row["worker"]["action_mask"].all()
        state, paid = step(state, cell=2, move=1)
    assert paid["worker"]["reward"].item() > 0.9  # arrived after two steps
    assert GAME.row(state)["manager"]["action_mask"].all()
    state, _ = step(state, cell=24, move=0)
    for left in (3, 2, 1):
        assert state["left"].item() == left
        state, _ = step(state, cell=24, move=2)
    assert GAME.row(state)["manager"]["action_mask"].all()  # it did not arrive


def test_the_manager_is_paid_at_the_door_with_the_parcel_only():
    state = GAME.initial(torch.zeros(1, 6)) | {"parcel": torch.tensor([[0, 1]]), "door": torch.tensor([[0, 2]])}
    state = state | {"worker": torch.tensor([[0, 3]])}
    state, _ = step(state, cell=1, move=0)
    state, paid = step(state, cell=1, move=2)  # at the door without the parcel
    assert not paid["manager"]["terminated"].item()
    state, paid = step(state, cell=1, move=2)
    assert state["carried"].item()
    assert not state["over"].item()
    state, _ = step(state, cell=2, move=0)
    state, paid = step(state, cell=2, move=1)
    assert paid["manager"] == {"reward": torch.tensor([1.0]), "terminated": torch.tensor([True])}
    assert not GAME.row(state)["manager"]["alive"].item()
