"""Algorithms for several agents: independent learners of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlplug import tree
from rlplug.api import Algorithm, Context, Exploration, Learner, Losses, Needs, Segment
from rlplug.settings import AlgoNode, PositiveFloat, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group, Mode

SHARED = {"is_first", "valid", "index", "sample_prob", "weight", "task"}
"""The keys that have no agent axis, beside the environment's extras; see ``rlplug.types``."""


class Independent(Algorithm):
    """Independent learners, Tan 1993: every agent runs an algorithm of its own, whatever it is.

    It cuts views and merges results. A child sees the rows of its agent alone; those without it are not valid.
    """

    @settings
    class Config:
        algo: AlgoNode = option("The algorithm of every agent.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.ctx, self.nested, self.shared = ctx, ctx.spec.nested, SHARED | ctx.spec.extras.keys() - {"action_mask"}
        self.members = list(self.agents(ctx.spec))
        for name, spec, *_ in self.members:
            self.add_module(name, cfg.algo.build(ctx.child(spec)))

    @staticmethod
    def agents(spec: EnvSpec) -> Iterator[tuple[str, EnvSpec, str, int | None]]:
        """Yield name, own spaces, group, and place in the group of every agent; None in a group without an axis."""
        for key, group in spec.groups.items():
            own = EnvSpec({"agent": Group(group.obs, group.action)}, {}, spec.max_episode_steps)
            yield from ((f"{key}-{name}", own, key, place) for place, name in enumerate(group.agents))
            if not group.agents:
                yield key, own, key, None

    @classmethod
    def needs(cls, cfg: Config, spec: EnvSpec) -> Needs:
        if not spec.has_agents:
            raise ConfigError("env", "independent learners need an environment with agents")
        every = [cfg.algo.needs(own) for _, own, *_ in cls.agents(spec)]
        return replace(every[0], keys=tuple(dict.fromkeys(key for needs in every for key in needs.keys)))

    def view(self, batch: Batch, group: str, place: int | None, axis: int) -> Batch:
        """Return what one agent sees: leaves ``[T+1, B, N, ...]`` (axis 2) become ``[T+1, B, ...]``."""
        part = batch[group] if self.nested else {key: leaf for key, leaf in batch.items() if key not in self.shared}
        if place is not None:
            part = tree.map(lambda x: x.select(axis, place), {k: v for k, v in part.items() if k not in self.shared})
        out = {key: batch[key] for key in SHARED if key in batch} | part
        if "valid" in out:
            out["valid"] = out["valid"] & out["alive"]
        return out

    def views(self, batch: Batch, axis: int = 2) -> Iterator[tuple[str, Algorithm, Batch]]:
        for name, _, group, place in self.members:
            yield name, self.get_submodule(name), self.view(batch, group, place, axis)  # pyright: ignore[reportReturnType]

    def initial_carry(self, n: int) -> Batch:
        return {}

    def act(self, step: Batch, carry: Batch, mode: Mode) -> tuple[Batch, Batch]:
        outs = {name: child.act(rows, {}, mode)[0] for name, child, rows in self.views(step, axis=1)}
        joint: Batch = {}
        for key, group in self.ctx.spec.groups.items():
            if group.agents:
                own = [outs[f"{key}-{name}"] for name in group.agents]
                joint[key] = tree.map(lambda *leaves: torch.stack(leaves, 1), *own)
            else:
                joint[key] = outs[key]
        return joint if self.nested else next(iter(joint.values())), {}

    def observe(self, segment: Segment, learner: Learner) -> None:
        for _, child, rows in self.views(segment.batch):
            child.observe(replace(segment, batch=rows), learner)

    def prepare(self, batch: Batch) -> Batch:
        return {name: child.prepare(rows) for name, child, rows in self.views(batch)}

    def update(self, batch: Batch, learner: Learner) -> Losses:
        """Let each child update itself, with its own optimizers, epochs and stops."""
        joint = Losses({})
        for name, *_ in self.members:
            child: Any = self.get_submodule(name)
            losses = child.update(batch[name], learner)
            joint.terms |= {f"{name}/{key}": value for key, value in losses.terms.items()}
            joint.metrics |= {f"{name}/{key}": value for key, value in losses.metrics.items()}
        return joint

    def actor_keys(self) -> tuple[str, ...]:
        children = [(name, self.get_submodule(name)) for name, *_ in self.members]
        return tuple(f"{name}.{key}" for name, child in children for key in child.actor_keys())  # pyright: ignore


class Blind(Independent):
    """The same, but it heeds no masks."""

    @classmethod
    def needs(cls, cfg: Independent.Config, spec: EnvSpec) -> Needs:
        needs = super().needs(cfg, spec)
        return replace(needs, keys=tuple(key for key in needs.keys if key != "action_mask"))


class Novelty(Exploration):
    """Rewards every agent that acts by how much its observation changes."""

    knows_agents = True

    @settings
    class Config:
        scale: PositiveFloat = option("Factor of the reward.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        super().__init__()
        self.scale, self.nested = cfg.scale, ctx.spec.nested

    @classmethod
    def reads(cls, cfg: Config, spec: EnvSpec) -> tuple[str, ...]:
        return ("obs",)

    def intrinsic_reward(self, batch: Batch) -> Any:
        def of(part: Batch) -> Tensor:
            change = (part["obs"][1:] - part["obs"][:-1]).abs().sum(-1) * part["alive"][:-1]
            return torch.cat([self.scale * change, torch.zeros_like(change[:1])])

        return {name: of(batch[name]) for name in self.nested} if self.nested else of(batch)


MANIFEST = """
from rlplug import Component, hookimpl

@hookimpl
def rlplug_components():
    algos, envs = "tests.contract.tenants.agents:", "tests.contract.tenants.teams:"
    found = [Component("algo", "independent", algos + "Independent", ("env=carts",))]
    found += [Component("exploration", "novelty", algos + "Novelty", ("algo=independent", "env=carts"))]
    found += [Component("algo", "blind", algos + "Blind", ("env=carts",))]
    names = {"carts": "Carts", "signals": "Signals", "masked_signals": "MaskedSignals"}
    names["relay"] = "Relay"
    return found + [Component("env", name, envs + cls) for name, cls in names.items()]

@hookimpl
def rlplug_conf():
    return "rlplug_teams"
"""


def settings_of(algo: str, **changes: Any) -> dict[str, Any]:
    """Return the settings that an algorithm's YAML has."""
    conf = Path(__file__).parents[3] / "conf" / "algo" / f"{algo}.yaml"
    return yaml.safe_load(conf.read_text())["algo"] | changes


def independent(algo: dict[str, Any], buffer: str, **core: Any) -> str:
    node = {"defaults": [{"override /buffer": buffer}, {"override /model": "mlp"}], **core}
    return "# @package _global_\n" + yaml.safe_dump(
        node | {"algo": {"name": "independent", "algo": algo}}, sort_keys=False
    )


FILES = {
    "rlplug_teams/__init__.py": MANIFEST,
    "rlplug_teams/conf/algo/independent.yaml": independent(
        settings_of("ppo"), "rollout", num_envs=8, rollout_fragment_length=128, replay_ratio=None
    ),
    "rlplug_teams/conf/algo/blind.yaml": independent(
        settings_of("ppo"), "rollout", num_envs=8, rollout_fragment_length=128, replay_ratio=None
    ).replace("name: independent", "name: blind"),
    "rlplug_teams/conf/algo/independent_dqn.yaml": independent(
        settings_of("dqn", hiddens=[16]), "replay", num_envs=2, rollout_fragment_length=4, train_batch_size=32
    ),
    "rlplug_teams/conf/exploration/novelty.yaml": "# @package exploration.novelty\nname: novelty\nscale: 0.5\n",
    "rlplug_teams/conf/env/carts.yaml": "name: carts\nagents: 2\nmax_steps: 500\n",
    "rlplug_teams/conf/env/signals.yaml": "name: signals\nmax_steps: 6\n",
    "rlplug_teams/conf/env/relay.yaml": "name: relay\nmax_steps: 9\n",
    "rlplug_teams/conf/env/masked_signals.yaml": "name: masked_signals\nmax_steps: 6\n",
}
