"""The feature matrix: a cell is an algorithm with one level of every factor, which runs or is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from gymnasium.spaces import Box, Discrete

from rlplug import registry
from rlplug.api import Exploration
from rlplug.config import RunConfig, compose, parse
from rlplug.config.schema import SEVERAL
from rlplug.registry import KINDS, Kind, load
from rlplug.run.build import build
from rlplug.testing.checks.runs import CPU, node_of, option_of, play, require, trainables
from rlplug.testing.worlds import ACTIONS, OBSERVATIONS
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError, EnvSpec, Group

TORSO = {"image": "cnn", "dict": "multi_input", "tuple": "multi_input"}
"""the model of each kind of observation; default: mlp"""
WORLDS = {
    False: ("env=gymnasium", "env.id=rlplug.testing.worlds:World-v0"),
    True: ("env=multi", "env.entry_point=rlplug.testing.worlds:Troop"),
}
"""the environments of algorithms for one agent, and for several"""
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "rollout_fragment_length": 8,
    "train_batch_size": 8,
    "replay_ratio": 0.0625,
    "num_steps_sampled_before_learning_starts": 32,
    "capacity": 512,
    "sgd_minibatch_size": 16,
    "num_sgd_iter": 2,
    "max_seq_len": 4,
    "sequence_length": 6,
    "burn_in": 2,
    "stride": 4,
    "hidden": 8,
    "dim": 8,
    "head_dim": 4,
    "mlp_dim": 8,
    "memory": 3,
    "hiddens": 8,
    "inverse_net_hiddens": 8,
    "forward_net_hiddens": 8,
    "predictor_hiddens": 8,
    "feature_dim": 8,
}
"""options that make runs short, at any depth; of a list, every element"""

BANDIT = "env.max_episode_steps=1"
"""makes every step an episode, without which bandits learn nothing"""


@dataclass(frozen=True)
class Cell:
    """An algorithm with one level of every factor."""

    algorithm: str
    observation: str = "vector"
    action: str = "box"
    recurrence: str = "none"
    n_step: str = "1"
    priorities: str = "off"
    curiosity: str = "none"
    noise: str = "none"
    normalization: str = "none"
    vector: str = "list"

    @property
    def words(self) -> list[str]:
        """Return the overrides."""
        torso, action = TORSO.get(self.observation, "mlp"), self.action.removesuffix("+mask")
        extra = [name for name in (self.curiosity, self.noise) if name != "none"]
        if extra and self.noise == "none":  # curiosity only changes rewards, and some algorithms need other exploration
            extra = [*raw_of([f"algo={option_of('algo', self.algorithm)}", *CPU])["exploration"], *extra]
        words = [
            f"algo={option_of('algo', self.algorithm)}",
            *CPU,
            *(word for word in registry.tried_with("algo", self.algorithm) if not word.startswith(("env=", "env."))),
            *WORLDS[for_agents(self.algorithm)],
            *(word for word in registry.tried_with("algo", self.algorithm) if self._sets_env(word)),
            f"env.vectorization={self.vector}",
            f"+env.kwargs.observation={self.observation}",
            f"+env.kwargs.action={action}",
            f"exploration=[{','.join(extra)}]",
        ]
        if action != self.action:
            words.append("+env.kwargs.mask=true")
        if self.recurrence == "none":
            words += [] if any(word.startswith("model=") for word in words) else [f"model={torso}"]
        else:
            words += [f"model={self.recurrence}", f"model@model.torso={torso}"]
        if self.recurrence != "none" and _replays(self.algorithm):
            words += ["buffer=sequence", *([] if self.priorities == "on" else ["buffer.alpha=0.0"])]
        elif self.priorities == "on":
            words.append("buffer=prioritized")
        if self.n_step != "1":
            words.append(f"algo.n_step={self.n_step}")
        if self.normalization != "none":
            words.append("preprocess.normalize_reward=true")
        if self.normalization == "all":
            words.append("preprocess.normalize_obs=true")
        raw = raw_of(words)
        if raw["buffer"]["name"] == "rollout":
            del raw["train_batch_size"]  # training uses whole rollouts
        return words + _small(raw)

    def _sets_env(self, word: str) -> bool:
        """Return whether an override is a setting of the world: its native vector cannot shorten episodes."""
        shortens = word.startswith("env.max_episode_steps=") and word != BANDIT
        return word.startswith("env.") and not (shortens and self.vector == "native")

    def config(self) -> RunConfig:
        """Return the result of ``compose(words)``, in a hundredth of the time.

        Raises:
            ConfigError: an option is invalid.
        """
        return parse(raw_of(self.words))

    def build(self, *words: str) -> Trainer:
        """Build the run, before any collection.

        Raises:
            ConfigError: the cell is refused.
        """
        return build(parse(raw_of([*self.words, *words])), Path())

    def refusal(self) -> str | None:
        """Return the message with which it is refused, or None."""
        try:
            self.build().close()
        except ConfigError as error:
            return str(error).partition("; did you mean")[0].partition("; there are")[0]
        return None

    @property
    def levels(self) -> frozenset[tuple[str, str]]:
        return frozenset((factor, getattr(self, factor)) for factor in FACTORS)

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(getattr(self, factor) for factor in FACTORS)])


Levels = frozenset[tuple[str, str]]
FACTORS = tuple(field.name for field in fields(Cell))[1:]


@cache
def levels(factor: str) -> tuple[str, ...]:
    """Return the levels of a factor; for components, rlplug's own."""
    match factor:
        case "observation":
            return tuple(OBSERVATIONS)
        case "action":
            masked = ("discrete", "multi_discrete")
            return tuple(x for name in ACTIONS for x in (name, *([f"{name}+mask"] if name in masked else [])))
        case "recurrence":
            return ("none", *(name for name in _own("model") if load("model", name).recurrent))
        case "curiosity":
            return ("none", *(name for name in _own("exploration") if _rewards(name)))
        case "noise":
            return ("none", *(name for name in _own("exploration") if not _rewards(name)))
    return {
        "n_step": ("1", "3"),
        "priorities": ("off", "on"),
        "normalization": ("none", "reward", "all"),
        "vector": ("list", "native"),
    }[factor]


