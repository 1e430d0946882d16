"""The recurrent state-space model of PlaNet and Dreamer: rows at once and one by one, and where episodes begin."""

from __future__ import annotations

import torch

from rlplug.nn.gaussian_rssm import GaussianRSSM

ROWS, COLUMNS = 5, 3


def test_rows_at_once_equal_row_by_row_and_episodes_begin_with_zeros():
    torch.manual_seed(0)
    model = GaussianRSSM(6, 4, 8, tokens=5, action=2).double()
    tokens, action = (torch.randn(ROWS, COLUMNS, n, dtype=torch.float64) for n in (5, 2))
    noise, is_first = torch.randn(ROWS, COLUMNS, 4, dtype=torch.float64), torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    is_first[2, 1] = True
    carry = {"deter": torch.randn(COLUMNS, 6, dtype=torch.float64), "stoch": torch.randn(COLUMNS, 4).double()}
    whole, at = model.observe(tokens, action, is_first, carry, noise), carry
    for t in range(ROWS):
        rows = slice(t, t + 1)
        row = model.observe(tokens[rows], action[rows], is_first[rows], at, noise[rows])
        at = {key: row[key][0] for key in carry}
        torch.testing.assert_close({key: row[key][0] for key in whole}, {key: x[t] for key, x in whole.items()})
    empty = {key: x.double() for key, x in model.initial_carry(COLUMNS).items()}
    alone = model.observe(tokens[2:], action[2:], is_first[2:], empty, noise[2:])
    torch.testing.assert_close(alone["deter"][:, 1], whole["deter"][2:, 1])
    assert (whole["std"] > 0.1).all()


def test_a_step_by_hand():
    torch.manual_seed(0)
    model = GaussianRSSM(6, 4, 8, tokens=5, action=2)
    deter, stoch, action, noise = (torch.randn(COLUMNS, n) for n in (6, 4, 2, 4))
    now, sample = model(deter, stoch, action, noise)
    inside = torch.nn.functional.elu(model.inputs.layers[0](torch.cat((stoch, action), -1)))
    torch.testing.assert_close(now, model.cell(inside, deter))
    mean, std = model.prior(now).chunk(2, -1)
    torch.testing.assert_close(sample, mean + (std.exp().log1p() + 0.1) * noise)
    torch.testing.assert_close(model(deter, stoch, action, None)[1], mean)
