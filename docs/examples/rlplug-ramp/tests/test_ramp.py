import pytest
from rlplug import testing

from rlplug_ramp.loop import Ramp


@pytest.mark.parametrize(("ratio", "updates"), [(None, 3), (0.5, 50)])
def test_updates_follow_the_tempo(ratio, updates):
    ctx = testing.context(num_envs=4, rollout_length=8, replay_ratio=ratio, learning_starts=10)
    loop = Ramp(testing.config("loop/ramp"), ctx)
    assert (loop.updates(0), loop.updates(10), loop.updates(110)) == (0, 0, updates)
