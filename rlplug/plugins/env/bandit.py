"""Contextual bandits: one with a known optimum, and replayed logged rounds.

Rounds are the rows of long, truncated episodes: if every round ended its episode, half of all rows would be final
observations.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, Space
from gymnasium.vector import AutoresetMode

from rlplug.api import Context, VecEnv
from rlplug.envs.checking import check_seeds, check_state
from rlplug.envs.spaces import single_agent
from rlplug.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, option, settings
from rlplug.types import Batch, ConfigError, Tree

BLOCK = 64
"""rounds sampled at a time"""


class Bandit(VecEnv):
    """A ``VecEnv`` of rounds. A subclass defines the observation and the rewards of a round.

    All columns are at the same round.

    Args:
        obs: observation space of a round.
        extra: name and space of the extra of every row.
        max_episode_steps: rounds per episode.
    """

    autoreset = AutoresetMode.NEXT_STEP

    def __init__(
        self, ctx: Context, obs: Space[Any], num_actions: int, extra: dict[str, Space[Any]], max_episode_steps: int
    ) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "a bandit cannot render; use 0")
        self.num_envs, self.limit = len(ctx.env_ids), max_episode_steps
        plain = single_agent(obs, Discrete(num_actions), max_episode_steps)
        self.spec = replace(plain, extras=extra, offers=frozenset({"bandit"}))

    def row(self, number: int) -> Batch:
        """Return ``obs`` and the extra of round ``number`` of every column, ``[B, ...]``."""
        raise NotImplementedError(f"{type(self).__name__}.row")

    def reward(self, number: int, action: np.ndarray) -> np.ndarray:
        """Return the reward ``[B]`` of ``action [B]`` in round ``number``."""
        raise NotImplementedError(f"{type(self).__name__}.reward")

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Start with round 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
        """
        check_seeds(seeds, self.num_envs)
        self.begin([int(seed) for seed in seeds], 0, 0)
        return self.row(0)

    def step(self, action: np.ndarray) -> Batch:
        """Return rewards. After the last round of an episode, the next one is returned twice: as final and as first."""
        reward, truncated = np.zeros(self.num_envs, np.float32), False
        if self._length < self.limit:
            reward[:] = self.reward(self._number, action)
            self._number, self._length = self._number + 1, self._length + 1
            truncated = self._length == self.limit
        else:
            self._length = 0
        ends = {"terminated": np.zeros(self.num_envs, np.bool_), "truncated": np.full(self.num_envs, truncated)}
        return self.row(self._number) | {"reward": reward} | ends

    def state(self) -> Tree:
        """Return the state that determines the next rounds."""
        return {"seeds": self._seeds, "number": self._number, "length": self._length}

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this bandit.
        """
        check_state(self.state(), state, tuple(state))
        self.begin(state["seeds"], state["number"], state["length"])

    def begin(self, seeds: list[int], number: int, length: int) -> None:
        """Continue with round ``number``, after ``length`` rounds of its episode."""
        self._seeds, self._number, self._length = seeds, number, length

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class LinearBandit(Bandit):
    """Arms with mean reward ``x^T theta``, both unit vectors, and Gaussian noise.

    Every row has the mean reward of all arms, ``expected_reward [arms]``, so the regret of a choice is known. Each
    round's context is sampled uniformly from the part of the sphere without negative features: an arm that is good in
    one context is good in most, so a policy without exploration may miss the best one. ``world_seed`` determines
    ``theta``, equal in all columns, in training and evaluation.
    """

    @settings
    class Config:
        num_actions: PositiveInt = option("Number of arms.")
        feature_dim: PositiveInt = option("Features of a context.")
        per_arm: bool = option("Features per arm and one shared theta; false: one context and a theta per arm.")
        reward_noise_std: NonNegativeFloat = option("Standard deviation of a reward around its mean.")
        world_seed: NonNegativeInt = option("Seed of theta.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many rounds.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        self.cfg, self.shape = cfg, (cfg.num_actions, cfg.feature_dim) if cfg.per_arm else (cfg.feature_dim,)
        arms = Box(-1.0, 1.0, (cfg.num_actions,), np.float32)
        super().__init__(
            ctx,
            Box(-1.0, 1.0, self.shape, np.float32),
            cfg.num_actions,
            {"expected_reward": arms},
            cfg.max_episode_steps,
        )
        thetas = 1 if cfg.per_arm else cfg.num_actions
        self.theta = unit(np.random.default_rng(cfg.world_seed).standard_normal((thetas, cfg.feature_dim)))

    def begin(self, seeds: list[int], number: int, length: int) -> None:
        super().begin(seeds, number, length)
        self._block = -1

    def row(self, number: int) -> Batch:
        self._draw(number)
        at = number % BLOCK
        return {"obs": self._obs[:, at], "expected_reward": self._expected[:, at].astype(np.float32)}

    def reward(self, number: int, action: np.ndarray) -> np.ndarray:
        self._draw(number)
        at = number % BLOCK
        return self._expected[np.arange(self.num_envs), at, action] + self._noise[:, at]

    def _draw(self, number: int) -> None:
        """Sample the block of rounds that contains ``number``: ``[B, BLOCK, ...]``, from each column's seed."""
        if number // BLOCK == self._block:
            return
        self._block, size = number // BLOCK, int(np.prod(self.shape))
        drawn = [np.random.default_rng([seed, self._block]).standard_normal((BLOCK, size + 1)) for seed in self._seeds]
        numbers = np.stack(drawn)
        self._noise = numbers[..., -1] * self.cfg.reward_noise_std
        self._obs = unit(np.abs(numbers[..., :-1]).reshape(self.num_envs, BLOCK, *self.shape)).astype(np.float32)
        x = self._obs.astype(np.float64)
        self._expected = np.clip(x @ (self.theta[0] if self.cfg.per_arm else self.theta.T), -1.0, 1.0)


