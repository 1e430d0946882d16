"""The context of a run, resolved once and passed to every component."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from rlplug.api import Context, Goals, Loop, Needs, Plan, Simulator, Trainable, VecEnv
from rlplug.contract import MisuseError
from rlplug.contract.results import check_model
from rlplug.functional.schedule import Schedules
from rlplug.nn.ensemble import Ensemble
from rlplug.registry.discovery import unknown
from rlplug.types import ConfigError, EnvSpec, Role, Tree

if TYPE_CHECKING:
    from gymnasium import Space

    from rlplug.config import Chosen, RunConfig


RECORDED = ("obs", "action", "action_mask", "state", "logp")


def recorded_keys(spec: EnvSpec, needs: Needs) -> tuple[str, ...]:
    """Return the keys to record in addition to the algorithm's stored keys and the stream's."""
    extras = (key for of in (spec, *spec.groups.values()) for key in of.extras)
    return tuple(key for key in dict.fromkeys((*RECORDED, *extras)) if key not in needs.keys)


def needs_of(
    algo: Chosen, models: Iterable[Chosen], spec: EnvSpec, recorded: bool = False, readers: Iterable[Chosen] = ()
) -> Needs:
    """Return the needs of a run's algorithm, with the keys that its exploration modules and its buffer read.

    Args:
        recorded: whether the run records its episodes.
        readers: the exploration modules and the buffer.

    Raises:
        ConfigError: one of them cannot serve these spaces, or the algorithm does not support recurrent models.
    """
    needs: Needs = algo.needs(spec)
    needs = algo.recurrent(needs) if any(model.cls.recurrent for model in models) else needs
    read = (key for reader in readers for key in reader.reads(spec))
    needs = replace(needs, keys=tuple(dict.fromkeys((*needs.keys, *read))))
    return replace(needs, recorded=recorded_keys(spec, needs)) if recorded else needs


class ResolvedRun:
    """A run's configuration and the values derived from it on this machine; see ``run.build``."""

    def __init__(self, config: RunConfig, plan: Plan, spec: EnvSpec) -> None:
        self.config, self.plan, self.spec = config, plan, spec
        readers = [x for x in (*config.exploration.values(), config.buffer, config.curriculum) if x is not None]
        self.needs = needs_of(config.algo, config.models.values(), spec, config.record.path is not None, readers)
        ctx = self.context(torch.device("cpu"), range(config.num_envs))
        self.loop: Loop = config.loop.build(ctx.derive(batch_size=self._sample()))

    def _sample(self) -> int:
        """Return the number of transitions in a sample; a sample of segments consists of whole segments."""
        size, least = self.config.train_batch_size, self.whole_segments
        return -(-size // least) * least if self.needs.data == "segments" else size

    @property
    def whole_segments(self) -> int:
        """Return the transitions of one segment of every part of the environments."""
        config = self.config
        return config.rollout_fragment_length * max(1, config.num_envs // (self._shards * self._ranks)) * self._ranks

    @property
    def _ranks(self) -> int:
        """Return the number of parts of the environments; 1 if they are not divided among ranks."""
        return 1 if self.config.num_envs % self.plan.world_size else self.plan.world_size

    @property
    def _shards(self) -> int:
        """Return the number of shards of a part, one per actor."""
        return max(1, self.plan.actors.count // self._ranks) if self.plan.actors else 1

    def context(self, device: torch.device, env_ids: Sequence[int], rank: int = 0, world_size: int = 1) -> RunContext:
        """Return the context of the run's components in one process."""
        config, repeats = self.config, self.config.buffer.cls.repeats
        run = {name: getattr(config, name) for name in ("num_envs", "total_steps", "seed", "preprocess")}
        tempo = {
            "rollout_length": config.rollout_fragment_length,
            "batch_size": config.train_batch_size,
            "sample_uses": getattr(config.buffer.cfg, repeats) if repeats else 1,
            "replay_ratio": config.replay_ratio,
            "learning_starts": config.num_steps_sampled_before_learning_starts,
            "num_shards": self._shards,
        }
        place = {"device": device, "env_ids": env_ids, "rank": rank, "world_size": world_size}
        place |= {"make_env": config.env.build, "optimizer": (config.optimizer, config.optimizer_options)}
        return RunContext(spec=self.spec, needs=self.needs, slots=config.models, **run, **tempo, **place)


@dataclass
class EnvShard:
    """Environments, out of ``num_envs``, for which noise is currently drawn; shared by all contexts of a run."""

    role: Role
    num_envs: int
    env_ids: Sequence[int]
    replicated: bool = False  # every rank has all rows of the learner's batches


class RunContext(Context):
    """Context with one random generator per role, so evaluation, training and acting do not affect one another.

    Args:
        values: other attributes of ``Context`` than their defaults.
    """

    space: Space[Any] | None = None
    make_env: Callable[[Context], VecEnv] | None = None
    ensemble_size, render, rank, world_size, replay_ratio, optimizer, preprocess = 1, False, 0, 1, None, (), None
    total_steps, rollout_length, batch_size, sample_uses, learning_starts, num_shards = 0, 1, 1, 1, 0, 1
    agents = 1  # agents that act in every environment, as one column each

    def __init__(
        self,
        *,
        spec: EnvSpec,
        needs: Needs | None = None,
        slots: Mapping[str, Chosen] | None = None,
        device: torch.device | str = "cpu",
        num_envs: int = 1,
        env_ids: Sequence[int] | None = None,
        seed: int = 0,
        **values: Any,
    ) -> None:
        assert not (wrong := values.keys() - vars(RunContext).keys()), f"unknown: {', '.join(wrong)}"
        vars(self).update(values)
        self.beyond: list[str] = []  # observations out of bounds, reported once
        self.spec, self.needs, self.slots = spec, needs or Needs(), slots or {}
        self.built = set[tuple[str, type]]()  # requested slots, or simulator, and the classes built
        self.device = torch.device(device)
        self.shard = EnvShard("learner", num_envs, range(num_envs) if env_ids is None else env_ids)
        self.seed, self.schedules = seed, Schedules(self.device)
        self.generators: dict[str, torch.Generator] = {}
        for i, role in enumerate(get_args(Role)):
            (state,) = np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)
            self.generators[role] = torch.Generator(self.device).manual_seed(int(state) >> 1)
        if self.device.type != "cpu":
            self.generators["host"] = torch.Generator().manual_seed(seed)

    role = property(attrgetter("shard.role"))

    @property
    def num_envs(self) -> int:
        return self.agents * self.shard.num_envs

    @property
    def env_ids(self) -> Sequence[int]:
        ids, n = self.shard.env_ids, self.agents
        if n == 1 or not isinstance(ids, range):
            return ids if n == 1 else [i * n + k for i in ids for k in range(n)]
        return range(ids.start * n, ids.stop * n)

    @contextmanager
    def acting(self, shard: EnvShard) -> Iterator[None]:
        """Draw noise for the rows of ``shard`` inside the block, such as those of actors or of an evaluation."""
        before = vars(self.shard).copy()
        vars(self.shard).update(vars(shard))
        try:
            yield
        finally:
            vars(self.shard).update(before)

    def derive(self, **changes: Any) -> RunContext:
        """Return a context of the same run with ``changes``; generators and schedules are shared."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    def child(
        self, spec: EnvSpec, needs: Needs | None = None, *, agents: int = 1, models: Mapping[str, Chosen] | None = None
    ) -> RunContext:
        given, default = models or {}, self.slots.get("model")
        slots = {slot: given.get("model", own) if own is default else own for slot, own in self.slots.items()}
        more = {"agents": self.agents * agents, "batch_size": self.batch_size * agents}
        return self.derive(spec=spec, needs=needs or self.needs, slots={**slots, **given}, **more)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunContext:
        """Return itself, so that a copied algorithm keeps the run's generators and schedules."""
        memo.update({id(value): value for value in self.schedules.moving()})
        return self

    def traceable(self, components: Iterable[torch.nn.Module]) -> bool:
        """Return whether these components and all models are ``traceable``, which they do not inherit."""
        parts = {type(part) for root in components for part in root.modules() if isinstance(part, Trainable)}
        classes = parts | {cls for slot, cls in self.built if slot != "simulator"}
        return all(vars(cls).get("traceable", False) for cls in classes)

    def build(self, slot: Any, space: Space[Any], ensemble_size: int = 1) -> Any:
        if isinstance(slot, str) and slot not in self.slots:
            raise MisuseError(f"ctx.build({slot!r}): there is no such slot; {unknown(slot, self.slots)}")
        chosen = self.slots[slot] if isinstance(slot, str) else slot
        self.built.add((slot if isinstance(slot, str) else "", chosen.cls))
        size = ensemble_size if chosen.cls.batched else 1
        models = [chosen.build(self.derive(space=space, ensemble_size=size)) for _ in range(ensemble_size // size)]
        if chosen.kind == "model":
            check_model(models[0], space, size, self.generators)
        return models[0] if len(models) == 1 else Ensemble(models)

    def simulator(self) -> Simulator:
        lacks = "has no simulator; env.simulator=copy or rlplug.envs.simulated may offer one"
        found = self._offered("simulator", lacks)
        self.built.add(("simulator", type(found)))
        return found

    def goals(self) -> Goals:
        return self._offered("goals", "has no compute_reward, which relabeling goals needs; use buffer=replay")

    def _offered(self, name: str, lacks: str) -> Any:
        """Return the result of the environment's method ``name``, called on a temporary instance."""
        if self.make_env is not None:
            with closing(self.make_env(self.derive(shard=EnvShard("eval", 1, range(1)), agents=1))) as env:
                if (offer := getattr(env.traits, name)) and (found := offer()) is not None:
                    return found
        raise ConfigError("env", f"this environment {lacks}")

    def schedule(self, node: Any) -> Tensor:
        return self.schedules.add(node)

    def randn(self, *shape: int, rows: bool = True) -> Tensor:
        return self._draw(torch.randn, shape, rows)

    def rand(self, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        return self._draw(torch.rand, shape, rows, host)

    def randint(self, high: int, *shape: int, rows: bool = True, host: bool = False) -> Tensor:
        return self._draw(partial(torch.randint, high), shape, rows, host)

    def _draw(self, draw: Callable[..., Tensor], shape: Sequence[int], rows: bool, host: bool = False) -> Tensor:
        source = self.generators["host" if host and "host" in self.generators else self.role]
        if not rows or not shape or (self.role == "learner" and (self.world_size == 1 or self.shard.replicated)):
            return draw(shape, generator=source, device=source.device)
        mine, *rest = shape
        if self.role == "learner":
            everybody = draw((mine * self.world_size, *rest), generator=source, device=source.device)
            return everybody[self.rank * mine : (self.rank + 1) * mine]
        if mine != len(self.env_ids):
            said = f"a draw of {mine} rows where {len(self.env_ids)} environments act"
            raise MisuseError(f"{said}; draw one per environment, or shared numbers with rows=False")
        everybody = draw((self.num_envs, *rest), generator=source, device=self.device)
        return everybody if len(self.env_ids) == self.num_envs else everybody[list(self.env_ids)]

    @contextmanager
    def apart(self, columns: Sequence[int] | None = None) -> Iterator[None]:
        before = (generator := self.generators[self.role]).get_state()
        ids = self.shard.env_ids if columns is None else [self.shard.env_ids[column] for column in columns]
        with self.acting(replace(self.shard, env_ids=ids)):
            yield
        generator.set_state(before)

    def state(self) -> Tree:
        """Return the device type, the state of every generator, and the step of the schedules."""
        generators = {role: generator.get_state() for role, generator in self.generators.items()}
        return {"device": self.device.type, "generators": generators, "schedules": self.schedules.step}

    def load(self, state: Tree, steps: int) -> list[str]:
        """Restore ``state``, and return descriptions of what could not be restored.

        Generators with state from another device type are seeded by ``steps`` instead.
        """
        self.schedules.refresh(state["schedules"])
        if state["device"] == self.device.type:
            for role, saved in state["generators"].items():
                self.generators[role].set_state(saved)
            return []
        for generator in self.generators.values():
            generator.manual_seed(generator.initial_seed() + steps)
        return [f"random numbers: {state['device']} drew them before, and {self.device.type} draws others"]
