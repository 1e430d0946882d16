"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("buffer", "combined", "rlplug_combined.buffer:Combined")]


@hookimpl
def rlplug_conf():
    return "rlplug_combined.conf"  # the folder with the YAML files; one folder for each kind
