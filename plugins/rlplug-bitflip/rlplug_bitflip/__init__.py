"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("env", "bitflip", "rlplug_bitflip.env:BitFlip")]


@hookimpl
def rlplug_conf():
    return "rlplug_bitflip.conf"  # the folder with the YAML files; one folder for each kind
