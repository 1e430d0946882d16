"""Probes: tiny environments with exactly known values and optimal actions, to test what algorithms learn.

``python -m rlplug.testing.probes`` trains every algorithm on every probe that it supports, and prints a table.
"""

from rlplug.testing.probes.trying import Found, check_probe, check_with, kind_of, learn
from rlplug.testing.probes.worlds import PROBES, Kind, Probe

__all__ = ["PROBES", "Found", "Kind", "Probe", "check_probe", "check_with", "kind_of", "learn"]