def unit(x: np.ndarray) -> np.ndarray:
    """Return ``x [..., d]`` scaled to length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True).clip(min=1e-12)


class LoggedBandit(Bandit):
    """Logged rounds of another policy, in file order; column ``i`` of ``n`` has every ``n``-th round from ``i``.

    Every row has the logged arm, ``logged_action``. The reward is the logged one if the same arm is chosen, else a
    placeholder 0 that algorithms must ignore: only rounds in which both agree count (Li et al. 2011, arXiv:1003.5956,
    algorithm 2). This is unbiased if the logged arms were sampled uniformly. Otherwise ``propensity`` holds their
    probabilities, and a round is kept with probability ``min(propensity) / propensity``, which makes them uniform.

    Raises:
        ConfigError: the file does not hold logged rounds, or the algorithm does not support them.
    """

    @settings
    class Config:
        path: str = option("An .npz or .csv of rounds; see docs/bandits.md.")
        num_actions: PositiveInt | None = option("Number of arms; null: as logged.")
        max_episode_steps: PositiveInt = option("Truncate episodes after this many rounds.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        log = read(Path(cfg.path), cfg.num_actions)
        many, *shape = log["context"].shape
        arms = shape[0] if len(shape) == 2 else cfg.num_actions or int(log["action"].max()) + 1
        extra: dict[str, Space[Any]] = {"logged_action": Discrete(arms)}
        extra |= {"action_mask": MultiBinary(arms)} if "action_mask" in log else {}
        super().__init__(ctx, Box(-np.inf, np.inf, shape, np.float32), arms, extra, cfg.max_episode_steps)
        if ctx.needs.keys and "logged_action" not in ctx.needs.keys:
            said = "learns from every row, but only recorded rounds count in which it chooses the recorded action"
            raise ConfigError("algo", f"{said}; use algo=linucb, lints or lingreedy")
        self.rounds = many // ctx.num_envs  # per column
        whole = self.rounds * ctx.num_envs
        if not whole:
            raise ConfigError("num_envs", f"{ctx.num_envs} are more than the {many} rounds of env.path")
        if ctx.role == "actor" and ctx.total_steps > whole:
            said = f"{ctx.total_steps} are more than the {many} rounds of env.path, each of which counts once"
            raise ConfigError("total_steps", f"{said}; use {whole}")
        columns = {key: x[:whole].reshape(self.rounds, ctx.num_envs, *x.shape[1:]) for key, x in log.items()}
        self._record = {key: x[:, [*ctx.env_ids]] for key, x in columns.items()}

    def row(self, number: int) -> Batch:
        shown = {"obs": "context", "logged_action": "action"} | {
            key: key for key in self._record if key == "action_mask"
        }
        return {key: self._record[name][number % self.rounds] for key, name in shown.items()}

    def reward(self, number: int, action: np.ndarray) -> np.ndarray:
        at = number % self.rounds
        return np.where(action == self._record["action"][at], self._record["reward"][at], 0.0)


def read(path: Path, num_actions: int | None = None) -> dict[str, np.ndarray]:
    """Read logged rounds.

    Returns:
        ``context [N, d]`` or ``[N, arms, d]`` float32, ``action [N]`` int64, ``reward [N]`` float32, and, if the file
        has one, ``action_mask [N, arms]`` bool.

    Raises:
        ConfigError: the file cannot be read, or its arrays differ in length.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError("env.path", f"{path} {why}")

    try:
        found = dict(np.load(path, allow_pickle=False)) if path.suffix == ".npz" else _columns(path)
    except (OSError, ValueError, EOFError, BadZipFile, csv.Error, zlib.error) as error:
        raise refuse(f"cannot be read as recorded rounds: {error}") from error
    if missing := [key for key in ("context", "action", "reward") if key not in found]:
        raise refuse(f"lacks {', '.join(missing)}; it has {', '.join(found) or 'nothing'}")
    context, action, rounds = found["context"], found["action"], found["context"].shape[:1]
    propensity = found.get("propensity", np.ones(rounds))
    one_each = all(x.shape == rounds for x in (action, found["reward"], propensity))
    if context.ndim not in (2, 3) or not context.size or not one_each:
        shapes = ", ".join(f"{key} {[*x.shape]}" for key, x in found.items())
        raise refuse(f"has {shapes}; it should have context [N, d] or [N, arms, d], the others [N], and N above 0")
    for key, x in found.items():
        if x.dtype.kind not in "fiub" or not np.isfinite(x).all():
            raise refuse(f"has a {key} that is not a finite number")
    arms = context.shape[1] if context.ndim == 3 else num_actions or np.inf
    if num_actions not in (None, arms):
        raise ConfigError("env.num_actions", f"is {num_actions}, but {path} has features of {arms} arms; use null")
    if (action != np.round(action)).any() or action.min() < 0 or action.max() >= arms:
        raise refuse(f"has actions that are not whole numbers from 0 to {arms - 1:g}")
    if propensity.min() <= 0 or propensity.max() > 1:
        raise refuse("has a propensity that is not in (0, 1]")
    kept = {"context": np.float32, "action": np.int64, "reward": np.float32, "action_mask": np.bool_}
    log = {key: found[key].astype(dtype) for key, dtype in kept.items() if key in found}
    if (mask := log.get("action_mask")) is not None:
        arms = arms if np.isfinite(arms) else log["action"].max() + 1
        if mask.shape != (*rounds, arms) or not mask[np.arange(*rounds), log["action"]].all():
            raise refuse(f"has an action_mask that is not [N, {arms}], or forbids an arm that was taken")
    stays = np.random.default_rng(0).random(rounds) < propensity.min() / propensity
    return {key: x[stays] for key, x in log.items()}


def _columns(path: Path) -> dict[str, np.ndarray]:
    """Read a .csv with a header: ``action``, ``reward``, optionally ``propensity``; other columns are features."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [*csv.reader(file)]
    if not rows:
        raise ValueError("it is empty")
    head, *rows = rows
    if uneven := [n for n, row in enumerate(rows, 2) if len(row) != len(head)]:
        raise ValueError(f"line {uneven[0]} has not the {len(head)} columns of the head")
    table = np.array(rows, np.float64).reshape(len(rows), len(head))
    named = {key: table[:, i] for i, key in enumerate(head) if key in ("action", "reward", "propensity")}
    return {"context": table[:, [i for i, key in enumerate(head) if key not in named]]} | named
