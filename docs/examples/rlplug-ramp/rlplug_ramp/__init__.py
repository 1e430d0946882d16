"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("loop", "ramp", "rlplug_ramp.loop:Ramp")]


@hookimpl
def rlplug_conf():
    return "rlplug_ramp.conf"  # the folder with the YAML files; one folder for each kind
