"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("algo", "reinforce", "rlplug_reinforce.algo:Reinforce")]


@hookimpl
def rlplug_conf():
    return "rlplug_reinforce.conf"  # the folder with the YAML files; one folder for each kind
