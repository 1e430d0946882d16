"""One shard: environments that keep step and the policy that plays them, from segment to segment."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from rlplug import tree
from rlplug.api import Algorithm, Exploration, VecEnv
from rlplug.collection.nonfinite import check_segment
from rlplug.collection.perturbing import acting_with
from rlplug.collection.segment import OneCopy, SegmentMemory, as_it_is, copied, merged, on_device, only, to_array
from rlplug.context import EnvShard, RunContext
from rlplug.contract import results
from rlplug.envs.checking import Bounds
from rlplug.envs.silence import watched
from rlplug.types import Batch, Group, Mode, Tree, Weights, groups_of

RESULT = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
COLUMN = {"is_first": np.bool_, "valid": np.bool_}
CORE = RESULT | COLUMN
BEGINS = "agent_is_first"
NOTHING = nullcontext()


class ShardCollector:
    """Plays the environments of one shard in this process. A subclass plays the rows of a segment.

    The tensors of a segment are this collector's own memory, valid until the next ``collect``.

    Args:
        seeds: one for each environment of ``shard``.
        keys: what is kept of a segment, beside ``CORE`` and ``alive``; None: what the algorithm needs.
        normalize: what the policy sees of an observation.
        preprocess: what the learner sees of a segment; None: what there is.
        gradients: returns what is stored as ``gradients`` with a segment; None: nothing is.
        call: calls a method with a batch, as ``Compiler.call``.
        records: record whole rollouts of environments that trade tensors on a device.
    """

    extra_rows = 1  # of memory, beyond the transitions of a segment

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
        preprocess: Callable[[Batch], Batch] | None = None,
        gradients: Callable[[Batch], Batch] | None = None,
        call: Callable[..., Any] = operator.call,
        records: bool = False,
    ) -> None:
        self._call, self.preprocess = call, preprocess or as_it_is
        self.env, self.algorithm, self.ctx, self.shard, self.seeds = env, algorithm, ctx, shard, seeds
        self.exploration, self.gradients = dict(exploration or {}), gradients
        self.num_envs, self.autoreset, self.normalize = len(shard.env_ids), env.autoreset, normalize
        self.keys = (*ctx.needs.keys, *ctx.needs.recorded) if keys is None else keys
        self.has_agents, self.nested = ctx.spec.has_agents, ctx.spec.nested
        self._kept = (*self.keys, *CORE, *(("alive",) if self.has_agents else ()))
        checked = env.traits.check_bounds and not self.has_agents
        self.bounds = Bounds(ctx.spec.single_agent.obs) if checked else None
        cpu, device = ctx.device.type == "cpu", env.traits.device
        there = device is not None
        self.np: Any = torch if there else np
        """what computes with rows: they stay on the environment's device, if it has one"""
        self._one_copy = None if cpu or there else OneCopy()
        self._to_device = partial(on_device, device=ctx.device) if self._one_copy else as_it_is
        self._to_array = as_it_is if there else torch.Tensor.numpy if cpu else to_array
        self._records = records and there and env.traits.traceable
        self._from_host = partial(on_device, device=device) if there else as_it_is
        self._step: Callable[[Any], Batch] = self._first_step
        self._reset = watched(env, env.reset, shard.env_ids)
        self.failed_episodes = 0  # that ended because their environment failed
        own = [x for x in self.exploration.values() if type(x).perturb_weights is not Exploration.perturb_weights]
        self._perturbing: dict[Mode, Sequence[Exploration]] = {"explore": own}
        perturbs = any(type(x).perturb is not Exploration.perturb for x in self.exploration.values())
        self._own_logp = perturbs and "logp" in ctx.needs.recorded
        self._restarts = 0  # times that new episodes began as the environments could not be restored
        self._memory: dict[int, SegmentMemory] = {}  # by transitions of a segment
        self._eager, self._read = False, set[str]()  # whether acting is not compiled now; keys of it that are written
        self._open: Batch = {}  # the row that the next segment begins with

    def reset(self, tasks: Tree = None) -> None:
        """Begin an episode in every environment.

        Raises:
            RunError: a first observation is NaN or infinite.
        """
        first = results.check_rows(self.env, "reset", self._reset(self.seeds, tasks), self.num_envs)
        self._open = first | self._from_host({key: np.ones(self.num_envs, dtype) for key, dtype in COLUMN.items()})
        check_segment(tree.map(lambda x: torch.as_tensor(x)[None], self._open), 0, self.shard.env_ids)
        # what the first row of an episode has for the row before it, and what a row has that nobody acts on
        zeros = (self._zeros(first, self._previous), self._zeros(first, self._result))
        self._no_previous, self._no_result = map(self._from_host, zeros)
        self._open = merged(self._open, copied(self._no_previous))
        for part in groups_of(self._open).values() if BEGINS in self.ctx.needs.keys else ():
            part[BEGINS] = part["alive"].copy()
        self._observed = {key: tuple(first[key]) if key in self.nested else () for key in first}  # by the environment
        seen = merged(first, self._no_previous)
        self._inputs = (*seen, "is_first")  # keys that the policy sees
        self._group_inputs = {name: tuple(seen[name]) for name in self.nested}
        self.carry: Batch = self.algorithm.initial_carry(self.num_envs)
        self.noise: dict[str, Batch] = {key: x.initial_carry(self.num_envs) for key, x in self.exploration.items()}

    def _zeros(self, first: Batch, function: Callable[[Group, tuple[int, ...]], Batch]) -> Batch:
        """Return ``function(group, shape)`` of every group: ``[B]``, or ``[B, N]`` where it has agents."""
        groups = self.ctx.spec.groups
        if self.nested:
            return {name: zeros for name in groups if (zeros := function(groups[name], first[name]["alive"].shape))}
        (group,) = groups.values()
        return function(group, first["alive"].shape if self.has_agents else (self.num_envs,))

    def _previous(self, group: Group, shape: tuple[int, ...]) -> Batch:
        action = np.zeros((*shape, *(group.action.shape or ())), group.action.dtype)
        before = {"prev_action": action, "prev_reward": np.zeros(shape, np.float32)}
        before |= {BEGINS: np.zeros(shape, np.bool_)} if self.has_agents else {}
        return only(before, self.ctx.needs.keys)

    def _result(self, group: Group, shape: tuple[int, ...]) -> Batch:
        return {key: np.zeros(shape, dtype) for key, dtype in RESULT.items()}

    def _seen(self, batch: Batch) -> Batch:
        """Return what the policy sees."""
        seen = {key: batch[key] for key in self._inputs}
        return seen | {name: only(batch[name], keys) for name, keys in self._group_inputs.items()}

    def example(self) -> Batch:
        """Return one row ``[B, ...]`` as it will be stored. Environment and algorithm are asked once.

        Raises:
            ConfigError: one of them returns something else than it should, or a key that is needed is given by none.
        """
        with results.acting(self.algorithm, self.exploration, self.ctx.spec, self.num_envs):
            if not self._open:
                self.reset()
            with torch.inference_mode(), self.ctx.acting(self.shard):
                rows = self._postprocess(self._allocate(2).tensors)
        given = {*rows, "action_mask"}.union(*(rows[name] for name in self.nested))
        if missing := [key for key in self.keys if key not in given and key not in self.ctx.needs.recorded]:
            raise results.nobody_gives(missing, self.algorithm, self.exploration)
        return tree.take(rows, 0)

    def _first_step(self, action: Any) -> Batch:
        """Execute the first action, and check what the environments return."""
        self._step = watched(self.env, self.env.step, self.shard.env_ids)
        return results.check_rows(self.env, "step", self._step(action), self.num_envs)

    def collect(
        self,
        rows: int,
        mode: Mode = "explore",
        stop: Callable[[], bool] | None = None,
        weights: Weights | None = None,
        env_steps: int = 0,
        raw: bool = False,
    ) -> Batch:
        """Collect a segment ``[rows + 1, B]``.

        Args:
            stop: asked between rows; columns that it makes short are padded with ``valid=False``.
            weights: to play with; None: the algorithm's own, as they are.
            env_steps: of the run, for messages.
            raw: return all that was written, without ``Algorithm.postprocess``.

        Raises:
            RunError: it failed, and a number that is NaN or infinite came before.
        """
        if not self._open:
            self.reset()
        others = weights is not None or self._perturbing.get(mode)
        self._eager = mode != "explore" or bool(others and self.ctx.device.type != "cpu")  # recordings read own weights
        try:
            with (
                torch.inference_mode(),
                self.ctx.acting(self.shard),
                self._acting_weights(mode, weights or {}) if others else NOTHING,
            ):
                if rows not in self._memory:
                    self._memory[rows] = self._allocate(rows + self.extra_rows)
                segment = self._play(self._memory[rows], rows, mode, stop)
                if raw:
                    return segment
                given = {} if self.gradients is None else {"gradients": self.gradients(segment)}
                segment = only(segment, self._kept, self.nested) if mode == "greedy" else self._postprocess(segment)
            return segment | given
        except Exception:
            check_segment(self.raw_segment(rows), env_steps, self.shard.env_ids)
            raise

    def _play(self, memory: SegmentMemory, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        """Play transitions from the open row on, leave the last row open, and return ``[rows + 1, B, ...]``."""
        raise NotImplementedError

    def _postprocess(self, segment: Batch) -> Batch:
        """Return what is kept of a segment, with first priorities where they are needed, by the weights that acted."""
        segment = self.algorithm.postprocess(segment)
        if "priority" in self.keys and "priority" not in segment:
            seen = on_device(self.preprocess(only(segment, self._kept, self.nested)), self.ctx.device)
            first = torch.where(seen["valid"][:-1], self.algorithm.initial_priorities(seen), 0.0)
            segment = segment | {"priority": torch.cat((first, first.new_zeros(1, self.num_envs))).cpu()}
        return only(segment, self._kept, self.nested)

    def raw_segment(self, rows: int) -> Batch:
        """Return all that the last ``collect(rows)`` wrote; if it raised, the rows behind are of an earlier segment."""
        return self._memory[rows].tensors if rows in self._memory else {}

    def _acting_weights(self, mode: Mode, weights: Weights) -> AbstractContextManager[None]:
        def decide() -> Batch:
            return self._decide(on_device(self._seen(self._open), self.ctx.device), self.carry, "greedy")[0]

        return acting_with(self.algorithm, weights, self._perturbing.get(mode, ()), decide)

    # ---- the policy -----------------------------------------------------------------------------------------------

    def _act(self, step: Batch, mode: Mode) -> Batch:
        """Act on a row of every environment, and move the recurrent state on. ``step``: tensors ``[B, ...]``."""
        given = {"step": step, "carry": self.carry, "noise": self.noise}
        found = self._acted(given, mode) if self._eager else self._call(self._acted, given)
        self.carry, self.noise = found["carry"], found["noise"]
        return found["out"] if self._one_copy is None else self._one_copy.arrays(found["out"])

    def _acted(self, batch: Batch, mode: Mode = "explore") -> Batch:
        """Return what the policy does; what is written of it comes from a device in one piece."""
        batch = batch | {"step": self._to_device(batch["step"])}
        found = self._explore(batch) if mode == "explore" else self._decided(batch, mode)
        if self._one_copy is not None:
            found["out"] = self._one_copy.packed(only(found["out"], self._read, self.nested))
        return found

    def _explore(self, batch: Batch) -> Batch:
        found, noise = self._decided(batch, "explore"), dict[str, Batch]()
        for name, extra in self.exploration.items():
            found["out"], noise[name] = extra.perturb(found["out"], batch["step"], batch["noise"][name])
        if self._own_logp:  # it was of another action
            found["out"].pop("logp", None)
        return found | {"noise": noise}

    def _decided(self, batch: Batch, mode: Mode) -> Batch:
        out, carry = self._decide(batch["step"], batch["carry"], mode)
        return {"out": out, "carry": carry, "noise": batch["noise"]}

    def _decide(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        if self.normalize is not None:
            step = step | {"obs": self.normalize(step["obs"])}
        return self.algorithm.act(step, carry, mode)

    # ---- memory, and what is written into it: at a row, at rows, or at (rows [B], environments [B]) -----------------

    def _allocate(self, length: int) -> SegmentMemory:
        """Allocate ``length`` rows. Which keys the algorithm returns is found by asking it once.

        Keys that have no memory are not brought to the host. All are kept where the algorithm has a ``postprocess``,
        which may read them.
        """
        like = merged(copied(self._open), self._no_result)
        step = on_device(self._seen(self._open), self.ctx.device)
        explored = {"step": step, "carry": self.carry, "noise": self.noise}
        generators = {role: generator.get_state() for role, generator in self.ctx.generators.items()}
        outs = [self._explore(explored)["out"], self._decide(step, self.carry, "random")[0]]
        some = {key for key in self.ctx.needs.recorded if any(key in out for out in outs)}
        some = {key for key in some if not all(key in out for out in outs)}  # what is not always given is not recorded
        for out in outs:
            out = {key: x for key, x in out.items() if key not in some}
            if type(self.algorithm).postprocess is Algorithm.postprocess:
                out = only(out, ("action", *self.keys), self.nested)
            for part, more in [(like, out), *((like[name], out[name]) for name in self.nested)]:
                part |= self._written({key: x for key, x in more.items() if key not in part})
        for role, state in generators.items():
            self.ctx.generators[role].set_state(state)
        if "carry" in self.keys:
            like.setdefault("carry", self._written(self.carry))
        self._read = {*like, *(key for name in self.nested for key in like[name])}
        return SegmentMemory(like, length, self._one_copy is not None)

    def _written(self, batch: Batch) -> Batch:
        """Return what the algorithm returned as it is written."""
        return tree.map(self._to_array, batch)

    def _write_carry(self, arrays: Batch, index: Any) -> None:
        """Write the recurrent state before a row."""
        if "carry" in self.keys:
            tree.put(arrays["carry"], index, self._written(self.carry))

    def _write_output(self, arrays: Batch, index: Any, out: Batch) -> None:
        """Write what the algorithm returned when it acted on a row."""
        for key, value in out.items():
            if key in arrays:
                if key in self.nested:
                    self._write_output(arrays[key], index, value)
                elif isinstance(value, dict):
                    tree.put(arrays[key], index, tree.map(self._to_array, value))
                else:  # as above, in a third of the time
                    arrays[key][index] = self._to_array(value)

    def _write_previous(self, arrays: Batch, index: Any, following: Any) -> None:
        """Write what was acted on into the row that follows; behind a final observation, zeros: nobody acted on it."""
        if not self._no_previous:
            return
        for part in [arrays[name] for name in self.nested] or [arrays]:
            acted = arrays["valid"][index]
            if self.has_agents:
                acted = (acted.T & part["alive"][index].T).T
            if BEGINS in part:  # who is alive and did not act
                part[BEGINS][following] = part["alive"][following] & ~acted
            for key in ("prev_action", "prev_reward"):
                if key in part:
                    values = part[key.removeprefix("prev_")][index]
                    where = acted.reshape(*acted.shape, *(1 for _ in values.shape[acted.ndim :]))
                    part[key][following] = self.np.where(where, values, 0)

    def _write_value(self, arrays: Batch, index: Any, mode: Mode, where: Any = None) -> None:
        """Write the value of rows on which nobody acts; only in the environments ``where [B]``, if given."""
        if "value" not in self.keys:
            return
        out, _ = self._decide(on_device(tree.take(self._seen(arrays), index), self.ctx.device), self.carry, mode)
        values = self._written(only(out, arrays) | {name: only(out[name], arrays[name]) for name in self.nested})
        if where is not None:
            (row, env), values = index, tree.take(values, where)
            index = row[where], env[where]
        tree.put(arrays, index, values)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Return where the stream stands; ``env`` is None where the environments cannot save theirs."""
        stream = {"open": copied(self._open), "carry": self.carry, "noise": self.noise}
        return stream | {"env": self.env.state(), "cuts": self._restarts}

    def load(self, state: Tree) -> None:
        """Continue from ``state``. Where it has no environments, every environment begins a new episode."""
        if not self._open:
            self.reset()
        self._open, self._restarts = self._from_host(copied(state["open"])), state["cuts"]
        self.carry, self.noise = on_device(state["carry"], self.ctx.device), on_device(state["noise"], self.ctx.device)
        if state["env"] is not None:
            self.env.load(state["env"])
        else:
            # The open row ends its episode as a final observation does; the next row is the first of a new one.
            self._open["valid"] = self.np.zeros_like(self._open["valid"])
            self._restarts += 1
            seeds = np.random.SeedSequence([*self.seeds, self._restarts]).generate_state(self.num_envs)
            self._restart(self._reset(seeds.tolist()))

    def _restart(self, first: Batch) -> None:
        """Continue with first observations ``[B, ...]`` behind the open row."""
        raise NotImplementedError

    def close(self) -> None:
        self.env.close()
