import torch
from torch.testing import assert_close

from rlplug.functional.curiosity import prediction_error


def test_prediction_error_is_half_the_squared_distance():
    """Features (1, 2) that were predicted as 0 are worth 0.125 with eta 0.05."""
    error = prediction_error(torch.zeros(3, 2), torch.tensor([1.0, 2.0]).expand(3, 2))
    assert_close(0.05 * error, torch.full((3,), 0.125))
