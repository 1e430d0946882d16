"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl

# What the conformance kit tries the module on. Without these words it is every algorithm, which takes minutes.
TRIED_WITH = ("algo=ppo", "env=deepsea")


@hookimpl
def rlplug_components():
    return [
        Component("env", "deepsea", "rlplug_deepsea.env:DeepSea"),
        Component("exploration", "counts", "rlplug_deepsea.exploration:Counts", TRIED_WITH),
    ]


@hookimpl
def rlplug_conf():
    return "rlplug_deepsea.conf"  # the folder with the YAML files; one folder for each kind
