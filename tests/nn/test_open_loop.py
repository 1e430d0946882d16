"""What a world model imagines of recorded rows: states, errors up to the end of an episode, and pictures."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from rlplug.nn.open_loop import open_loop, open_loop_errors, open_loop_pictures
from rlplug.nn.rssm import Decoder, Size

ROWS, COLUMNS = 6, 8
SMALL = Size(deter=8, hidden=6, classes=3, depth=2, units=8)


def a_batch():
    is_first = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    is_first[4, 0] = True
    rows = {"prev_action": torch.arange(ROWS).expand(COLUMNS, ROWS).T, "is_first": is_first}
    return rows | {"obs": torch.randn(ROWS, COLUMNS, 3), "carry": {"deter": torch.full((1, COLUMNS, 1), 100.0)}}


def test_the_second_half_is_imagined_from_the_actions():
    def observe(rows, carry):
        assert len(rows["obs"]) == ROWS // 2
        return {"deter": carry["deter"] + rows["prev_action"].unsqueeze(-1), "stoch": rows["obs"][..., :1]}

    def imagine(deter, stoch, action):
        return deter + 10.0 * action, stoch

    batch = a_batch()
    deter, stoch = open_loop(observe, imagine, batch, batch["prev_action"].unsqueeze(-1).float())
    assert deter[:, 0, 0].tolist() == [100.0, 101.0, 102.0, 132.0, 172.0, 222.0]
    torch.testing.assert_close(stoch[3:], batch["obs"][2:3, :, :1].expand(3, -1, -1))


def test_errors_by_hand():
    """Rows 3 to 5 are imagined; column 0 begins another episode in row 4."""

    class Fixed:
        def loss(self, deter, stoch, obs):
            return {"vector": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).float()}

    batch = a_batch() | {"reward": torch.zeros(ROWS, COLUMNS)}
    errors = open_loop_errors(Fixed(), (None, None), torch.full((ROWS, COLUMNS), 3.0), batch)
    counted = [row * COLUMNS + column for row in (3, 4, 5) for column in range(COLUMNS) if row < 4 or column]
    torch.testing.assert_close(errors["open_loop_vector"], torch.tensor(np.mean(counted), dtype=torch.float32))
    torch.testing.assert_close(errors["open_loop_reward"], torch.tensor(9.0))


def test_pictures_show_real_above_imagined_images():
    torch.manual_seed(0)
    space = spaces.Dict({"eye": spaces.Box(0, 255, (16, 20, 1), np.uint8), "way": spaces.Discrete(2)})
    decoder = Decoder(space, SMALL, torch.tanh)
    deter, stoch = torch.randn(ROWS, COLUMNS, 8), torch.randn(ROWS, COLUMNS, 32 * 3)
    eye = torch.randint(256, (ROWS, COLUMNS, 16, 20, 1)).byte()
    obs = {"eye": eye, "way": torch.zeros(ROWS, COLUMNS, dtype=torch.long)}
    with torch.no_grad():
        shown = open_loop_pictures(decoder, (deter, stoch), obs)
        images = decoder(deter, stoch)[0].view(ROWS, COLUMNS, 16, 20)
    assert shown.shape == (ROWS, 3 * 16, 6 * 20, 3)
    assert shown.dtype == torch.uint8
    assert torch.equal(shown[2, :16, 20:40, 0], eye[2, 1, :, :, 0])
    assert torch.equal(shown[2, 16:32, 20:40, 2], (255.0 * images[2, 1]).round().byte())
    assert open_loop_pictures(Decoder(spaces.Discrete(2), SMALL, torch.tanh), (deter, stoch), obs["way"]) is None
