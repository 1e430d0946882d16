"""The manifest. rlplug imports it at every start, so it imports nothing heavy."""

from rlplug import Component, hookimpl

# The conformance kit tests the module with these overrides; without them, with every algorithm, which takes minutes.
TRIED_WITH = ("algo=ppo", "env=deepsea")


@hookimpl
def rlplug_components():
    return [
        Component("env", "deepsea", "rlplug_deepsea.env:DeepSea"),
        Component("exploration", "counts", "rlplug_deepsea.exploration:Counts", TRIED_WITH),
    ]


@hookimpl
def rlplug_conf():
    return "rlplug_deepsea.conf"  # the package with the YAML files, one folder per kind
