"""The manifest: which components this package offers, and where its YAML files are."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [Component("logger", "trackio", "rlplug_trackio.logger:Trackio")]


@hookimpl
def rlplug_conf():
    return "rlplug_trackio.conf"
