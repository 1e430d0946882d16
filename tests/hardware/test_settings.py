"""Settings of plans that runs from before do not have."""

from __future__ import annotations

from rlplug.plugins.hardware.machine import Config


def test_restarts_were_not_limited_once():
    old = {"devices": 1, "actors": {"count": 2}}
    assert Config.migrate(old) == {"devices": 1, "actors": {"count": 2, "max_total_restarts": 100}}
    assert Config.migrate({"actors": {"max_total_restarts": 5}}) == {"actors": {"max_total_restarts": 5}}
    assert Config.migrate({"devices": 1}) == {"devices": 1}
