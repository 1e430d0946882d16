"""The manifest: names only."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    return [
        Component("env", "deepsea", "rlplug_deepsea.env:DeepSea"),
        Component("exploration", "counts", "rlplug_deepsea.counts:Counts"),
    ]


@hookimpl
def rlplug_conf():
    return "rlplug_deepsea.conf"
