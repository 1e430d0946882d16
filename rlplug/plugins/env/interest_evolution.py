"""A recommender system whose users' interests follow what they watch, after RecSim's interest evolution: Ie et al. 2019
(arXiv:1909.04847, section 5.2), with finitely many users, so that the optimum is known exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from pydantic import Field

from rlplug.api import Context, EnvTraits, VecEnv
from rlplug.envs.checking import check_seeds, check_state
from rlplug.envs.spaces import single_agent
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, option, settings
from rlplug.types import Batch, ConfigError, Tree


class InterestEvolution(VecEnv):
    """Every step shows a user a slate of documents; the user watches one of them, or none.

    A document has a topic and a quality, which is the reward for watching it. The user chooses document ``i`` of the
    slate with probability ``v_i / (v_0 + sum_j v_j)``, ``v_i = exp(choice_scale * interest in its topic)`` and
    ``v_0 = exp(no_click)``. The interest in the watched topic then rises by one level with probability ``drift``, and
    falls by one level otherwise. A session ends after a step with probability ``1 - persistence``.

    The observation has the user's interests ``user [topics]``, the ``documents [n, topics + 1]``, topics one-hot and
    quality, and the ``response`` to the last slate: the position ``click`` that was watched (the size of the slate:
    none), and its ``engagement``, the quality of what was watched. A document that is twice in a slate is shown once.

    Raises:
        ConfigError: the slate is larger than the number of documents.
    """

    autoreset = AutoresetMode.NEXT_STEP
    traits = EnvTraits()

    @settings
    class Config:
        num_documents: PositiveInt = option("Candidate documents.")
        slate_size: PositiveInt = option("Documents of a slate.")
        num_topics: PositiveInt = option("Topics.")
        num_levels: Annotated[int, Field(ge=2)] = option("Levels of the interest in a topic, from -1 to 1.")
        resample: bool = option("Sample other documents for every step; false: the same ones always.")
        choice_scale: PositiveFloat = option("Weight of an interest in the choice.")
        no_click: float = option("Score of watching nothing.")
        drift: UnitFloat = option("Probability that the interest in a watched topic rises.")
        persistence: UnitFloat = option("Probability that a session goes on after a step.")
        world_seed: NonNegativeInt = option("Seed of the documents.")
        max_episode_steps: PositiveInt = option("Truncate sessions after this many steps.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        if ctx.render:
            raise ConfigError("eval.record", "a recommender cannot render; use 0")
        if cfg.slate_size > cfg.num_documents:
            said = f"{cfg.slate_size} is more than env.num_documents={cfg.num_documents}"
            raise ConfigError("env.slate_size", f"{said}; use at most {cfg.num_documents}")
        self.cfg, self.num_envs, self.levels = cfg, len(ctx.env_ids), np.linspace(-1.0, 1.0, cfg.num_levels)
        self.fixed = self.draw(np.random.default_rng(cfg.world_seed))
        response = Dict({"click": Discrete(cfg.slate_size + 1), "engagement": Box(0.0, 1.0, ())})
        documents = Box(0.0, 1.0, (cfg.num_documents, cfg.num_topics + 1))
        obs = Dict({"user": Box(-1.0, 1.0, (cfg.num_topics,)), "documents": documents, "response": response})
        action = MultiDiscrete([cfg.num_documents] * cfg.slate_size)
        self.spec = replace(single_agent(obs, action, cfg.max_episode_steps), native_spaces={})

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Return the features of sampled documents, ``[n, topics + 1]``: topics of higher number are better."""
        cfg = self.cfg
        topic = rng.integers(cfg.num_topics, size=cfg.num_documents)
        quality = (topic + rng.random(cfg.num_documents)) / cfg.num_topics
        return np.concatenate((np.eye(cfg.num_topics)[topic], quality[:, None]), 1).astype(np.float32)

    def reset(self, seeds: Sequence[int], tasks: Tree = None) -> Batch:
        """Begin session 0 of every column.

        Raises:
            ValueError: there is not one seed per column.
        """
        check_seeds(seeds, self.num_envs)
        zeros = np.zeros(self.num_envs, np.int64)
        self.seeds, self.steps = [int(seed) for seed in seeds], zeros.copy()
        self.sessions, self.over = zeros.copy(), zeros.astype(np.bool_)
        self.user = np.zeros((self.num_envs, self.cfg.num_topics), np.int64)
        self.documents = np.repeat(self.fixed[None], self.num_envs, 0)
        self.click, self.engagement = zeros + self.cfg.slate_size, zeros.astype(np.float32)
        for i in range(self.num_envs):
            self._begin(i)
        return self._row()

    def step(self, action: Any) -> Batch:
        """Show a slate ``[B, slate_size]`` to every user; a column whose session has ended begins another one."""
        reward, terminated = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros_like(terminated)
        for i in range(self.num_envs):
            if self.over[i]:
                self.sessions[i] += 1
                self._begin(i)
                continue
            rng = self._rng(i, 1)
            choice, rises, stays = rng.random(3)
            slate = np.asarray(action[i])
            watched = int(np.searchsorted(self.probabilities(self.user[i], self.documents[i], slate).cumsum(), choice))
            self.click[i], self.engagement[i] = self.cfg.slate_size, 0.0
            if watched < len(slate):
                *topic, quality = self.documents[i, slate[watched]]
                self.click[i], self.engagement[i] = watched, quality
                at, change = int(np.argmax(topic)), 1 if rises < self.cfg.drift else -1
                self.user[i, at] = np.clip(self.user[i, at] + change, 0, self.cfg.num_levels - 1)
            self.steps[i] += 1
            reward[i], terminated[i] = self.engagement[i], stays >= self.cfg.persistence
            truncated[i] = not terminated[i] and self.steps[i] >= self.cfg.max_episode_steps
            self.over[i] = terminated[i] or truncated[i]
            if self.cfg.resample:
                self.documents[i] = self.draw(rng)
        return self._row() | {"reward": reward, "terminated": terminated, "truncated": truncated}

    def probabilities(self, user: np.ndarray, documents: np.ndarray, slate: np.ndarray) -> np.ndarray:
        """Return the probability of watching each document of a slate, and of none: ``[slate_size + 1]``.

        Args:
            user: levels of the interests, ``[topics]``.
        """
        interest = documents[slate, :-1] @ self.levels[user]
        first = np.array([d not in slate[:i] for i, d in enumerate(slate)])
        v = np.append(np.where(first, np.exp(self.cfg.choice_scale * interest), 0.0), np.exp(self.cfg.no_click))
        return v / v.sum()

    def _begin(self, i: int) -> None:
        self.steps[i], self.over[i] = 0, False
        rng = self._rng(i, 0)
        self.user[i] = rng.integers(self.cfg.num_levels, size=self.cfg.num_topics)
        self.documents[i] = self.draw(rng) if self.cfg.resample else self.fixed
        self.click[i], self.engagement[i] = self.cfg.slate_size, 0.0

    def _rng(self, i: int, purpose: int) -> np.random.Generator:
        """Return the generator of a column's step: of its session's beginning (0), or of the user's response (1)."""
        return np.random.default_rng([self.seeds[i], int(self.sessions[i]), int(self.steps[i]), purpose])

    def _row(self) -> Batch:
        response = {"click": self.click.copy(), "engagement": self.engagement.copy()}
        user = self.levels[self.user].astype(np.float32)
        return {"obs": {"user": user, "documents": self.documents.copy(), "response": response}}

    NAMES = ("sessions", "steps", "over", "user", "documents", "click", "engagement")

    def state(self) -> Tree:
        """Return the state that determines the columns' next rows."""
        return {"seeds": self.seeds} | {name: getattr(self, name).copy() for name in self.NAMES}

    def load(self, state: Tree) -> None:
        """Restore ``state``.

        Raises:
            ValueError: it is no state of this environment.
        """
        check_state(self.state(), state, ("seeds", "sessions", "steps", "user", "click"))
        for name, most in (("user", self.cfg.num_levels - 1), ("click", self.cfg.slate_size)):
            if state[name].max() > most:
                raise ValueError(f"env.{name} is above {most}")
        self.seeds = list(state["seeds"])
        for name in self.NAMES:
            setattr(self, name, np.array(state[name]))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    @property
    def users(self) -> np.ndarray:
        """Return the levels of the interests of all users, ``[users, topics]``."""
        return np.array([*itertools.product(range(self.cfg.num_levels), repeat=self.cfg.num_topics)])

    @property
    def slates(self) -> np.ndarray:
        """Return all slates of different documents, ``[slates, slate_size]``, documents in ascending order."""
        return np.array([*itertools.combinations(range(self.cfg.num_documents), self.cfg.slate_size)])

    def solve(self, gamma: float = 1.0, policy: np.ndarray | None = None) -> np.ndarray:
        """Compute values over all users and slates of the fixed documents, by value iteration.

        Args:
            gamma: discount factor, besides the end of sessions.
            policy: the slate of every user, ``[users]``; None: the best one.

        Returns:
            ``Q(user, slate)``, ``[users, slates]``.
        """
        cfg, users, slates = self.cfg, self.users, self.slates
        place = {tuple(user): i for i, user in enumerate(users.tolist())}
        chance = np.array([[self.probabilities(user, self.fixed, slate) for slate in slates] for user in users])
        topic, quality = self.fixed[:, :-1].argmax(1), self.fixed[:, -1].astype(np.float64)
        step = np.eye(cfg.num_topics, dtype=np.int64)
        fell, rose = (
            np.array(
                [[place[tuple((user + d).clip(0, cfg.num_levels - 1).tolist())] for d in sign * step] for user in users]
            )
            for sign in (-1, 1)
        )  # [users, topics]
        value, stays, rows = np.zeros(len(users)), gamma * cfg.persistence, np.arange(len(users))
        while True:
            later = cfg.drift * value[rose] + (1.0 - cfg.drift) * value[fell]  # [users, topics]
            item = quality + stays * later[:, topic]  # [users, documents]
            q = (chance[..., :-1] * item[:, slates]).sum(-1) + chance[..., -1] * stays * value[:, None]
            new = q.max(1) if policy is None else q[rows, policy]
            if np.abs(new - value).max() < 1e-10:
                return q
            value = new
