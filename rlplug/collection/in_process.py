"""What the collectors of the learner's process share: environments and a policy, from segment to segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Algorithm, Exploration, VecEnv
from rlplug.collection.nonfinite import check_segment
from rlplug.collection.segment import SegmentMemory, copied, on_device, on_host, only
from rlplug.context import EnvShard, RunContext
from rlplug.envs.checking import Bounds
from rlplug.types import Batch, ConfigError, Mode, Tree, Weights

CORE = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_, "is_first": np.bool_, "valid": np.bool_}


class InProcessCollector:
    """``api.Collector`` over environments and an algorithm of this process. A subclass plays the rows of a segment.

    The tensors of a segment are this collector's own memory, valid until the next ``collect``.

    Args:
        shard: the environments that are collected.
        seeds: one for each of them.
        keys: what is kept of a segment, beside ``CORE``; None: what the algorithm needs.
        normalize: what the policy sees of an observation.
    """

    extra_rows = 1
    """rows of memory beyond the transitions of a segment"""

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
    ) -> None:
        self.env, self.algorithm, self.ctx, self.shard, self.seeds = env, algorithm, ctx, shard, seeds
        self.exploration = dict(exploration or {})
        self.num_envs = len(shard.env_ids)
        self.keys = ctx.needs.keys if keys is None else keys
        self.normalize = normalize
        (group, *others) = ctx.spec.groups.values()
        checked = getattr(env, "check_bounds", True) and not others and not group.agents
        self.bounds = Bounds(group.obs) if checked else None
        self.carry: Batch = {}
        self.noise: dict[str, Batch] = {}
        cpu = ctx.device.type == "cpu"
        self._to_device = (lambda step: step) if cpu else partial(on_device, device=ctx.device)
        self._to_array = torch.Tensor.numpy if cpu else lambda x: x.cpu().numpy()
        self._step = env.step
        self.failed_episodes = 0
        """episodes that ended because their environment failed"""
        self._restarts = 0  # how often new episodes began because the environments could not be restored
        self._memory: dict[int, SegmentMemory] = {}
        self._open: Batch = {}  # the row that the next segment begins with

    @property
    def autoreset(self) -> AutoresetMode:
        """Return when the environments reset an episode that has ended."""
        return self.env.autoreset

    def start(self) -> None:
        """Do nothing: this collector needs nothing outside of this process."""

    def reset(self, tasks: Tree = None) -> None:
        """Begin an episode in every environment.

        Raises:
            RunError: a first observation is NaN or infinite.
        """
        n, needed = self.num_envs, self.ctx.needs.keys
        first = self.env.reset(self.seeds, tasks)
        self._open = first | {"is_first": np.ones(n, np.bool_), "valid": np.ones(n, np.bool_)}
        check_segment(tree.map(lambda x: torch.as_tensor(x)[None], self._open), 0, self.shard.env_ids, self.bounds)
        self._no_previous: Batch = {}  # what the first row of an episode has for the row before it
        if "prev_action" in needed:
            space = self.ctx.spec.single_agent.action
            self._no_previous["prev_action"] = np.zeros((n, *(space.shape or ())), space.dtype)
        if "prev_reward" in needed:
            self._no_previous["prev_reward"] = np.zeros(n, np.float32)
        self._open |= copied(self._no_previous)
        self._observed = tuple(first)  # keys that the environment gives
        self._inputs = (*self._observed, *self._no_previous, "is_first")  # keys that the policy sees
        self.carry = self.algorithm.initial_carry(n)
        self.noise = {name: extra.initial_carry(n) for name, extra in self.exploration.items()}

    def example(self) -> Batch:
        """Return one row ``[B, ...]`` as it will be stored. Environment and algorithm are asked once.

        Raises:
            ValueError: the algorithm needs a key that neither it nor the environment gives.
        """
        if not self._open:
            self.reset()
        with torch.inference_mode(), self.ctx.acting(self.shard):
            rows = self._kept(self.algorithm.postprocess(self._allocate(2).tensors))
        missing = [key for key in self.keys if key not in rows and key != "action_mask"]
        if missing:
            raise ValueError(
                f"{type(self.algorithm).__name__}.needs names keys that nobody gives: {', '.join(missing)}"
            )
        return tree.take(rows, 0)

    def _kept(self, rows: Batch) -> Batch:
        return only(rows, (*self.keys, *CORE))

    def collect(
        self,
        rows: int,
        weights: Mapping[str, Weights] | None = None,
        tasks: Tree = None,
        stop: Callable[[], bool] | None = None,
        mode: Mode = "explore",
        further: int = 0,
    ) -> Iterator[Batch]:
        if weights is not None:
            self.algorithm.load_state_dict(weights["main"], strict=False)
        if tasks is not None or not self._open:
            self.reset(tasks)
        with torch.inference_mode(), self.ctx.acting(self.shard), self._perturbed_weights(mode):
            if rows not in self._memory:
                self._memory[rows] = self._allocate(rows + self.extra_rows)
            segment = self._play(self._memory[rows], rows, mode, stop)
        yield self._kept(segment if mode == "greedy" else self.algorithm.postprocess(segment))

    def _play(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        """Play ``rows`` transitions from the open row on, and leave the last row open.

        Returns:
            The segment with every key that ``memory`` has, leaves ``[rows + 1, B, ...]``.
        """
        raise NotImplementedError

    def raw_segment(self, rows: int) -> Batch:
        """Return all that the last ``collect(rows)`` wrote; if it raised, the rows behind are of an earlier segment."""
        return self._memory[rows].tensors if rows in self._memory else {}

    @contextmanager
    def _perturbed_weights(self, mode: Mode) -> Iterator[None]:
        """Act with the weights that the exploration modules make of the algorithm's own."""
        modules = [x for x in self.exploration.values() if type(x).perturb_weights is not Exploration.perturb_weights]
        if mode != "explore" or not modules:
            yield
            return
        keys = set(self.algorithm.actor_keys())
        params = {name: p for name, p in self.algorithm.named_parameters() if name in keys}
        weights = plain = {name: p.data for name, p in params.items()}
        for extra in modules:
            weights = extra.perturb_weights(weights)
        step = on_device(only(self._open, self._inputs), self.ctx.device)
        try:
            unperturbed, _ = self._decide(step, "greedy")
            for name, p in params.items():
                p.data = weights[name]
            perturbed, _ = self._decide(step, "greedy")
            for extra in modules:
                extra.adapt_noise(unperturbed, perturbed)
            yield
        finally:
            for name, p in params.items():
                p.data = plain[name]

    # ---- the policy -----------------------------------------------------------------------------------------------

    def _act(self, step: Batch, mode: Mode) -> Batch:
        """Act on a row of every environment, and move the recurrent state on. ``step``: tensors ``[B, ...]``."""
        step = self._to_device(step)
        out, self.carry = self._decide(step, mode)
        if mode == "explore":
            for name, extra in self.exploration.items():
                out, self.noise[name] = extra.perturb(out, step, self.noise[name])
        return out

    def _decide(self, step: Batch, mode: Mode) -> tuple[Batch, Batch]:
        if self.normalize is not None:
            step = step | {"obs": self.normalize(step["obs"])}
        return self.algorithm.act(step, self.carry, mode)

    # ---- memory and its writers -----------------------------------------------------------------------------------

    def _allocate(self, length: int) -> SegmentMemory:
        """Allocate ``length`` rows. Which keys the algorithm returns is found by asking it once.

        Keys that have no memory are not brought to the host. All are kept where the algorithm has a ``postprocess``,
        which may read them.
        """
        memory = SegmentMemory()
        memory.allocate(self._open | {key: np.zeros(self.num_envs, dtype) for key, dtype in CORE.items()}, length)
        generators = {role: g.get_state() for role, g in self.ctx.generators.items()}
        step = on_device({k: v for k, v in self._open.items() if k != "valid"}, self.ctx.device)
        for mode in ("explore", "random"):
            out, _ = self._decide(step, mode)
            if mode == "explore":
                for name, extra in self.exploration.items():
                    out, _ = extra.perturb(out, step, self.noise[name])
            if type(self.algorithm).postprocess is Algorithm.postprocess:
                out = only(out, ("action", *self.keys))
            memory.allocate(on_host(out), length)
        for role, state in generators.items():
            self.ctx.generators[role].set_state(state)

        arrays = memory.arrays
        memory.write_output = partial(_write_output, arrays, self._to_array)
        if "carry" in self.keys:
            memory.allocate({"carry": on_host(self.carry)}, length)
            memory.write_carry = partial(self._write_carry, arrays["carry"])
        if self._no_previous:
            previous = [(arrays[key.removeprefix("prev_")], arrays[key]) for key in self._no_previous]
            memory.write_previous = partial(_write_previous, previous, arrays["valid"])
        if "value" in self.keys:  # it stands in row T, too
            memory.write_value = partial(self._write_value, arrays)
        return memory

    def _write_carry(self, arrays: Batch, index: Any) -> None:
        tree.put(arrays, index, on_host(self.carry))

    def _write_value(self, arrays: Batch, index: Any, mode: Mode, where: Any = None) -> None:
        """Write what the algorithm returns for rows; only in the environments ``where [B]``, if given."""
        step = tree.take({key: arrays[key] for key in self._inputs}, index)
        out, _ = self._decide(on_device(step, self.ctx.device), mode)
        values = on_host(only(out, arrays))
        if where is not None:
            (row, env), values = index, tree.take(values, where)
            index = row[where], env[where]
        tree.put(arrays, index, values)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Return where the stream stands; ``env`` is None where the environments cannot save theirs."""
        return {
            "open": copied(self._open),
            "carry": self.carry,
            "noise": self.noise,
            "env": self.env.state(),
            "cuts": self._restarts,
        }

    def load(self, state: Tree) -> None:
        """Continue from ``state``. Where it has no environments, every environment begins a new episode.

        Raises:
            ConfigError: it is that of actors.
        """
        if "actors" in state:
            count = len(state["actors"])
            raise ConfigError(
                "hardware.actors.count",
                f"the run was collected by {count} actors to a rank, and continues with as many",
            )
        if not self._open:
            self.reset()
        self._open, self._restarts = copied(state["open"]), state["cuts"]
        self.carry, self.noise = on_device(state["carry"], self.ctx.device), on_device(state["noise"], self.ctx.device)
        if state["env"] is not None:
            self.env.load(state["env"])
        else:
            # The open row ends its episode as a final observation does; the next row is the first of a new one.
            self._open["valid"] = np.zeros(self.num_envs, np.bool_)
            self._restarts += 1
            seeds = np.random.SeedSequence([*self.seeds, self._restarts]).generate_state(self.num_envs)
            self._restart(self.env.reset([int(seed) for seed in seeds]))

    def _restart(self, first: Batch) -> None:
        """Continue with ``first``, first observations ``[B, ...]``, behind the open row."""
        raise NotImplementedError

    def close(self) -> None:
        self.env.close()


def _write_output(arrays: Batch, to_array: Callable[[Any], Any], index: Any, out: Batch) -> None:
    for key, value in out.items():
        if key in arrays:
            if isinstance(value, dict):
                tree.put(arrays[key], index, tree.map(to_array, value))
            else:  # as above, in a third of the time
                arrays[key][index] = to_array(value)


def _write_previous(previous: Sequence[tuple[Any, Any]], valid: Any, index: Any, following: Any) -> None:
    """Write what was acted on; behind a final observation, which nobody acted on, zeros."""
    for values, memory in previous:
        acted = valid[index].reshape(-1, *(1 for _ in values.shape[2:]))
        memory[following] = np.where(acted, values[index], 0)
