"""Team rewards, and whose values count."""

import torch

from rlplug.functional.mixing import present, team_reward


def test_agents_that_are_not_alive_are_paid_nothing():
    reward = torch.tensor([[3.0, torch.nan, 6.0], [1.0, 1.0, 1.0]])
    alive = torch.tensor([[True, False, True], [True, True, True]])
    assert team_reward(reward, alive).tolist() == [3.0, 1.0]


def test_a_truncated_agent_counts_in_its_final_row_and_a_terminated_one_does_not():
    #        stays, terminates at row 0, is truncated at row 0, joins at row 2, ends with the last row
    alive = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 1], [1, 0, 0, 1, 0]]).bool()[:, None]
    terminated = torch.tensor([[0, 1, 0, 0, 0], [0, 1, 0, 0, 1], [1, 1, 0, 0, 1]]).bool()[:, None]
    found = present(alive, terminated).squeeze(1).int().tolist()
    assert found == [[1, 1, 1, 0, 1], [1, 0, 1, 0, 1], [1, 0, 0, 1, 0]]
