"""Parameter sharing, Gupta et al. 2017 (doi:10.1007/978-3-319-71682-4_5): all agents of a group use one policy, which
learns from the rows of all. With ``agent_ids``, it sees which one acts, so that equal agents may behave differently
(Foerster et al. 2016, arXiv:1605.06676; Terry et al. 2020, arXiv:2005.13625).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gymnasium.spaces import Box

from rlplug.agents import Policies, Policy, agents_of, of_groups, spec_of, with_ids
from rlplug.settings import AlgoNode, option, settings
from rlplug.types import Batch, ConfigError, EnvSpec, Group


class Shared(Policies):
    traceable = True

    @settings
    class Config:
        algo: AlgoNode = option("Algorithm of the shared policies, one for each group of agents.")
        agent_ids: bool = option("Append a one-hot code of the agent to its observation, which must be a vector.")

    @classmethod
    def policies(cls, cfg: Config, spec: EnvSpec) -> dict[str, Policy]:
        found = dict[str, Policy]()
        for name, agents in of_groups(agents_of(spec)).items():
            own = spec_of(spec, agents)
            found[name] = Policy(cfg.algo, agents, wider(own, len(agents)) if cfg.agent_ids else own)
        return found

    def view(self, batch: Batch, name: str) -> Batch:
        rows, agents = super().view(batch, name), len(self.players[name])
        if self.cfg.agent_ids and agents > 1:
            rows["obs"] = with_ids(rows["obs"], agents)
        return rows


def wider(spec: EnvSpec, agents: int) -> EnvSpec:
    """Return a single agent's spaces with the code of one of ``agents`` agents in its observation.

    Raises:
        ConfigError: observations are no vectors.
    """
    ((name, group),) = spec.groups.items()
    if agents == 1:
        return spec
    if not isinstance(group.obs, Box) or len(group.obs.shape) != 1:
        raise ConfigError(
            "algo.agent_ids", f"needs vector observations, but those of {name} are {group.obs}; use false"
        )
    low, high = (np.append(x, np.full(agents, end, x.dtype)) for x, end in ((group.obs.low, 0), (group.obs.high, 1)))
    obs = Box(low, high, dtype=group.obs.dtype.type)  # type: ignore[union-attr]
    return replace(spec, groups={name: Group(obs, group.action)})
