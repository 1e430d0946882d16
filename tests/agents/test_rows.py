"""Views of agents' rows, and their way back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from rlplug import tree
from rlplug.agents import Agent, agents_of, fold, merge, of_groups, spec_of, unfold, view
from rlplug.types import ConfigError, EnvSpec, Group

VECTOR = Box(-1.0, 1.0, (3,), np.float32)
MASK = {"action_mask": MultiBinary(4)}
ONE = EnvSpec({"team": Group(VECTOR, Discrete(4), ("a", "b", "c"))}, MASK | {"state": VECTOR})
TWO = EnvSpec(
    {
        "scouts": Group(Dict({"x": VECTOR, "y": Discrete(2)}), Discrete(4), ("north", "south"), MASK),
        "base": Group(VECTOR, Discrete(5)),
        "spare": Group(VECTOR, Discrete(5), ("one",)),
    },
    {"state": VECTOR},
)
T, B = 5, 3


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def part(group: Group, *lead: int) -> dict:
    agents = (len(group.agents),) if group.agents else ()
    obs = numbers(*lead, *agents, 3)
    drawn = torch.Generator().manual_seed(len(lead) + len(agents))
    found = {
        "obs": {"x": obs, "y": numbers(*lead, *agents)} if isinstance(group.obs, Dict) else obs,
        "reward": numbers(*lead, *agents) + 0.5,
        "alive": torch.rand(*lead, *agents, generator=drawn) < 0.6,
        "agent_is_first": torch.rand(*lead, *agents, generator=drawn) < 0.3,
    }
    masked = group.extras or (ONE.extras if group is ONE.groups["team"] else {})
    return found | ({"action_mask": torch.ones(*lead, *agents, 4, dtype=torch.bool)} if masked else {})


def rows(spec: EnvSpec, *lead: int) -> dict:
    parts = {name: part(group, *lead) for name, group in spec.groups.items()}
    batch = parts if spec.nested else next(iter(parts.values()))
    batch |= {"is_first": torch.zeros(lead, dtype=torch.bool), "state": numbers(*lead, 3)}
    if len(lead) == 2:
        batch |= {"valid": numbers(*lead) % 4 > 0, "weight": numbers(lead[1]), "index": numbers(lead[1]).long()}
    return batch


PLAYERS = {
    "own": (ONE, [["a"], ["b"], ["c"]]),
    "shared": (ONE, [["a", "b", "c"]]),
    "out of order": (ONE, [["a", "c"], ["b"]]),
    "groups": (TWO, [["north", "south"], ["base"], ["one"]]),
    "across groups": (TWO, [["south"], ["north"], ["base", "one"]]),
}


@pytest.mark.parametrize("lead", [(T, B), (B,)], ids=["segment", "step"])
@pytest.mark.parametrize("case", PLAYERS)
def test_views_and_back(case, lead):
    """Every agent's rows are where a loop over agents puts them, and merge returns what was viewed."""
    spec, names = PLAYERS[case]
    batch, axis = rows(spec, *lead), len(lead) - 1
    agents = {agent.name: agent for agent in agents_of(spec)}
    players = {str(i): [agents[name] for name in own] for i, own in enumerate(names)}
    outs = {}
    for policy, own in players.items():
        seen = view(batch, spec, own)
        assert "state" not in seen
        columns = unfold({key: x for key, x in seen.items() if key not in ("weight", "index")}, len(own), axis)
        for place, agent in enumerate(own):
            for key in ("obs", "reward", "alive"):
                given = batch[agent.group][key] if spec.nested else batch[key]
                if agent.place is not None:
                    given = tree.map(lambda x: x.select(axis + 1, agent.place), given)  # noqa: B023
                found = tree.map(lambda x: x.select(axis + 1, place), columns[key])  # noqa: B023
                tree.map(torch.testing.assert_close, given, found)
            given = batch[agent.group] if spec.nested else batch
            own_first = given["agent_is_first"] if agent.place is None else given["agent_is_first"][..., agent.place]
            assert torch.equal(columns["is_first"][..., place], own_first)
            if len(lead) == 2:
                alive = given["alive"] if agent.place is None else given["alive"][..., agent.place]
                assert torch.equal(columns["valid"][..., place], batch["valid"] & alive)
                assert torch.equal(seen["weight"].view(B, -1)[:, place], batch["weight"])
        outs[policy] = {key: seen[key] for key in ("obs", "reward", "alive")}
    joint = merge(outs, players, spec, axis)
    for name in spec.nested or ("",):
        for key in ("obs", "reward", "alive"):
            given, found = (x[name][key] if name else x[key] for x in (batch, joint))
            tree.map(lambda a, b: torch.testing.assert_close(a, b, atol=0, rtol=0), given, found)


def test_a_key_of_some_policies_is_zero_for_the_others():
    one, *others = agents_of(ONE)
    players = {"q": others, "plain": [one]}
    outs = {"q": {"action": torch.ones(4), "q": torch.ones(4, 5)}, "plain": {"action": torch.zeros(2)}}
    joint = merge(outs, players, ONE)
    assert joint["action"].tolist() == [[0, 1, 1]] * 2
    assert joint["q"].sum(-1).tolist() == [[0, 5, 5]] * 2


def test_fold_keeps_the_agents_of_a_column_together():
    x = numbers(T, B, 2, 3)
    assert torch.equal(fold(x, 1)[0, :, 0], torch.tensor([0.0, 3.0, 6.0, 9.0, 12.0, 15.0]))
    assert torch.equal(unfold(fold(x, 1), 2, 1), x)


def test_an_agent_that_is_not_alive_is_allowed_an_action():
    batch = rows(ONE, B)
    batch["alive"] = torch.tensor([[True, False, False]]).expand(B, 3)
    batch["action_mask"] = torch.zeros(B, 3, 4, dtype=torch.bool)
    batch["action_mask"][:, 1, 2] = True
    mask = view(batch, ONE, agents_of(ONE))["action_mask"].view(B, 3, 4)[0]
    assert mask.sum(-1).tolist() == [0, 1, 4]


def test_spec_of_agents():
    agents = agents_of(TWO)
    assert agents[0] == Agent("scouts", "north", 0)
    assert agents[2] == Agent("base", "base", None)
    assert {name: len(own) for name, own in of_groups(agents).items()} == {"scouts": 2, "base": 1, "spare": 1}
    own = spec_of(TWO, agents[:2])
    assert own.single_agent == Group(TWO.groups["scouts"].obs, Discrete(4))
    assert own.extras == MASK
    assert spec_of(ONE, agents_of(ONE)).extras == MASK
    with pytest.raises(ConfigError, match=r"algo\.policies\.x: plays agents of different spaces: north .* and base"):
        spec_of(TWO, [agents[0], agents[2]], "algo.policies.x")
