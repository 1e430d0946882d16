"""RecSim's interest evolution, Ie et al. 2019 (arXiv:1909.04847), as a Gymnasium environment.

Importing this module registers ``RecSim-v0``. RecSim itself is imported by the first environment.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from rlplug.types import ConfigError

PACKAGES = "recsim-no-tf gym gym-notices gin-config absl-py"


class RecSim(gymnasium.Env[Any, Any]):
    """A user of RecSim, with the observations and slates that SlateQ reads.

    The observation has the user's interests ``user [U]``, the ``documents [n, F]``, and the ``response`` to the last
    slate: the position ``click`` that was chosen (the size of the slate: none). RecSim draws from NumPy's global
    generator, so each environment keeps its own state of that generator, which a reset with a seed sets.

    Args:
        num_candidates: documents to choose from.
        slate_size: documents of a slate.
        resample_documents: sample other documents for every step.

    Raises:
        ConfigError: RecSim is not installed; the slate is larger than the number of documents.
    """

    def __init__(self, num_candidates: int, slate_size: int, resample_documents: bool) -> None:
        if not 1 <= slate_size <= num_candidates:
            said = f"{slate_size} is not from 1 to env.kwargs.num_candidates={num_candidates}"
            raise ConfigError("env.kwargs.slate_size", said)
        try:
            self.recsim = importlib.import_module("recsim.environments.interest_evolution")
        except ImportError as error:
            raise ConfigError(
                "env.id", f"RecSim cannot be imported ({error}): pip install --no-deps {PACKAGES}"
            ) from error
        self.options = {"num_candidates": num_candidates, "slate_size": slate_size}
        self.options |= {"resample_documents": resample_documents}
        self.generator = np.random.RandomState(0).get_state()
        self.size, self.env = slate_size, self._make(0)
        row = self._row(self.env.reset())
        parts: dict[str, Any] = {key: Box(-np.inf, np.inf, row[key].shape) for key in ("user", "documents")}
        parts["response"] = Dict({"click": Discrete(slate_size + 1)})
        self.observation_space = Dict(parts)
        self.action_space = MultiDiscrete([num_candidates] * slate_size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a session; with a seed, also sample the documents and the stream of users."""
        super().reset(seed=seed)
        with self._drawing():
            if seed is not None:
                np.random.seed(seed)
                self.env = self._make(seed)
            return self._row(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show a slate ``[slate_size]``."""
        with self._drawing():
            row, reward, over, _ = self.env.step(np.asarray(action).tolist())
        return self._row(row), float(reward), bool(over), False, {}

    def _make(self, seed: int) -> Any:
        return self.recsim.create_environment(self.options | {"seed": seed})

    def _row(self, row: Any) -> dict[str, Any]:
        clicks = [int(answer["click"]) for answer in row["response"] or ()]
        user, documents = np.asarray(row["user"], np.float32), np.asarray([*row["doc"].values()], np.float32)
        return {
            "user": user,
            "documents": documents,
            "response": {"click": clicks.index(1) if 1 in clicks else self.size},
        }

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let NumPy's global generator be this environment's."""
        others = np.random.get_state()
        np.random.set_state(self.generator)
        try:
            yield
        finally:
            self.generator = np.random.get_state()
            np.random.set_state(others)


gymnasium.register("RecSim-v0", f"{__name__}:RecSim", max_episode_steps=1000)
