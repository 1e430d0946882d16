"""Features cross: a cell of the matrix is an algorithm with a level of every factor, and runs or is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from rlplug import registry
from rlplug.api import Exploration
from rlplug.config import RunConfig, compose, parse
from rlplug.config.schema import SEVERAL
from rlplug.registry import KINDS, Kind, load
from rlplug.run.build import build
from rlplug.testing.checks.runs import CPU, callbacks_of, node_of, option_of, play, require, trainables
from rlplug.testing.worlds import ACTIONS, OBSERVATIONS
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError

TORSO = {"image": "cnn", "dict": "multi_input", "tuple": "multi_input"}
"""the model of an observation; others: mlp"""
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
    "hiddens": 8,
    "inverse_net_hiddens": 8,
    "forward_net_hiddens": 8,
    "predictor_hiddens": 8,
    "feature_dim": 8,
}
"""options wherever they are, so that runs are short; of a list, every element"""


@dataclass(frozen=True)
class Cell:
    """An algorithm, and a level of every factor."""

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
        """The command line."""
        torso, action = TORSO.get(self.observation, "mlp"), self.action.removesuffix("+mask")
        extra = [name for name in (self.curiosity, self.noise) if name != "none"]
        if extra and self.noise == "none":  # curiosity changes rewards alone, and some algorithms need to try something
            extra = [*raw_of([f"algo={option_of('algo', self.algorithm)}", *CPU])["exploration"], *extra]
        words = [
            f"algo={option_of('algo', self.algorithm)}",
            *CPU,
            *(word for word in registry.tried_with("algo", self.algorithm) if not word.startswith("env=")),
            "env=gymnasium",
            "env.id=rlplug.testing.worlds:World-v0",
            *(word for word in registry.tried_with("algo", self.algorithm) if word.startswith("env.")),
            f"env.vectorization={self.vector}",
            f"+env.kwargs.observation={self.observation}",
            f"+env.kwargs.action={action}",
            f"exploration=[{','.join(extra)}]",
        ]
        if action != self.action:
            words.append("+env.kwargs.mask=true")
        if self.recurrence == "none":
            words.append(f"model={torso}")
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
            del raw["train_batch_size"]  # a rollout is learned from whole
        return words + _small(raw)

    def config(self) -> RunConfig:
        """What ``compose(words)`` gives, in a hundredth of the time.

        Raises:
            ConfigError: some option is wrong.
        """
        return parse(raw_of(self.words))

    def build(self, *words: str) -> Trainer:
        """The run, with nothing collected yet.

        Raises:
            ConfigError: the cell is refused.
        """
        return build(parse(raw_of([*self.words, *words])), Path())

    def refusal(self) -> str | None:
        """In which words it is refused; None: it is not."""
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
    """The levels of a factor; of components, rlplug's own."""
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
def _replays(algorithm: str) -> bool:
    return _composed(f"algo={option_of('algo', algorithm)}", *CPU).buffer.cls.gives >= {"windows"}


@cache
def _composed(*words: str) -> RunConfig:
    return compose(words)


def raw_of(words: Sequence[str]) -> dict[str, Any]:
    """What Hydra makes of ``words``, which begin with the algorithm and ``CPU``."""
    first = 1 + len(CPU)
    raw = copy.deepcopy(_composed(*words[:first]).raw)
    for word in words[first:]:
        put(raw, word)
    return raw


def put(raw: dict[str, Any], word: str) -> None:
    """Change what a word of the command line says, in place."""
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
    """Words that make everything small."""
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
    """A short run and an evaluation: finite losses, and every part learns; the world refuses what it must not be given.

    Args:
        words: further ones of the command line.

    Raises:
        AssertionError, RunError: it does not; a note has the command line.
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
    record = play(trainer)
    for losses in record.losses:
        wrong = [key for key, value in losses.items() if not torch.isfinite(value).all()]
        require(not wrong, f"{', '.join(wrong)} is not finite")
    for part, (now, then) in before.items():
        require(any(not torch.equal(a, b) for a, b in zip(now, then, strict=True)), f"{part} has moved no parameter")
        require(all(torch.isfinite(p).all() for p in now), f"{part} has a parameter that is not finite")
    trainer.agreement.request_stop(0)
    for name, value in callbacks_of(trainer).evaluate(trainer).items():
        require(math.isfinite(value), f"{name} is not a number")
