"""Independent learners that ignore masks, and a reward of every agent for novelty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplug.api import Context, Exploration, Needs
from rlplug.plugins.algo.independent import Independent
from rlplug.settings import PositiveFloat, option, settings
from rlplug.types import Batch, EnvSpec


class Blind(Independent):
    """Independent learners that ignore masks."""

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
    found = [Component("exploration", "novelty", algos + "Novelty", ("algo=independent", "env=carts"))]
    found += [Component("algo", "blind", algos + "Blind", ("env=carts",))]
    names = {"carts": "Carts", "signals": "Signals", "masked_signals": "MaskedSignals"}
    names["relay"] = "Relay"
    return found + [Component("env", name, envs + cls) for name, cls in names.items()]

@hookimpl
def rlplug_conf():
    return "rlplug_teams"
"""


INDEPENDENT = Path(__file__).parents[3] / "conf" / "algo" / "independent.yaml"
FILES = {
    "rlplug_teams/__init__.py": MANIFEST,
    "rlplug_teams/conf/algo/blind.yaml": INDEPENDENT.read_text().replace("name: independent", "name: blind"),
    "rlplug_teams/conf/exploration/novelty.yaml": "# @package exploration.novelty\nname: novelty\nscale: 0.5\n",
    "rlplug_teams/conf/env/carts.yaml": "name: carts\nagents: 2\nmax_steps: 500\n",
    "rlplug_teams/conf/env/signals.yaml": "name: signals\nmax_steps: 6\n",
    "rlplug_teams/conf/env/relay.yaml": "name: relay\nmax_steps: 9\n",
    "rlplug_teams/conf/env/masked_signals.yaml": "name: masked_signals\nmax_steps: 6\n",
}