def _own(kind: Kind) -> list[str]:
    return [name for (of, name), by in registry.owners().items() if of == kind and by[0].distribution == "rlplug"]


def _rewards(exploration: str) -> bool:
    return load("exploration", exploration).intrinsic_reward is not Exploration.intrinsic_reward


@cache
def for_agents(algorithm: str) -> bool:
    """Return whether an algorithm is for several agents, and refuses one."""
    box, algo = Box(-1.0, 1.0, (3,), np.float32), _composed(f"algo={option_of('algo', algorithm)}", *CPU).algo

    def accepts(*agents: str) -> bool:
        try:
            algo.needs(EnvSpec({"agents": Group(box, Discrete(2), agents)}, {"state": box}))
        except ConfigError:
            return False
        return True

    return accepts("first", "second") and not accepts()


@cache
def _replays(algorithm: str) -> bool:
    return _composed(f"algo={option_of('algo', algorithm)}", *CPU).buffer.cls.gives >= {"windows"}


@cache
def _composed(*words: str) -> RunConfig:
    return compose(words)


def raw_of(words: Sequence[str]) -> dict[str, Any]:
    """Return Hydra's config of ``words``, which begin with the algorithm and ``CPU``."""
    first = 1 + len(CPU)
    raw = copy.deepcopy(_composed(*words[:first]).raw)
    for word in words[first:]:
        put(raw, word)
    return raw


def put(raw: dict[str, Any], word: str) -> None:
    """Apply an override in place."""
    key, _, text = word.removeprefix("+").partition("=")
    value, (kind, _, path) = yaml.safe_load(text), key.partition("@")
    if kind in SEVERAL:
        value = {name: node_of(kind, name) for name in value}
    elif kind in KINDS:
        value = node_of(kind, value)  # type: ignore[arg-type]
    *parents, last = (path or key).split(".")
    node = raw
    for parent in parents:
        node = node[parent]
    node[last] = value


def _small(node: dict[str, Any], prefix: str = "") -> list[str]:
    """Return overrides that make everything small."""
    words: list[str] = []
    for key, value in node.items():
        if isinstance(value, dict):
            words += _small(value, f"{prefix}{key}.")
        elif key in SMALL and value is not None:
            small = [SMALL[key]] * len(value) if isinstance(value, list) else SMALL[key]
            words.append(f"{prefix}{key}={small}".replace(" ", ""))
    return words


# ---- a cell runs -----------------------------------------------------------------------------------------------------


def check_cell(cell: Cell, *words: str) -> None:
    """Check a short run and an evaluation: finite losses, every part learns, and the environment gets valid actions.

    Args:
        words: further overrides.

    Raises:
        AssertionError, RunError: a check fails; a note has the command line.
    """
    try:
        trainer = cell.build(*words)
        try:
            _check_run(trainer)
        finally:
            trainer.close()
    except Exception as error:
        error.add_note(f"{cell}: python -m rlplug {' '.join([*cell.words, *words])}")
        raise


def _check_run(trainer: Trainer) -> None:
    learner, before = trainer.learner, {}
    for root in (trainer.algorithm, *trainer.policy.exploration.values()):
        for name, who in trainables(learner, root).items():
            for part, of in learner.parts(who).items():
                label = f"{type(root).__name__} {name} {part}"
                before[label] = of.params, [p.detach().clone() for p in of.params]
    history = play(trainer)
    for losses in history.losses:
        wrong = [key for key, value in losses.items() if not torch.isfinite(value).all()]
        require(not wrong, f"{', '.join(wrong)} is not finite")
    for part, (now, then) in before.items():
        require(any(not torch.equal(a, b) for a, b in zip(now, then, strict=True)), f"{part} changed no parameter")
        require(all(torch.isfinite(p).all() for p in now), f"{part} has a parameter that is not finite")
    trainer.agreement.request_stop(0)
    for name, value in trainer.reports.evaluate(trainer).items():
        require(math.isfinite(value), f"{name} is not a number")
