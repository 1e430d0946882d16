"""Settings of plans that runs from before do not have."""

from __future__ import annotations

from rlplug.plugins.hardware.machine import Config


def test_what_runs_from_before_do_not_have_is_added():
    old = {"devices": 1, "actors": {"count": 2}}
    assert Config.migrate(old) == {
        "devices": 1,
        "actors": {"count": 2, "max_total_restarts": 100, "start_timeout_s": 300},
    }
    given = {"actors": {"max_total_restarts": 5, "start_timeout_s": 10}}
    assert Config.migrate(given) == given
    assert Config.migrate({"devices": 1}) == {"devices": 1}
