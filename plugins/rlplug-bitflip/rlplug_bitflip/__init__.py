"""The manifest. rlplug imports it at every start, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("env", "bitflip", "rlplug_bitflip.env:BitFlip")]


@hookimpl
def rlplug_conf():
    return "rlplug_bitflip.conf"  # the package with the YAML files, one folder per kind
