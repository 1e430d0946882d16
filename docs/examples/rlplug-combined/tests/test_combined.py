import rlplug
import torch
from rlplug import testing

from rlplug_combined.buffer import Combined


def test_windows_hold_rows_that_follow_one_another():
    needs = rlplug.Needs(data="windows", keys=("obs", "action"), window=2)
    ctx = testing.context(needs=needs, num_envs=3, rollout_length=4, batch_size=64)
    buffer = Combined(testing.config("buffer/combined", capacity=60, recent=9), ctx)
    for start in range(0, 40, 4):  # row i of column b says 3 i + b
        rows = torch.arange(3 * start, 3 * (start + 5)).view(5, 3)
        valid = torch.ones(5, 3, dtype=torch.bool)
        valid[-1] = False
        buffer.add(rlplug.Segment({"obs": rows, "valid": valid}))
    sample = buffer.sample()
    assert sample["obs"].shape == (3, 64)
    assert (sample["obs"].diff(dim=0) == 3).all()
    assert torch.equal(sample["index"], sample["obs"][0])
    assert sample["obs"][0].min() >= 3 * 30  # windows begin with rows 30 to 38 of a column, and row 40 is open
    assert len(buffer) == 3 * 9
