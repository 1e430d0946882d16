"""The manifest: names only. It is imported whenever rlplug starts, so it imports nothing heavy."""

from rlplug import Component, hookimpl

# Overrides for the conformance kit: Pendulum's episodes all end together, so that two processes can share them.
# An elite of half the episodes, and some noise, keep small generations from converging too early.
TRIED_WITH = ("env=pendulum", "train_batch_size=8", "num_envs=8", "algo.elite_share=0.5", "algo.extra_std=0.1")


@hookimpl
def rlplug_components():
    return [Component("algo", "lincem", "rlplug_lincem.algo:Cem", TRIED_WITH)]


@hookimpl
def rlplug_conf():
    return "rlplug_lincem.conf"  # the folder with the YAML files; one folder for each kind
