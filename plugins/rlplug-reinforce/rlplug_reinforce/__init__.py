"""The manifest: names only."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("algo", "reinforce", "rlplug_reinforce.algo:Reinforce")]


@hookimpl
def rlplug_conf():
    return "rlplug_reinforce.conf"
