"""What runs in the processes of Ray: collection for one actor, and putting segments together."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Plan
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.collection.nonfinite import blame_nonfinite
from rlplug.collection.segment import on_host
from rlplug.config import parse
from rlplug.context import ResolvedRun
from rlplug.distributed.rng import global_state, load_global_state, seed_global_from
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.evaluation.evaluator import EVALUATION, Evaluator
from rlplug.registry.installed import check_same
from rlplug.trainer.policy import TRAINING, Policy
from rlplug.types import Batch, Mode, Tree


class Copy:
    """A copy of the policy in a process of its own. Ray makes it; nothing in it knows Ray.

    One call follows another, but for ``word``, which is answered meanwhile.
    """

    def __init__(self) -> None:
        self._row, self._rows, self._moved = 0, 0, time.monotonic()

    def build(
        self,
        raw: Mapping[str, Any],
        spec: bytes,
        env_ids: Sequence[int],
        plan: Plan,
        path: list[str],
        versions: Mapping[str, str],
    ) -> Tree:
        """Make everything that ``collect`` needs.

        Args:
            raw: the resolved configuration.
            spec: the environment's spaces, pickled.
            env_ids: the environments that are played here.
            path: where the learner finds modules.
            versions: what it has installed.

        Returns:
            Where the stream stands.

        Raises:
            ConfigError: something else is installed here.
        """
        sys.path.extend(folder for folder in path if folder not in sys.path)
        check_same(versions, "an actor")
        config = parse(dict(raw))
        set_up_torch(plan, config.deterministic)
        device = device_of(plan)
        resolved = ResolvedRun.read(config, plan, pickle.loads(spec))
        self.policy = Policy(config, resolved.context(device, env_ids), acts_only=True)
        return self._begin(env_ids)

    def _begin(self, env_ids: Sequence[int]) -> Tree:
        raise NotImplementedError

    def _follow(self, rows: int, statistics: Tree, weights: dict[str, np.ndarray] | None) -> None:
        """Act as the learner does now; ``weights`` None: those of the last call."""
        self._row, self._rows, self._moved = 0, rows, time.monotonic()
        self.policy.load_statistics(statistics)
        if weights is not None:
            self.policy.load_acting_weights(weights)

    def word(self) -> tuple[int, int, float]:
        """Row that is being played, of how many, and for how many seconds."""
        return self._row, self._rows, time.monotonic() - self._moved

    def _tick(self) -> bool:
        self._row += 1
        self._moved = time.monotonic()
        return False


class Actor(Copy):
    """Plays some of the run's environments."""

    def _begin(self, env_ids: Sequence[int]) -> Tree:
        seed_global_from(self.policy.config.seed, TRAINING, env_ids[0])  # other actors draw other numbers
        self.collector = self.policy.collector(env_ids)
        self.collector.reset()
        return self._state(self.policy.statistics())

    def load(self, state: Tree, anew: int = 0) -> None:
        """Go on where ``state`` says.

        Args:
            anew: 0, or leave its episodes, and begin others; each number gives others.
        """
        collector = state["collector"]
        if anew:
            collector = collector | {"env": None, "cuts": collector["cuts"] + anew - 1}
        self.collector.load(collector)
        generator = self.policy.ctx.generators["actor"]
        if len(state["generator"]) == len(generator.get_state()):  # else it drew on another kind of device
            generator.set_state(torch.tensor(state["generator"]))
        if "global" in state:
            load_global_state(state["global"], self.policy.ctx.device)

    def collect(
        self, rows: int, mode: Mode, statistics: Tree, weights: dict[str, np.ndarray] | None
    ) -> tuple[Batch, bytes]:
        """A segment, as arrays, and where the stream stands behind it, pickled: Ray takes longer for small arrays.

        Args:
            weights: None: those of the last call.
        """
        self._follow(rows, statistics, weights)
        with blame_nonfinite(self.collector, rows, statistics["env_steps"], self.collector.shard.env_ids):
            (segment,) = self.collector.collect(rows, stop=self._tick, mode=mode)
        return on_host(segment), pickle.dumps(self._state(statistics))

    def _state(self, statistics: Tree) -> Tree:
        """On the host: who keeps it has no such device, maybe."""
        return {
            "collector": copy_to_host(self.collector.state()),
            "generator": self.policy.ctx.generators["actor"].get_state().numpy(),
            "global": global_state(self.policy.ctx.device),
            "exploration": self.policy.changed_exploration(statistics),
        }


class Examiner(Copy):
    """Plays some columns of evaluations."""

    def _begin(self, env_ids: Sequence[int]) -> Tree:
        policy = self.policy
        episodes = policy.config.eval.episodes
        self.evaluator = Evaluator(
            policy.env, policy.algorithm, policy.ctx, episodes, policy.normalize, columns=env_ids
        )
        self.evaluator.begin()
        return {}

    def load(self, state: Tree, anew: int = 0) -> None:
        """Every evaluation begins anew."""

    def collect(
        self, number: int, mode: Mode, statistics: Tree, weights: dict[str, np.ndarray] | None
    ) -> tuple[list[tuple[float, int]], bytes]:
        """(return, length) of the episodes of evaluation ``number``."""
        self._follow(0, statistics, weights)
        seed_global_from(self.policy.config.seed, EVALUATION, number, self.evaluator.shard.env_ids[0])
        return self.evaluator.play(number, self._tick), pickle.dumps({})


def device_of(plan: Plan) -> torch.device:
    """Where an actor acts: one that was given no GPU is shown those of its machine all the same."""
    given = plan.actors is not None and plan.actors.num_gpus > 0
    return torch.device("cuda" if given and torch.cuda.is_available() else "cpu")


class Aggregator:
    """Puts the segments of several actors side by side."""

    def beside(self, *segments: Batch) -> Batch:
        return tree.cat(segments, 1)
