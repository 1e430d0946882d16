"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("env", "errand", "rlplug_errand.env:Errand", ("algo=independent", "algo.one_per=group"))]


@hookimpl
def rlplug_conf():
    return "rlplug_errand.conf"  # the folder with the YAML files; one folder for each kind
