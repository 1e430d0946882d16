"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl

# Overrides for the conformance kit, whose default algorithm is on-policy and refused.
TRIED_WITH = ("algo=dqn", "env=cartpole", "loop.ramp_steps=500")


@hookimpl
def rlplug_components():
    return [Component("loop", "ramp", "rlplug_ramp.loop:Ramp", TRIED_WITH)]


@hookimpl
def rlplug_conf():
    return "rlplug_ramp.conf"  # the folder with the YAML files; one folder for each kind
