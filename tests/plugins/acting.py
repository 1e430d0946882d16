"""What tests of algorithms are made with: an algorithm, segments and windows as buffers give them, a learner."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces

from rlplug import testing, tree
from rlplug.api import Algorithm
from rlplug.distributed.fabric import one_rank
from rlplug.trainer.learner import RankLearner
from rlplug.types import Batch, EnvSpec

T, B = 16, 4
Kind = TypeVar("Kind", bound=Algorithm)


def make(cls: type[Kind], option: str, spec: EnvSpec | None = None, overrides=(), run=None, **changes) -> Kind:
    """Return an algorithm with the settings of ``conf/algo/<option>.yaml`` and ``changes``; ``run`` is of its context.

    A word of ``overrides`` with a recurrent model makes it a recurrent one.
    """
    torch.manual_seed(0)
    spec, cfg = spec or testing.spec(3, 2), testing.config(f"algo/{option}", **changes)
    needs = cls.needs(cfg, spec)
    if any(word.endswith(("lstm", "gru", "attention")) for word in overrides):
        needs = cls.recurrent(cfg, needs)
    return cls(cfg, testing.context(spec, overrides=[f"algo={option}", *overrides], needs=needs, **run or {}))


def learner_of(algorithm: Any, fabric: Any = None, buffer: Any = None, cls: Any = RankLearner) -> Any:
    ctx = getattr(algorithm, "ctx", None) or testing.context()
    return cls(fabric=fabric or one_rank(), ctx=ctx, algorithm=algorithm, buffer=buffer)


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def gradients(algorithm: Algorithm, batch: Batch, parts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The gradients of the sum of the terms, by parameter."""
    algorithm.zero_grad()
    sum(term.mean() for term in algorithm.forward(batch, parts).terms.values()).backward()  # type: ignore[union-attr]
    return {name: p.grad.clone() for name, p in algorithm.named_parameters() if p.grad is not None}


def segment(algorithm: Algorithm, mask: torch.Tensor | None = None) -> Batch:
    """What was collected: two columns have an episode that ends within, column 0 begins within one."""
    g = torch.Generator().manual_seed(1)
    obs = torch.randn(T + 1, B, 3, generator=g)
    batch = {"obs": obs, "reward": obs[..., 0] + 1.0}
    for key in ("terminated", "truncated", "is_first"):
        batch[key] = torch.zeros(T + 1, B, dtype=torch.bool)
    batch["valid"] = ~batch["is_first"]
    batch["valid"][-1] = batch["valid"][5, 2] = batch["valid"][9, 3] = False
    batch["truncated"][4, 2] = batch["terminated"][8, 3] = True
    batch["is_first"][0, 1:] = batch["is_first"][6, 2] = batch["is_first"][10, 3] = True
    if mask is not None:
        batch["action_mask"] = mask
    with torch.no_grad():
        carry = tree.map(lambda x: torch.randn(x.shape, generator=g), algorithm.initial_carry(B))
        out = []
        for t in range(T + 1):
            step = {key: batch[key][t] for key in ("obs", "is_first", "action_mask") if key in batch}
            said, after = algorithm.act(step, carry, "explore")
            out.append(said | ({"carry": carry} if carry else {}))
            carry = after
    return batch | stacked(out)


def stacked(rows: list[Batch]) -> Batch:
    return tree.map(lambda *x: torch.stack(x), *rows)


def move(algorithm: torch.nn.Module, by: float = 0.05) -> None:
    """Change the weights, as updates do between collection and learning."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in algorithm.parameters():
            p += by * torch.randn(p.shape, generator=g)


def drawn(space: spaces.Space[Any], g: torch.Generator, *lead: int) -> Any:
    """Elements of a space, ``[*lead, ...]``."""
    match space:
        case spaces.Dict():
            return {key: drawn(part, g, *lead) for key, part in space.spaces.items()}
        case spaces.Box(dtype=np.uint8):
            return torch.randint(256, (*lead, *space.shape), generator=g, dtype=torch.uint8)
        case spaces.Box():
            return torch.rand(*lead, *space.shape, generator=g) * 2 - 1
        case spaces.Discrete():
            return torch.randint(int(space.n), lead, generator=g)
    most = torch.as_tensor(space.nvec if isinstance(space, spaces.MultiDiscrete) else [2] * space.n)  # type: ignore[attr-defined]
    return (torch.rand(*lead, len(most), generator=g) * most).long()


def windows(algorithm: Algorithm, n: int = 6, mask: torch.Tensor | None = None) -> Batch:
    """Windows as a replay gives them, the first of which terminates; in those of sequences episodes end and begin."""
    g = torch.Generator().manual_seed(1)
    needs, space = algorithm.ctx.needs, algorithm.ctx.spec.single_agent  # type: ignore[attr-defined]
    rows = needs.window.burn_in + needs.window.length + 1
    batch = {"obs": drawn(space.obs, g, rows, n), "action": drawn(space.action, g, rows, n)}
    batch["reward"] = torch.randn(rows, n, generator=g)
    for key in ("terminated", "is_first"):
        batch[key] = torch.zeros(rows, n, dtype=torch.bool)
    batch["valid"] = torch.ones(rows, n, dtype=torch.bool)
    if needs.window.stride:  # column 0 ends within the rows that are learned from, column 1 in the burn-in
        for column, row in ((0, needs.window.burn_in + 1), (1, 0)):
            batch["terminated"][row, column] = column == 0
            batch["valid"][row + 1, column] = False
            batch["is_first"][row + 2, column] = True
        batch["carry"] = tree.map(lambda x: torch.randn(1, *x.shape, generator=g), algorithm.initial_carry(n))
    else:
        batch["terminated"][0, 0] = True
    return batch if mask is None else batch | {"action_mask": mask.expand(rows, n, -1)}
