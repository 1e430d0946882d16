"""State of remote copies of the policy: weights and statistics sent to them, and exploration state returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplug import tree
from rlplug.agents import changes_actions
from rlplug.collection.acting import acting_state
from rlplug.trainer.policy import BehaviorPolicy
from rlplug.types import Tree


def acting_weights(policy: BehaviorPolicy) -> dict[str, Any]:
    """Return the algorithm's weights for acting, which change with every update, as arrays."""
    return {key: x.detach().cpu().numpy() for key, x in acting_state(policy.algorithm)[0].items()}


def load_acting_weights(policy: BehaviorPolicy, weights: dict[str, Any]) -> None:
    tensors = {key: torch.tensor(value) for key, value in weights.items()}  # a copy, because shared memory is read-only
    policy.algorithm.load_state_dict(tensors, strict=False)


def _modules(policy: BehaviorPolicy) -> dict[str, Any]:
    """Return the modules other than the algorithm whose state affects acting."""
    exploration = {name: extra for name, extra in policy.exploration.items() if changes_actions(type(extra))}
    moments = {name: x for name in ("obs", "reward") if (x := getattr(policy.normalizer, name)) is not None}
    return {"normalizer": nn.ModuleDict(moments), "exploration": exploration}


def statistics(policy: BehaviorPolicy) -> Tree:
    """Return the other, small state that affects acting: buffers, running moments, exploration, schedules."""
    buffers = {key: x.detach().to("cpu", copy=True) for key, x in acting_state(policy.algorithm)[1].items()}
    return tree.map(_host, _modules(policy)) | {"buffers": buffers, "step": policy.ctx.schedules.step}


def load_statistics(policy: BehaviorPolicy, statistics: Tree) -> None:
    tree.map(lambda module, state: module.load_state_dict(state), _modules(policy), statistics)
    policy.algorithm.load_state_dict(statistics["buffers"], strict=False)
    policy.ctx.schedules.refresh(statistics["step"])


def changed_exploration(policy: BehaviorPolicy, statistics: Tree) -> Tree:
    """Return the exploration state that acting changed since ``load_statistics(policy, statistics)``."""
    told = statistics["exploration"]
    return {
        name: {key: now for key, now in _host(extra).items() if not torch.equal(now, told[name][key])}
        for name, extra in _modules(policy)["exploration"].items()
    }


def merge_exploration(policy: BehaviorPolicy, actors: Sequence[Tree]) -> None:
    """Average exploration state changed remotely, by actors with different environments, into the policy.

    State not changed by acting keeps the learner's value, which the learner may have updated.

    Args:
        actors: states of the actors, with ``changed_exploration`` under ``exploration``.
    """
    for name in actors[0]["exploration"]:
        own = _host(policy.exploration[name])
        states = [own | actor["exploration"][name] for actor in actors]
        policy.exploration[name].load_state_dict({key: _mean([s[key] for s in states]) for key in own})


def _host(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()}


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean ``[...]``; exact if all are equal, where a sum might be rounded."""
    if not values[0].is_floating_point():
        return values[0]
    every = torch.stack([*values])
    return torch.where((every == every[0]).all(0), every[0], every.mean(0))
