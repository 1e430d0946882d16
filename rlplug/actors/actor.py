"""Classes that run in Ray's processes: collection, evaluation, concatenation. They do not import Ray."""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any, TypeAlias

import numpy as np
import torch

from rlplug import tree
from rlplug.actors import copies
from rlplug.api import Job, Plan
from rlplug.buffer.episodes import OF_EPISODE
from rlplug.checkpointing.serialize import copy_to_host
from rlplug.config import parse
from rlplug.context import ResolvedRun
from rlplug.distributed.rng import global_state, load_global_state, seed_global_from
from rlplug.distributed.torch_setup import set_up_torch
from rlplug.distributed.versions import check_same
from rlplug.evaluation.evaluator import EVALUATION, Evaluator
from rlplug.host import on_host
from rlplug.script import loads
from rlplug.trainer.policy import TRAINING, BehaviorPolicy
from rlplug.types import Batch, Mode, Tree

Weights: TypeAlias = dict[str, np.ndarray] | None  # None: unchanged


RUN = ("env_steps", "tasks")  # of the statistics: arguments of ``collect``


class RemotePolicy:
    """A copy of the policy in a separate process. Only ``heartbeat`` is called while another method runs."""

    def __init__(self) -> None:
        self._row, self._rows, self._last_step = 0, 0, time.monotonic()
        self._idle_since: float | None = None  # None: has not collected yet

    def build(
        self,
        raw: dict[str, Any],
        objects: bytes,
        spec: bytes,
        env_ids: range,
        plan: Plan,
        path: list[str],
        versions: dict[str, str],
    ) -> Tree:
        """Build all parts that ``collect`` needs; return the state before the first segment.

        Args:
            objects: objects of the user's script; see ``script.dumps``.
            spec: pickled spaces of the environment, which may need the learner's ``sys.path``, ``path``.
            versions: installed versions of the learner.

        Raises:
            ConfigError: the installed versions here differ.
        """
        sys.path.extend(folder for folder in path if folder not in sys.path)
        check_same(versions, "an actor")
        loads(objects)
        config = parse(raw)
        set_up_torch(plan, config.deterministic)
        resolved = ResolvedRun(config, plan, pickle.loads(spec))
        ctx = resolved.context(actor_device(plan), env_ids, world_size=plan.world_size)
        self.policy = BehaviorPolicy(config, ctx, acts_only=True)
        return self._begin(env_ids)

    def _begin(self, env_ids: range) -> Tree:
        raise NotImplementedError

    def _update(self, rows: int, statistics: Tree, weights: Weights) -> None:
        """Load the learner's current weights and statistics, and reset the count of rows."""
        self._row, self._rows, self._last_step = 0, rows, time.monotonic()
        if weights is not None:
            copies.load_acting_weights(self.policy, weights)
        copies.load_statistics(self.policy, statistics)  # last, because a pool of policies grows with the weights

    def heartbeat(self) -> tuple[int, int, float]:
        """Return the current row, the number of rows, and the seconds since the last environment step."""
        return self._row, self._rows, time.monotonic() - self._last_step

    def _count_row(self) -> bool:
        """Count a row. Return False, because it is passed as ``stop``."""
        self._row, self._last_step = self._row + 1, time.monotonic()
        return False


class Actor(RemotePolicy):
    """Collects from some of the run's environments."""

    def _begin(self, env_ids: range) -> Tree:
        seed_global_from(self.policy.config.seed, TRAINING, env_ids[0])  # different in every actor
        self.collector, self.player = self.policy.shard(env_ids), self.policy.player()
        self.collector.reset()
        return self._state(copies.statistics(self.policy))

    def load(self, state: Tree, new_episodes: int = 0) -> None:
        """Restore ``state``; ``new_episodes`` above 0 begins new episodes, which differ by this number."""
        collector = state["collector"]
        if new_episodes:
            collector = collector | {"env": None, "cuts": collector["cuts"] + new_episodes - 1}
        self.collector.load(collector)
        generator = self.policy.ctx.generators["actor"]
        if len(state["generator"]) == len(generator.get_state()):  # otherwise from another device type
            generator.set_state(torch.tensor(state["generator"]))
        load_global_state(state["global"], self.policy.ctx.device)

    def collect(self, rows: int, mode: Mode, statistics: Tree, weights: Weights) -> tuple[Batch, bytes]:
        """Return a segment of arrays ``[T+1, b, ...]`` and the state after it, pickled because Ray is slow with trees.

        ``spent`` in the state has the idle seconds before it and its duration.
        """
        began = time.monotonic()
        self._update(rows, statistics, weights)
        segment = on_host(self.collector.collect(rows, mode, self._count_row, **{key: statistics[key] for key in RUN}))
        state, ended = self._state(statistics), time.monotonic()
        state["metrics"] = [own for _, own in self.collector.episode_metrics() if own]
        state["spent"] = began - (self._idle_since or began), ended - began
        self._idle_since = ended
        return segment, pickle.dumps(state)

    def play(self, jobs: list[Job], named: Tree, statistics: Tree, weights: Weights) -> tuple[list[Batch], bytes]:
        """Return the episodes of each job as arrays, and an empty state, because jobs do not change the state."""
        self._update(0, statistics, weights)
        return [on_host(batch) for batch in self.player.play_all(jobs, named, self._count_row)], pickle.dumps(None)

    def _state(self, statistics: Tree) -> Tree:
        """Return the state on the host, because the learner may not have this device."""
        return {
            "collector": copy_to_host(self.collector.state()),
            "generator": self.policy.ctx.generators["actor"].get_state().numpy(),
            "global": global_state(self.policy.ctx.device),
            "exploration": copies.changed_exploration(self.policy, statistics),
        }


class EvalActor(RemotePolicy):
    """Plays some columns of every evaluation. It is stateless: an evaluation depends on its number only."""

    def _begin(self, env_ids: range) -> Tree:
        policy, cfg = self.policy, self.policy.config.eval
        self.evaluator = Evaluator(policy.env, policy.algorithm, policy.ctx, cfg, policy.normalize, env_ids)
        self.evaluator.begin()
        return {}

    def collect(self, number: int, mode: Mode, statistics: Tree, weights: Weights) -> tuple[Batch, bytes]:
        """Return results of the episodes of evaluation ``number``, as arrays, and an empty state."""
        evaluator, env_ids = self.evaluator, self.evaluator.shard.env_ids
        self._update(0, statistics, weights)
        seed_global_from(self.policy.config.seed, EVALUATION, number, env_ids[0])
        played = evaluator.play(evaluator.job, number, None, self._count_row, env_ids)
        return on_host({key: played[key] for key in OF_EPISODE if key in played}), pickle.dumps({})


def actor_device(plan: Plan) -> torch.device:
    """Return the device of an actor. Ray may show the machine's GPUs even to actors without one."""
    has_gpu = plan.actors is not None and plan.actors.num_gpus > 0
    return torch.device("cuda" if has_gpu and torch.cuda.is_available() else "cpu")


class Aggregator:
    """Concatenates segments ``[T+1, b, ...]`` of several actors before the learner fetches them."""

    def concatenate(self, *segments: Batch) -> Batch:
        return tree.cat(segments, 1)
