"""Short real runs, and helpers to observe them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Job, Losses, Segment, Trainable
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.config import RunConfig, compose, default_node, option_names, parse
from rlplug.context import EnvShard, RunContext
from rlplug.registry import Kind, hookimpl
from rlplug.run.build import build
from rlplug.run.callbacks import Callbacks
from rlplug.testing.checks.devices import action_for, draw, rows_of
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.optimizer import OptimizerState
from rlplug.trainer.trainer import Trainer
from rlplug.types import Batch, Weights, groups_of

UPDATES = 2
"""learner steps of a short run"""
AT_MOST = {"train_batch_size": 64, "num_steps_sampled_before_learning_starts": 64}
"""largest values of settings in a short run; overrides may be larger"""
ROWS = 256
"""rows of a rollout, of all environments, in a short run: a usual minibatch"""
CPU = ("tuned=none", "hardware=cpu", "logger.only=[]", "eval.every=0", "eval.episodes=1", "compile=off")


def require(holds: Any, message: str) -> None:
    """Raise an error with a message for plugin authors.

    Raises:
        AssertionError: ``holds`` is false.
    """
    if not holds:
        raise AssertionError(message)


@cache
def _node(kind: Kind, option: str) -> dict[str, Any]:
    return default_node(kind, option)


def node_of(kind: Kind, option: str, **changes: Any) -> dict[str, Any]:
    """Return an option's YAML node, including ``name``, with changes."""
    return {**copy.deepcopy(_node(kind, option)), **changes}


@cache
def options(kind: Kind, name: str) -> list[str]:
    """Return the YAML options that select a component, at least one.

    Raises:
        AssertionError: there is none.
    """
    found = [option for option in option_names(kind) if node_of(kind, option).get("name") == name]
    require(found, f"no YAML selects {kind} {name!r}: add conf/{kind}/{name}.yaml with `name: {name}`")
    return sorted(found, key=lambda option: option != name)


@cache
def option_of(kind: Kind, name: str) -> str:
    """Return the YAML option with the component's name, else the first that selects it."""
    own = name in option_names(kind) and node_of(kind, name).get("name") == name
    return name if own else options(kind, name)[0]


# ---- runs ------------------------------------------------------------------------------------------------------------


