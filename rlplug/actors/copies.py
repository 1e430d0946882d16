"""Copies of the policy in other processes: what they are given to act with, and what acting changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplug import tree
from rlplug.trainer.policy import Policy, changes_actions
from rlplug.types import Tree


def acting_weights(policy: Policy) -> dict[str, Any]:
    """Return what the algorithm acts with, which changes with every update, as arrays."""
    state = policy.algorithm.state_dict()
    return {key: state[key].detach().cpu().numpy() for key in policy.algorithm.actor_keys()}


def load_acting_weights(policy: Policy, weights: dict[str, Any]) -> None:
    tensors = {key: torch.tensor(value) for key, value in weights.items()}  # copied: shared memory is read-only
    policy.algorithm.load_state_dict(tensors, strict=False)


def _modules(policy: Policy) -> dict[str, Any]:
    """Return the modules with state of their own that acting depends on."""
    exploration = {name: extra for name, extra in policy.exploration.items() if changes_actions(type(extra))}
    moments = {name: x for name in ("obs", "reward") if (x := getattr(policy.normalizer, name)) is not None}
    return {"normalizer": nn.ModuleDict(moments), "exploration": exploration}


def statistics(policy: Policy) -> Tree:
    """Return the small rest that acting depends on: running moments, the state of exploration, schedules."""
    return tree.map(_host, _modules(policy)) | {"step": policy.ctx.schedules.step}


def load_statistics(policy: Policy, statistics: Tree) -> None:
    tree.map(lambda module, state: module.load_state_dict(state), _modules(policy), statistics)
    policy.ctx.schedules.refresh(statistics["step"])


def changed_exploration(policy: Policy, statistics: Tree) -> Tree:
    """Return what acting changed in a copy's exploration modules since ``load_statistics(policy, statistics)``."""
    told = statistics["exploration"]
    return {
        name: {key: now for key, now in _host(extra).items() if not torch.equal(now, told[name][key])}
        for name, extra in _modules(policy)["exploration"].items()
    }


def merge_exploration(policy: Policy, actors: Sequence[Tree]) -> None:
    """Take over what acting changed in remote copies, each of which played other environments: the mean over them.

    What acting did not change stays as the learner has it, which may have moved it meanwhile.

    Args:
        actors: their states; ``exploration`` in each is what ``changed_exploration`` returned.
    """
    for name in actors[0]["exploration"]:
        own = _host(policy.exploration[name])
        states = [own | actor["exploration"][name] for actor in actors]
        policy.exploration[name].load_state_dict({key: _mean([s[key] for s in states]) for key in own})


def _host(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()}


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean ``[...]``; where all are equal, that very number, as the sum of three may be rounded."""
    if not values[0].is_floating_point():
        return values[0]
    every = torch.stack([*values])
    return torch.where((every == every[0]).all(0), every[0], every.mean(0))
