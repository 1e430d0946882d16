import rlplug
import torch
from rlplug import testing

from rlplug_combined.buffer import Combined


def filled(steps, columns=3, **options):
    """Make a replay buffer of `steps` rows per column, where row i of column b contains `columns * i + b`."""
    needs = rlplug.Needs(data="windows", keys=("obs",), window=rlplug.Window(2))
    ctx = testing.context(needs=needs, num_envs=columns, rollout_length=4, batch_size=64)
    buffer = Combined(testing.config("buffer/combined", capacity=20 * columns, **options), ctx)
    for start in range(0, steps, 4):
        rows = torch.arange(columns * start, columns * (start + 5)).view(5, columns)
        valid = rows // columns % 7 != 6  # every seventh row is a final observation
        valid[-1] = False
        buffer.add(rlplug.Segment({"obs": rows, "valid": valid}))
    return buffer


def test_the_newest_are_in_every_sample_and_the_others_anywhere():
    buffer = filled(40, newest=8)
    sample = buffer.sample()
    first = sample["obs"][0]
    assert (sample["obs"].diff(dim=0) == 3).all()
    assert torch.equal(sample["index"], first)
    assert set((first[:8] // 3).tolist()) == {38}  # windows of two transitions; row 40 is open
    starts = {row for row in range(20, 39) if row % 7 != 6}
    assert set((torch.cat([buffer.sample()["obs"][0, 8:] for _ in range(20)]) // 3).tolist()) == starts
    assert len(buffer) == 3 * len(starts)


def test_the_newest_window_does_not_begin_with_a_final_observation():
    assert set((filled(36, newest=64).sample()["obs"][0] // 3).tolist()) == {33}  # row 34 is one


def test_probabilities_are_those_of_the_draws():
    buffer = filled(40, columns=1, newest=16)
    samples = [buffer.sample() for _ in range(100)]
    row, prob = (torch.cat([sample[key] for sample in samples]) for key in ("index", "sample_prob"))
    drawn = torch.bincount(row).float() / len(row)
    for start in row.unique():
        torch.testing.assert_close(
            prob[row == start], drawn[start].expand(int((row == start).sum())), atol=0.015, rtol=0
        )


def test_without_newest_ones_it_is_a_uniform_replay():
    buffer = filled(40, newest=0)
    assert torch.allclose(buffer.sample()["sample_prob"], torch.tensor(1 / len(buffer)))
