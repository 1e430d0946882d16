"""Environments that keep in lock step, in the learner's process: streams of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Algorithm, Exploration, VecEnv
from rlplug.collection.nonfinite import check_segment
from rlplug.collection.segment import Rows, copied, on_device, on_host, only, put, row_of, take
from rlplug.context import EnvShard, RunContext
from rlplug.envs.checking import Bounds
from rlplug.types import Batch, ConfigError, Mode, Tree, Weights

CORE = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_, "is_first": np.bool_, "valid": np.bool_}


class NextStepCollector:
    """``api.Collector`` over environments that keep in lock step: one call, one row in every column.

    The tensors of a segment are this source's own memory, valid until the next ``collect``.
    """

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
        self.columns = len(shard.env_ids)
        self.keys = ctx.needs.keys if keys is None else keys
        self.normalize = normalize
        (group, *others) = ctx.spec.groups.values()
        checked = getattr(env, "check_bounds", True) and not others and not group.agents
        self.bounds = Bounds(group.obs) if checked else None
        self.carries = "carry" in self.keys
        self.memory = [key for key in ("prev_action", "prev_reward") if key in ctx.needs.keys]
        self.closes = "value" in self.keys  # which stands on row T too
        self.packs = type(algorithm).postprocess is not Algorithm.postprocess  # and may read what is not kept
        self.host = ctx.device.type == "cpu"
        self.carry: Batch = {}
        self.noise: dict[str, Batch] = {}
        self._step = env.step
        self.broken = 0  # episodes that ended because their environment failed
        self._cuts = 0  # how often the episodes were left because their environments could not be restored
        self._rows: dict[int, Rows] = {}
        self._open: Batch = {}  # the row that the next segment begins with

    def start(self) -> None:
        """There is nothing outside of this process."""

    def begin(self, tasks: Tree = None) -> None:
        """Reset every column.

        Raises:
            RunError: a first observation is NaN or infinite.
        """
        n = self.columns
        first = self.env.reset(self.seeds, tasks)
        self._open = first | {"is_first": np.ones(n, np.bool_), "valid": np.ones(n, np.bool_)}
        check_segment(tree.map(lambda x: torch.as_tensor(x)[None], self._open), 0, self.shard.env_ids, self.bounds)
        self._seen = (*first, *self.memory, "is_first")  # what the policy sees of a row
        if "prev_action" in self.memory:
            space = self.ctx.spec.single_agent.action
            self._open["prev_action"] = np.zeros((n, *(space.shape or ())), space.dtype)
        if "prev_reward" in self.memory:
            self._open["prev_reward"] = np.zeros(n, np.float32)
        self.carry = self.algorithm.initial_carry(n)
        self.noise = {name: extra.initial_carry(n) for name, extra in self.exploration.items()}

    def example(self) -> Batch:
        """One row ``[B, ...]`` as it will be stored, learnt by asking environment and algorithm once.

        Raises:
            ValueError: the algorithm needs a key that neither it nor the environment gives.
        """
        if not self._open:
            self.begin()
        with torch.inference_mode(), self.ctx.acting(self.shard):
            rows = self._kept(self.algorithm.postprocess(self._allocate(2).tensors))
        missing = [key for key in self.keys if key not in rows and key != "action_mask"]
        if missing:
            raise ValueError(
                f"{type(self.algorithm).__name__}.needs names keys that nobody gives: {', '.join(missing)}"
            )
        return take(rows, 0)

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
            self.begin(tasks)
        with torch.inference_mode(), self.ctx.acting(self.shard), self._perturbed(mode):
            segment = self._collect(rows, mode, stop)
        yield self._kept(segment if mode == "greedy" else self.algorithm.postprocess(segment))

    @contextmanager
    def _perturbed(self, mode: Mode) -> Iterator[None]:
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
        step = self._tensors({key: self._open[key] for key in self._seen})
        try:
            said, _ = self._decide(step, "greedy")
            for name, p in params.items():
                p.data = weights[name]
            noisy, _ = self._decide(step, "greedy")
            for extra in modules:
                extra.adapt_noise(said, noisy)
            yield
        finally:
            for name, p in params.items():
                p.data = plain[name]

    @property
    def autoreset(self) -> AutoresetMode:
        """When the environments reset a column that has ended."""
        return self.env.autoreset

    def unfinished(self, rows: int) -> Batch:
        """The rows that ``collect(rows)`` had when it raised; behind them, some of an earlier segment."""
        return self._rows[rows].tensors if rows in self._rows else {}

    def _collect(self, rows: int, mode: Mode, stop: Callable[[], bool] | None) -> Batch:
        store = self._rows.get(rows) or self._rows.setdefault(rows, self._allocate(rows + 1))
        tensors, arrays = store.tensors, store.arrays
        put(arrays, 0, self._open)
        seen = [(key, tensors[key]) for key in self._seen]
        observed = [(key, arrays[key]) for key in self._seen if key not in (*self.memory, "is_first")]
        action, reward = arrays["action"], arrays["reward"]
        terminated, truncated = arrays["terminated"], arrays["truncated"]
        is_first, valid = arrays["is_first"], arrays["valid"]
        end = rows
        for t in range(rows):
            if stop is not None and stop():
                end = t
                break
            if self.carries:
                put(arrays["carry"], t, on_host(self.carry))
            out = self._act({key: row_of(leaf, t) for key, leaf in seen}, mode)
            for key, value in out.items():
                if key in arrays:
                    arrays[key][t] = value.numpy() if self.host else value.cpu().numpy()
            result = self._step(action[t])
            reward[t] = result["reward"]
            terminated[t] = result["terminated"]
            truncated[t] = result["truncated"]
            if "restarted" in result:  # what was observed is the last that was seen of that episode
                valid[t] &= ~result["restarted"]
                self.broken += int(result["restarted"].sum())
            np.logical_not(valid[t], out=is_first[t + 1])
            np.logical_or(terminated[t], truncated[t], out=valid[t + 1])
            np.logical_not(valid[t + 1], out=valid[t + 1])
            for key, leaf in observed:
                if isinstance(leaf, dict):
                    put(leaf, t + 1, result[key])
                else:
                    leaf[t + 1] = result[key]
            for key in self.memory:
                arrays[key][t + 1] = np.where(_like(valid[t], arrays[key][t]), arrays[key.removeprefix("prev_")][t], 0)
        self._open = copied(take({key: arrays[key] for key in (*self._seen, "valid")}, end))
        for t in range(end + 1, rows + 1):
            put(arrays, t, self._open)
        if self.carries:
            put(arrays["carry"], slice(end, rows + 1), on_host(self.carry))
        valid[end:] = False
        if self.closes and mode != "random":
            self._say(arrays, end, {key: row_of(leaf, end) for key, leaf in seen}, mode)
        return tensors

    def _say(self, arrays: Batch, t: int, step: Batch, mode: Mode) -> None:
        """What the algorithm says (its value) of a row on which it does not act."""
        put(arrays, t, on_host(only(self._decide(self._tensors(step), mode)[0], arrays)))

    def _act(self, step: Batch, mode: Mode) -> Batch:
        step = self._tensors(step)
        out, self.carry = self._decide(step, mode)
        if mode == "explore":
            for name, extra in self.exploration.items():
                out, self.noise[name] = extra.perturb(out, step, self.noise[name])
        return out

    def _tensors(self, step: Batch) -> Batch:
        return on_device(step, self.ctx.device) if not self.host or isinstance(step["is_first"], np.ndarray) else step

    def _decide(self, step: Batch, mode: Mode) -> tuple[Batch, Batch]:
        if self.normalize is not None:
            step = step | {"obs": self.normalize(step["obs"])}
        return self.algorithm.act(step, self.carry, mode)

    def _allocate(self, length: int) -> Rows:
        """Memory for ``length`` rows; what the algorithm says of a row is learnt by asking it once.

        What there is no room for is not brought to the host.
        """
        store = Rows()
        n = self.columns
        store.allocate(self._open | {key: np.zeros(n, dtype) for key, dtype in CORE.items()}, length)
        before = {role: g.get_state() for role, g in self.ctx.generators.items()}
        step = on_device({k: v for k, v in self._open.items() if k != "valid"}, self.ctx.device)
        for asked in ("explore", "random"):
            out, _ = self._decide(step, asked)
            if asked == "explore":
                for name, extra in self.exploration.items():
                    out, _ = extra.perturb(out, step, self.noise[name])
            kept = out if self.packs else only(out, ("action", *self.keys))
            store.allocate(on_host(kept), length)
        if self.carries:
            store.allocate({"carry": on_host(self.carry)}, length)
        for role, state in before.items():
            self.ctx.generators[role].set_state(state)
        return store

    def state(self) -> Tree:
        """Where the stream stands; ``env`` is None where the environments cannot say it."""
        return {
            "open": copied(self._open),
            "carry": self.carry,
            "noise": self.noise,
            "env": self.env.state(),
            "cuts": self._cuts,
        }

    def load(self, state: Tree) -> None:
        """Go on where ``state`` says. Where it cannot say it of the environments, every column begins a new episode.

        Raises:
            ConfigError: it is that of actors.
        """
        self._check_own(state)
        if not self._open:
            self.begin()
        self._open, self._cuts = copied(state["open"]), state["cuts"]
        self.carry, self.noise = on_device(state["carry"], self.ctx.device), on_device(state["noise"], self.ctx.device)
        if state["env"] is not None:
            self.env.load(state["env"])
        else:
            self._cut()

    def _check_own(self, state: Tree) -> None:
        if "actors" in state:
            count = len(state["actors"])
            raise ConfigError(
                "hardware.actors.count",
                f"the run was collected by {count} actors to a rank, and continues with as many",
            )

    def _cut(self) -> None:
        """The open row ends its episode as a final observation does; the next row is the first of a new one."""
        first = self._anew() | {key: np.zeros(self.columns, CORE[key]) for key in ("reward", "terminated", "truncated")}

        def begin(action: Any) -> Batch:
            self._step = self.env.step
            return first

        self._step = begin

    def _anew(self) -> Batch:
        """Reset every environment, with seeds that it was not reset with before."""
        self._open["valid"] = np.zeros(self.columns, np.bool_)
        self._cuts += 1
        seeds = np.random.SeedSequence([*self.seeds, self._cuts]).generate_state(self.columns)
        return self.env.reset([int(seed) for seed in seeds])

    def close(self) -> None:
        self.env.close()


def _like(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``mask [B]`` with the axes that it needs to meet ``values [B, ...]``."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - 1))