@cache
def _composed(*overrides: str) -> RunConfig:
    """Compose a config with at most ``AT_MOST``, and rollouts of ``ROWS`` rows, of what no override sets."""
    raw, given = compose(overrides).raw, {word.partition("=")[0] for word in overrides}
    most = AT_MOST | {"rollout_fragment_length": max(1, ROWS // raw["num_envs"])}
    return parse(raw | {key: min(value, raw[key]) for key, value in most.items() if key not in given})


@dataclass(frozen=True)
class Case:
    """An algorithm on an environment.

    Args:
        name: the component.
        env: an option of the group ``env``.
        overrides: further overrides, such as a shorter warm-up.
    """

    name: str
    env: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((f"algo={option_of('algo', self.name)}", f"env={self.env}", *self.overrides))

    def build(self, *more: str, seed: int = 0) -> Trainer:
        """Build the run, before any collection."""
        algo = option_of("algo", self.name)
        return build(_composed(f"algo={algo}", f"env={self.env}", *CPU, f"seed={seed}", *self.overrides, *more), Path())


def case_of(words: Sequence[str], algorithm: str | None = None, env: str = "cartpole") -> Case:
    """Return the case of ``words``, in which ``algo=`` and ``env=`` replace the defaults."""
    chosen = dict(word.split("=", 1) for word in words if word.startswith(("algo=", "env=")))
    rest = tuple(word for word in words if not word.startswith(("algo=", "env=")))
    return Case(chosen.get("algo", algorithm) or compose([]).algo.name, chosen.get("env", env), rest)


class History:
    """A hook that records a run's reports, and ends it after a number of updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.losses: list[dict[str, Tensor]] = []
        self.segment: Batch = {}

    @hookimpl
    def rlplug_collected(self, run: Any, segment: Segment) -> None:
        self.segment = tree.map(torch.clone, segment.batch)

    @hookimpl
    def rlplug_played(self, run: Any, job: Job, batch: Batch) -> None:
        self.segment = {key: leaf for key, leaf in batch.items() if key not in OF_EPISODE}

    @hookimpl
    def rlplug_updated(self, run: Any, losses: Losses) -> None:
        self.losses.append({name: value.clone() for name, value in (losses.terms | losses.metrics).items()})
        run.agreement.request_stop(int(len(self.losses) >= self.updates))


def play(trainer: Trainer, updates: int = UPDATES, also: Any = None) -> History:
    """Run the loop for a number of updates.

    Args:
        also: a further hook.
    """
    history = History(updates)
    for hook in (also, history):
        if hook is not None:
            trainer.hooks.register(hook)
    trainer.agreement.request_stop(0)
    trainer.loop.run(trainer)
    for hook in (also, history):
        if hook is not None:
            trainer.hooks.unregister(hook)
    require(
        len(history.losses) >= updates,
        f"{trainer.config.algo.name} made {len(history.losses)} of {updates} updates within total_steps="
        f"{trainer.config.total_steps}; pass overrides that let it learn earlier",
    )
    return history


def callbacks_of(trainer: Trainer) -> Callbacks:
    """Return a run's callbacks with their concrete type."""
    callbacks: Any = trainer.reports
    return callbacks


Look = Callable[["Watching", Trainable, Batch, Sequence[str]], None]


class Watching(RankLearner):
    """A learner that calls a function with the batch of every gradient step, and stores its last sample.

    Attributes:
        sampled: the last sample, from the buffer or the loop.
        given: whether the loop provided it, as loops with jobs do.
        episodes: observed episodes of jobs.
        applied: whether a step was made with external gradients.
    """

    look: Look | None = None
    sampled: Batch
    episodes: list[Batch]
    given, applied = False, False

    def update(self, batch: Batch | None = None) -> Losses:  # type: ignore[override]
        self.given = batch is not None
        return super().update(batch)

    def observe(self, segment: Segment) -> None:
        if segment.whole:
            self.episodes.append(tree.map(torch.clone, segment.batch))
        super().observe(segment)

    def apply(self, grads: Weights, who: Trainable, parts: Sequence[str] | None = None) -> None:
        self.applied = True
        super().apply(grads, who, parts)

    def _received(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        batch, bonuses = super()._received(batch)
        self.sampled = tree.map(torch.clone, batch)
        return batch, bonuses

    def minimize(
        self, batch: Batch, who: Trainable, parts: Sequence[str] | None = None, *, diagnostics: bool = True
    ) -> Losses:
        named = tuple(self.parts(who) if parts is None else parts)
        if self.look is not None and named:  # else there is no update
            self.look(self, who, batch, named)
        return super().minimize(batch, who, parts, diagnostics=diagnostics)


def watch(trainer: Trainer, look: Look | None = None) -> Watching:
    """Replace a run's learner by a ``Watching`` one, before its first update."""
    old = trainer.learner
    new = Watching(
        fabric=old.fabric,
        ctx=old.ctx,
        algorithm=old.algorithm,
        buffer=old.buffer,
        exploration=old.exploration,
        progress=old.progress,
        normalizer=old.normalizer,
    )
    new.look, new.episodes = look, list[Batch]()
    trainer.learner = new
    return new


def each_gradient_step(case: Case, look: Look, updates: int = 2, most: int = 4) -> None:
    """Make a run of ``updates``, and call ``look`` at its first ``most`` gradient steps.

    Algorithms that compute their own gradients and call ``learner.apply`` have no batches.

    Raises:
        AssertionError: there are none, although the algorithm has optimizers.
    """
    trainer, seen = case.build(), 0

    def counted(learner: Watching, who: Trainable, batch: Batch, parts: Sequence[str]) -> None:
        nonlocal seen
        if seen < most:
            look(learner, who, batch, parts)
        seen += 1

    learner = watch(trainer, counted)
    play(trainer, updates)
    trainer.close()
    learns = trainables(learner, trainer.algorithm)
    steps = seen or learner.applied or not learns
    require(steps, f"{case.name} has optimizers, but its update() calls neither learner.minimize nor learner.apply")


class _Again:
    """A buffer that always returns the same sample, without priorities."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def sample(self) -> Batch:
        return tree.map(torch.clone, self.batch)

    def feedback(self, index: Any, values: Any) -> None:
        pass


def again(batch: Batch) -> Any:
    """Return a buffer that always returns ``batch``."""
    return _Again(batch)


# ---- acting ----------------------------------------------------------------------------------------------------------

COLUMNS = 4


def episodes(trainer: Trainer, length: int = 16) -> list[Batch]:
    """Return inputs of ``act`` from a real environment with random allowed actions: observations, ``is_first``, and, if
    the algorithm's keys name them, ``prev_action``, ``prev_reward`` and ``agent_is_first``."""
    shard = EnvShard("eval", COLUMNS, range(COLUMNS))
    env = trainer.config.env.build(trainer.ctx.derive(shard=shard))
    for group in env.spec.groups.values():
        group.action.seed(0)
    first, over, rows = np.ones(COLUMNS, np.bool_), np.zeros(COLUMNS, np.bool_), []
    before = result = rows_of(env, env.reset(list(range(COLUMNS))))
    action, nested = draw(env, result), env.spec.nested
    for _ in range(length):
        step: Batch = _observed(result) | {name: _observed(result[name]) for name in nested} | {"is_first": first}
        single = [] if nested else [(step, before, result, action)]
        for part, old, new, acted in [(step[n], before[n], result[n], action[n]) for n in nested] or single:
            part.update(tree.only(_previous(old, new, acted, first), trainer.ctx.needs.keys))
        rows.append(tree.map(lambda x: torch.as_tensor(np.array(x)), step))
        before, action = result, draw(env, result)
        result = rows_of(env, env.step(action_for(env, action)))
        ended = result["terminated"] | result["truncated"] if not env.spec.has_agents else _left(result)
        first, over = over if env.autoreset is AutoresetMode.NEXT_STEP else ended, ended
    env.close()
    return rows


def _previous(before: Batch, result: Batch, action: np.ndarray, first: np.ndarray) -> Batch:
    """Return a group's keys from the previous row, zeros where an episode begins or no agent acted."""
    acted = (before["alive"].T & ~first).T if "alive" in before else ~first
    reward = result.get("reward", np.zeros(acted.shape, np.float32))
    wide = acted.reshape(*acted.shape, *[1] * (action.ndim - acted.ndim))
    begins = {"agent_is_first": result["alive"] & ~acted} if "alive" in result else {}
    return begins | {"prev_action": action * wide, "prev_reward": reward * acted}


def _observed(row: Batch) -> Batch:
    return {key: leaf for key, leaf in row.items() if key not in ("reward", "terminated", "truncated", "final_obs")}


def _left(row: Batch) -> np.ndarray:
    """Return the columns in which no agent is alive."""
    alive = [part["alive"].reshape(COLUMNS, -1).any(1) for part in groups_of(row).values()]
    return np.logical_not(np.logical_or.reduce(alive))


@contextmanager
def asking(ctx: RunContext, seed: int = 0, env_ids: Sequence[int] = range(COLUMNS)) -> Iterator[None]:
    """Set up ``ctx`` for ``act`` of some of ``COLUMNS`` environments, with generators of that seed."""
    with torch.inference_mode(), ctx.acting(EnvShard("eval", COLUMNS, env_ids)):
        for generator in ctx.generators.values():
            generator.manual_seed(seed)
        yield


def answers(algorithm: Algorithm, ctx: RunContext, rows: Sequence[Batch], mode: Any, seed: int = 0) -> list[Batch]:
    """Return the output of ``act`` for every row."""
    said = []
    with asking(ctx, seed):
        carry = algorithm.initial_carry(COLUMNS)
        for row in rows:
            out, carry = algorithm.act(row, carry, mode)
            said.append(tree.map(torch.clone, out))
    return said


# ---- comparing -------------------------------------------------------------------------------------------------------


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of dicts and lists to one name per leaf: ``0.action``."""
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, inner in pairs for name, leaf in flat(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): tree}


def differences(a: Any, b: Any) -> list[str]:
    """Return the names of leaves that are not bit-identical in both trees."""
    one, two = flat(a), flat(b)
    names = dict.fromkeys([*one, *two])
    return [name for name in names if name not in one or name not in two or _bits(one[name]) != _bits(two[name])]


def _bits(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)  # exact for floats, including NaN and -0.0


def some(names: Sequence[str]) -> str:
    """Format the first few names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def learning(part: OptimizerState) -> list[Tensor]:
    """Return the parameters of a part that are not frozen."""
    return [p for p in part.params if p.requires_grad]


def trainables(learner: RankLearner, root: Trainable) -> dict[str, Trainable]:
    """Return the modules with optimizers of parameters that are not frozen, outermost first: the algorithm, or else
    its children."""
    found: dict[str, Trainable] = {}

    def visit(module: torch.nn.Module, name: str) -> None:
        if isinstance(module, Trainable) and any(map(learning, learner.parts(module).values())):
            found[name] = module
            return
        for child, inner in module.named_children():
            visit(inner, f"{name}.{child}" if name else child)

    visit(root, "")
    return found
