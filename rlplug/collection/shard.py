"""One shard: environments stepped together, and the policy that acts in them, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Algorithm, Exploration, SegmentSpec, VecEnv
from rlplug.collection.acting import Acting
from rlplug.collection.finishing import Transform, finished, stored, transforms
from rlplug.collection.nonfinite import check_segment
from rlplug.collection.segment import Layout, SegmentMemory
from rlplug.compiler.compiler import Compiler
from rlplug.context import EnvShard, RunContext
from rlplug.contract import results
from rlplug.envs.checking import Bounds
from rlplug.envs.episode_metrics import drained
from rlplug.envs.silence import watched
from rlplug.host import OneCopy, copied, on_device, to_array
from rlplug.types import Batch, Mode, Tree, Weights


class ShardCollector:
    """Collects segments from the environments of one shard in this process. Subclasses play the rows.

    The collector owns the tensors of a segment, which are valid until the next ``collect``.

    Args:
        seeds: one per environment of ``shard``.
        keys: stored keys in addition to ``CORE`` and ``alive``; None: the algorithm's needs.
        normalize: maps observations to the policy's inputs.
        finishing: transforms of a segment; None: those of the algorithm.
        compiler: compiles acting, or whole rollouts if it records on a device and environments exchange tensors.
    """

    extra_rows = 1  # rows of memory in addition to the transitions of a segment

    def __init__(
        self,
        env: VecEnv,
        algorithm: Algorithm,
        ctx: RunContext,
        shard: EnvShard,
        seeds: Sequence[int],
        exploration: Mapping[str, Exploration] | None = None,
        keys: Sequence[str] | None = None,
        normalize: Callable[[Any], Any] | None = None,
        finishing: Sequence[Transform] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.env, self.algorithm, self.ctx, self.shard, self.seeds = env, algorithm, ctx, shard, seeds
        self.keys = (*ctx.needs.keys, *ctx.needs.recorded) if keys is None else keys
        self.finishing = transforms(algorithm, ctx, self.keys) if finishing is None else finishing
        self.num_envs, device = len(shard.env_ids), env.traits.device
        records = compiler is not None and compiler.graphs is not None and device is not None
        self._recorder = compiler if records and env.traits.traceable else None
        one_copy = OneCopy() if ctx.device.type != "cpu" and device is None else None
        acts = None if self._recorder else compiler  # a recorded rollout includes acting
        self.acting = Acting(algorithm, exploration or {}, ctx, normalize, acts, one_copy)
        self._step: Callable[[Any], Batch] = self._first_step
        self._reset = watched(env, env.reset, shard.env_ids)
        checks = env.traits.check_bounds and not ctx.spec.has_agents
        self.bounds = Bounds(ctx.spec.single_agent.obs) if checks else None
        self.failed_episodes = 0  # episodes ended by a failed environment
        self._restarts = -1  # restarts with new episodes, as environments were not restorable; -1: no rows yet
        self._memory: dict[int, SegmentMemory] = {}  # by number of transitions
        self._like: Batch = {}  # one row of this memory
        self._open: Batch = {}  # first row of the next segment

    def reset(self, tasks: Tree = None, seeds: Sequence[int] | None = None) -> None:
        """Begin an episode in every environment.

        Args:
            seeds: replace those of this collector.

        Raises:
            RunError: a first observation is NaN or infinite.
        """
        given = self._reset(self.seeds if seeds is None else seeds, tasks)
        first = results.check_rows(self.env, "reset", given, self.num_envs)
        self._layout = Layout.of(first, self.ctx.spec, self.ctx.needs, self.num_envs)
        self._open = copied(self._layout.seen | {"valid": self._layout.seen["is_first"]})
        check_segment(tree.map(lambda x: torch.as_tensor(x)[None], self._open), 0, self.shard.env_ids)
        self.acting.begin(self.num_envs)
        for memory in self._memory.values():  # so that cells that no row sets do not depend on earlier rows
            tree.map(torch.Tensor.zero_, memory.tensors)

    @property
    def spec(self) -> SegmentSpec:
        """Return the layout of its segments, determined by one reset, action and step.

        Raises:
            ConfigError: environments or algorithm return a wrong result, or a needed key is missing.
        """
        with results.acting(self.algorithm, self.acting.exploration, self.ctx.spec, self.num_envs):
            if not self._open:
                self.reset()
            with torch.inference_mode(), self.ctx.acting(self.shard):
                rows = finished(self._allocate(2).tensors, (*self.finishing, stored(self.ctx, self.keys)))
        given = {*rows, "action_mask"}.union(*(rows[name] for name in self.ctx.spec.nested))
        if missing := [key for key in self.keys if key not in given and key not in self.ctx.needs.recorded]:
            raise results.missing_keys(missing, self.algorithm, self.acting.exploration)
        row, columns = tree.take(rows, 0), (slice(0, self.num_envs),)
        return SegmentSpec(tree.map(torch.Tensor.cpu, row), self.env.autoreset, columns, self.bounds)

    def _first_step(self, action: Any) -> Batch:
        """Execute the first action, and check the result of the environments."""
        self._step = watched(self.env, self.env.step, self.shard.env_ids)
        return results.check_rows(self.env, "step", self._step(action), self.num_envs)

    def collect(
        self,
        rows: int,
        mode: Mode = "explore",
        stop: Callable[[], bool] | None = None,
        weights: Weights | None = None,
        env_steps: int = 0,
        tasks: Tree = None,
    ) -> Batch:
        """Collect a segment ``[rows + 1, B]``.

        Args:
            stop: called between rows; if it returns True, the rest is padded with ``valid=False``.
            weights: weights to play with; None: the algorithm's current ones.
            env_steps: environment steps of the run, for messages.
            tasks: tasks of the episodes that begin in it, of all environments of the run; None: unchanged.

        Raises:
            RunError: collection failed after a number that is NaN or infinite.
        """
        own = None if tasks is None else tree.take(tasks, [*self.shard.env_ids])
        if not self._open or (own is not None and self._restarts < 0):
            self.reset(own)
        elif own is not None:
            self.env.assign(own)
        row, self._restarts = partial(tree.chosen, self._layout.seen, self._open), max(self._restarts, 0)
        try:
            with torch.inference_mode(), self.ctx.acting(self.shard), self.acting.playing(mode, weights, row):
                if rows not in self._memory:
                    self._memory[rows] = self._allocate(rows + self.extra_rows)
                return finished(self._play(self._memory[rows], rows, stop), self.finishing)
        except Exception:
            if rows in self._memory:
                check_segment(self._memory[rows].tensors, env_steps, self.shard.env_ids)
            raise

    def episode_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return column and metrics of each episode that ended since the last call; see ``EnvTraits.metrics``."""
        return drained(self.env.traits)

    def _play(self, memory: SegmentMemory, rows: int, stop: Callable[[], bool] | None) -> Batch:
        """Play transitions from the open row, keep the last row open, and return ``[rows + 1, B, ...]``."""
        raise NotImplementedError

    def _allocate(self, length: int) -> SegmentMemory:
        """Allocate ``length`` rows. Runs the algorithm once to determine its output keys."""
        if not self._like:
            like = tree.merged(self._layout.seen | {"valid": self._open["valid"]}, self._layout.result)
            self._like = tree.merged(like, self.acting.example(tree.chosen(self._layout.seen, self._open), self.keys))
        return SegmentMemory(self._like, length, self._layout.seen, self.acting.one_copy is not None)

    def _write_value(self, memory: SegmentMemory, index: Any, where: Any = None) -> None:
        """Write the value of rows without an action; only for the environments ``where [B]``, if given."""
        if "value" in self.keys and self.acting.mode != "random":
            out = self.acting.judge(tree.take(memory.seen, index))
            memory.write(index if where is None else tuple(x[where] for x in index), out, where)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Return the state of the stream; ``env`` is None if the environments cannot save their state."""
        return {"open": copied(self._open), "env": self.env.state(), "cuts": self._restarts} | self.acting.state()

    def load(self, state: Tree) -> None:
        """Restore ``state``. Without a state of the environments, every environment begins a new episode.

        Raises:
            ValueError: its rows or its recurrent state differ in keys, shapes or dtypes from those after a reset.
            Exception: the policy cannot act on them.
        """
        if not self._open:
            self.reset()
        own = {"open": self._open, "cuts": self._restarts} | self.acting.state()
        tree.check_like(own, tree.only(state, own), "collector", exact=True)
        first, device = copied(state["open"]), self.env.traits.device
        self._open = tree.map(to_array, first) if device is None else on_device(first, device)
        self._restarts = state["cuts"]
        self.acting.load(state)
        with torch.inference_mode(), self.ctx.acting(self.shard):  # raise errors here instead of in the run
            self.acting.example(tree.chosen(self._layout.seen, self._open), self.keys)
        if state["env"] is not None:
            self.env.load(state["env"])
        else:
            # The open row becomes a final observation; the next row begins a new episode.
            self._open["valid"] = self._open["valid"] & False
            self._restarts += 1
            seeds = np.random.SeedSequence([*self.seeds, self._restarts]).generate_state(self.num_envs)
            self._restart(self._reset(seeds.tolist()))

    def _restart(self, first: Batch) -> None:
        """Continue with first observations ``[B, ...]`` after the open row."""
        raise NotImplementedError

    def close(self) -> None:
        self.env.close()
