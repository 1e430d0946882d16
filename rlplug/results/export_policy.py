"""The deterministic policy of a run as one torch module, from the environment's observations to its actions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple, flatdim
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlplug.api import Algorithm
from rlplug.context import RunContext
from rlplug.envs.spaces import in_words, inside_action, order_of, parts_of
from rlplug.nn import choices_of
from rlplug.types import Batch

CARRY, NEXT = "carry", "next_"
LARGEST = (torch.argmax, Tensor.argmax)
POSITIVE = (torch.gt, Tensor.gt, Tensor.__gt__, torch.ge, Tensor.ge, Tensor.__ge__)


@dataclass(frozen=True)
class Field:
    """One input or output.

    Args:
        shape: without the leading axis, the batch.
        dtype: as in NumPy.
        meaning: one sentence for users.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    meaning: str

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": ["batch", *self.shape], "dtype": self.dtype, "meaning": self.meaning}


class Policy(nn.Module):
    """The policy in mode ``greedy``, with preprocessing, and actions in the units of the environment.

    Inputs and outputs are dicts of tensors ``[batch, ...]`` by name: ``inputs`` and ``outputs`` describe them. A
    nested observation or carry has one name per leaf, such as ``obs.image`` or ``carry.policy.h``. The output
    ``next_carry.policy.h`` is the input ``carry.policy.h`` of the next step. ``scores`` are the numbers by which a
    discrete action was chosen, such as logits or Q-values. ``plans``: the algorithm has a simulator.

    Args:
        normalize: module that normalizes observations.
    """

    def __init__(self, algorithm: Algorithm, ctx: RunContext, normalize: nn.Module) -> None:
        super().__init__()
        self.algorithm, self.normalize = algorithm, normalize
        self.plans = any(slot == "simulator" for slot, _ in ctx.built)
        spec = ctx.spec
        inside = spec.single_agent
        (native,) = (spec.native_spaces or spec.groups).values()
        self.observation, self.action = inside.obs, inside.action
        self.starts = dict(_starts(native.obs, "obs"))
        self.start = np.asarray(getattr(native.action, "start", 0))
        self._native = _Native(native.action)
        self._previous = [key for key in ("prev_action", "prev_reward") if key in ctx.needs.keys]
        carry = algorithm.initial_carry(1)
        memory = [Field(name, tuple(x.shape[1:]), _name(x.dtype), MEMORY) for name, x in flat(carry, CARRY).items()]
        if "prev_action" in self._previous:
            memory.append(Field("carry.prev_action", self.action.shape or (), str(self.action.dtype), MEMORY))
        spaces = flat(native.obs).items()
        seen = [in_words(space) for _, space in spaces]
        self.inputs = [
            Field(name, s.shape or (), str(s.dtype), f"observation as the environment returns it: {space}")
            for (name, s), space in zip(flat(inside.obs).items(), seen, strict=True)
        ]
        if "action_mask" in spec.extras:
            size = flatdim(spec.extras["action_mask"])
            self.inputs.append(Field("action_mask", (size,), "bool", "actions that the environment allows"))
        if "prev_reward" in self._previous:
            self.inputs.append(
                Field("reward", (), "float32", "reward of the last action, as the environment pays it; 0 at first")
            )
        self.stateful = bool(memory or self._previous)
        if self.stateful:
            self.inputs.append(Field("is_first", (), "bool", "first observation of an episode: clears the carry"))
        self.inputs += memory
        side = "" if native.action.shape is not None else ", the parts side by side"
        dtype = self._native(torch.zeros(1, *(inside.action.shape or ()))).dtype
        act = Field("action", inside.action.shape or (), _name(dtype), f"{ACTION}{side}: {in_words(native.action)}")
        self.outputs = [act, *(replace(x, name=f"{NEXT}{x.name}") for x in memory)]
        self._unread: list[Field] = []
        with torch.no_grad():
            found = self(self.example(2))
        if "scores" in found:
            shape = tuple(found["scores"].shape[1:])
            self.outputs.append(Field("scores", shape, _name(found["scores"].dtype), SCORES))

    def leave_out(self, unread: Collection[str]) -> None:
        """Leave out inputs that acting does not read, such as the recurrent state of a critic."""
        self._unread += [x for x in self.inputs if x.name in unread]
        self.inputs = [x for x in self.inputs if x.name not in unread]
        self.outputs = [x for x in self.outputs if x.name.removeprefix(NEXT) not in unread]

    def example(self, batch: int) -> dict[str, Tensor]:
        """Return valid inputs: the lowest observations, no mask, and episodes that begin."""
        zeros = {x.name: torch.zeros(batch, *x.shape, dtype=getattr(torch, x.dtype)) for x in self.inputs}
        shifted = {name: zeros[name] + torch.as_tensor(start) for name, start in self.starts.items()}
        true = {name: torch.ones_like(zeros[name]) for name in ("action_mask", "is_first") if name in zeros}
        return zeros | shifted | true

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs for the inputs of ``[batch, ...]``."""
        seen = {
            name: x - torch.as_tensor(self.starts[name]) if name in self.starts else x for name, x in inputs.items()
        }
        some = next(iter(seen.values()))
        zeros = {x.name: some.new_zeros(some.shape[0], *x.shape, dtype=getattr(torch, x.dtype)) for x in self._unread}
        seen |= zeros
        first = seen["is_first"] if self.stateful else some.new_zeros(some.shape[0], dtype=torch.bool)
        step: Batch = {"obs": self.normalize(_nested(self.observation, seen, "obs")), "is_first": first}
        if "action_mask" in seen:
            step["action_mask"] = seen["action_mask"]
        before = {"prev_action": seen.get("carry.prev_action"), "prev_reward": seen.get("reward")}
        for key in self._previous:
            x: Any = before[key]
            step[key] = torch.where(first.reshape(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x), x)
        own = {"carry.prev_action"} if "prev_action" in self._previous else set[str]()
        carry = _unflat({name: x for name, x in seen.items() if name.startswith("carry.") and name not in own}, CARRY)
        with _Scores(self.action) as scores:
            out, after = self.algorithm.act(step, carry, "greedy")
        outputs = {"action": self._native(out["action"]), **flat(after, NEXT + CARRY)}
        if "prev_action" in self._previous:
            outputs[f"{NEXT}carry.prev_action"] = out["action"]
        if scores.found is not None:
            outputs["scores"] = scores.found
        return {name: x for name, x in outputs.items() if name.removeprefix(NEXT) not in zeros}


ACTION = "action as the environment takes it, in its units"
MEMORY = "memory: the output next_carry... of a step is the input carry... of the next one; zeros at first"
SCORES = "numbers by which the action was chosen, such as logits or Q-values"


class _Native(nn.Module):
    """Converts actions ``[batch, ...]`` to an environment's space, as ``rlplug.envs.spaces.joined``.

    Args:
        whole: actions are not a part of others, which are in the order of the space.
    """

    def __init__(self, space: Space[Any], whole: bool = True) -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(), None
        if isinstance(space, Dict | Tuple):
            parts = parts_of(space).values()
            self.parts.extend(_Native(part, whole=False) for part in parts)
            if whole and (order := order_of(space)) is not None:
                self._keep("order", order)
            self.shapes = [inside_action(part).shape or () for part in parts]
            return
        self.dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        self.scale: Any = None
        self.middle = self.low = self.high = self.start = self.scale
        if isinstance(space, Box):
            if np.isfinite([space.low, space.high]).any():
                both = np.isfinite(space.low) & np.isfinite(space.high)
                low, high = (np.where(both, bound, 0).astype(np.float64) / 2 for bound in (space.low, space.high))
                self._keep("scale", np.where(both, high - low, 1).astype(space.dtype))
                self._keep("middle", (high + low).astype(space.dtype))
                self._keep("low", space.low)
                self._keep("high", space.high)
        elif np.any(start := getattr(space, "start", 0)):
            self._keep("start", np.asarray(start))

    def _keep(self, name: str, x: Any) -> None:
        delattr(self, name)
        self.register_buffer(name, torch.as_tensor(np.array(x)))

    def forward(self, action: Tensor) -> Tensor:
        if len(self.parts):
            n, action = action.shape[0], action if self.order is None else action[:, self.order]
            pieces = action.reshape(n, -1).split([*map(math.prod, self.shapes)], 1)
            each = zip(self.parts, self.shapes, pieces, strict=True)
            done = [run(x.reshape(n, *shape)).reshape(n, -1) for run, shape, x in each]
            return torch.cat(done, 1).reshape(action.shape)
        if self.start is not None:
            action = action + self.start
        action = action.to(self.dtype)
        if self.scale is None:
            return action
        return torch.minimum(torch.maximum(action * self.scale + self.middle, self.low), self.high)


class _Scores(TorchFunctionMode):
    """Finds the numbers ``found [batch, ...]`` that ``act`` turns into a discrete action inside the block."""

    def __init__(self, action: Space[Any]) -> None:
        super().__init__()
        self.found: Tensor | None = None
        self.shape, self.discrete = action.shape, choices_of(action) is not None
        self.largest = isinstance(action, Discrete | MultiDiscrete)
        self.chooses = LARGEST if self.largest else POSITIVE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.discrete and func in self.chooses and args[0].is_floating_point():
            of = args[0].shape[1:-1] if self.largest else args[0].shape[1:]
            self.found = args[0] if of == self.shape else self.found  # a world model chooses states, too
        return func(*args, **(kwargs or {}))


def flat(tree: Any, name: str = "obs") -> dict[str, Any]:
    """Flatten a nested space or dict to one dotted name per leaf."""
    inner = tree
    if isinstance(tree, Dict | Tuple):
        inner = tree.spaces if isinstance(tree, Dict) else dict(enumerate(tree.spaces))
    if not isinstance(inner, Mapping):
        return {name: inner}
    return {path: leaf for key, part in inner.items() for path, leaf in flat(part, f"{name}.{key}").items()}


def _nested(space: Space[Any], leaves: Mapping[str, Any], name: str) -> Any:
    if isinstance(space, Dict):
        return {key: _nested(part, leaves, f"{name}.{key}") for key, part in space.spaces.items()}
    return leaves[name]


def _unflat(leaves: Mapping[str, Any], name: str) -> Batch:
    nested: Batch = {}
    for path, leaf in leaves.items():
        *parents, last = path.removeprefix(f"{name}.").split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def _starts(space: Space[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the first number of every part that does not count from 0."""
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _starts(part, f"{name}.{key}")
    elif np.any(start := getattr(space, "start", 0)):
        yield name, start


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
