"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl


@hookimpl
def rlplug_components():
    # The kit compares one process with two, and wants episodes that these can share: here they all end together.
    return [Component("algo", "cem", "rlplug_cem.algo:Cem", ("env=pendulum", "train_batch_size=8", "num_envs=8"))]


@hookimpl
def rlplug_conf():
    return "rlplug_cem.conf"  # the folder with the YAML files; one folder for each kind
