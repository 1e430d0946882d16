"""The manifest. rlplug imports it at every start, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("algo", "reinforce", "rlplug_reinforce.algo:Reinforce")]


@hookimpl
def rlplug_conf():
    return "rlplug_reinforce.conf"  # the package with the YAML files, one folder per kind
