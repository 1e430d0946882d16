"""Environments by rlplug's own plugin; workers do not import this module, because it imports torch."""

from types import SimpleNamespace

from rlplug import testing
from rlplug.plugins.env.gymnasium import Gymnasium


def gym(env_id, n=2, **options):
    """Make ``n`` environments of Gymnasium."""
    config = testing.config("env/gymnasium", id=env_id, **options)
    return Gymnasium(config, SimpleNamespace(env_ids=range(n), num_envs=n, render=False, role="actor"))
