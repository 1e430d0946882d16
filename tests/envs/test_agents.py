"""``env=pettingzoo`` and ``env=multi``: agents that come and go, turns, groups, and what is refused."""

from __future__ import annotations

import itertools
import re
import sys

import numpy as np
import pytest

from rlplug.testing.checks import envs as kit
from rlplug.types import ConfigError, RunError

TROUPE = "tests.envs.troupe"


def made(name, script="ab ab ab", **changes):
    kwargs = {"script": script, **changes.pop("kwargs", {})}
    return kit.make("pettingzoo", id=f"{TROUPE}:{name}", kwargs=kwargs, **changes)


def played(env, steps, action=0):
    """Return what the first column's rows say about every agent, and their rewards, ends and lives."""
    spec, rows = env.spec, [env.reset(range(kit.COLUMNS))]
    (group,) = spec.groups.values()
    shape = (kit.COLUMNS, len(group.agents), *(group.action.shape or ()))
    rows = [{key: np.array(x[0]) for key, x in rows[0].items()}]
    for _ in range(steps):
        row = env.step(np.full(shape, action, group.action.dtype))
        rows.append({key: np.array(x[0]) for key, x in row.items()})
    return rows


def lives(rows):
    return ["".join(name for name, on in zip("abc", row["alive"], strict=False) if on) or "." for row in rows]


@pytest.mark.parametrize(
    "script",
    [
        "ab abc abc bc",  # one comes late
        "abc ab a",  # they die in order
        "abc ac abc bc abc",  # one leaves and comes back, then another
        "abc abc abc",  # all end together
        "a . a",  # nobody in between: two episodes by the contract
        "a b c",  # one replaces another
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_agents_come_late_leave_and_come_back(script, cut):
    rows = played(made("Troupe", script, kwargs={"cut": cut}), 12, action=1)
    words = script.split()
    episode = words[: words.index(".") if "." in words else None]
    expected = [*episode, "."]
    assert lives(rows)[: 2 * len(expected)] == expected * 2
    for t, (present, after) in enumerate(itertools.pairwise(expected)):
        for j, agent in enumerate("abc"):
            row, acted, stays = rows[t + 1], agent in present, agent in after
            assert row["reward"][j] == 2.0 * acted
            last = after == "." and cut and "." not in words
            assert row["terminated"][j] == (acted and not stays and not last)
            assert row["truncated"][j] == (acted and not stays and last)
            if acted:  # its next or its final observation
                assert row["obs"][j, :2].tolist() == [j, rows[t]["obs"][j, 1] + 1]
            elif stays:  # a new life
                assert row["obs"][j, :2].tolist() == [j, 0]


def test_an_endless_environment_is_cut_by_the_limit():
    assert lives(played(made("Endless"), 7)) == ["ab"] * 8
    rows = played(made("Endless", max_episode_steps=3), 7)
    assert lives(rows) == ["ab", "ab", "ab", ".", "ab", "ab", "ab", "."]
    assert rows[3]["truncated"].tolist() == [True, True, False]
    assert not rows[3]["terminated"].any()


def test_agents_with_other_spaces_are_two_groups():
    env = made("OtherSpaces", "abc abc ab")
    assert {name: group.agents for name, group in env.spec.groups.items()} == {"a": ("a",), "agents_1": ("b", "c")}
    row = env.reset([0, 1, 2])
    assert row["a"]["obs"].shape == (3, 1, 1)
    assert row["agents_1"]["obs"].shape == (3, 2, 3)
    row = env.step({"a": np.ones((3, 1, 2), np.float32), "agents_1": np.zeros((3, 2), np.int64)})
    assert row["agents_1"]["reward"].tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Vanishes", "step 2): the agent a is gone, but has not ended"),
        ("Lingers", "step 2): the agent a has ended, but is still among the agents"),
        ("Stranger", "step 0): it has the agent x, which is not among its possible_agents"),
        ("Unpaid", "step 2): the agent a acted, but has no reward"),
        ("Haunted", "step 1): the agent c is paid 1.0, but did not act"),
    ],
)
def test_misbehaving_agents_end_the_run_in_one_line(name, said):
    with pytest.raises(RunError) as caught:
        played(made(name, "ab ab"), 3)
    assert re.fullmatch(rf"environment 0 \(episode 0, seed \d+, {re.escape(said)}", str(caught.value))


def test_only_a_truncated_agent_needs_its_final_observation():
    rows = played(made("Forgetful", "ab ab"), 3)
    assert lives(rows) == ["ab", "ab", ".", "ab"]
    assert rows[2]["obs"].tolist() == rows[1]["obs"].tolist()
    env = made("Forgetful", "ab ab", kwargs={"cut": True})
    env.reset([0, 1, 2])
    env.step(np.zeros((3, 3), np.int64))
    with pytest.raises(RunError, match=r"the agent a is truncated, but has no observation$"):
        env.step(np.zeros((3, 3), np.int64))


def test_no_agent_at_the_start_and_no_names_are_refused():
    with pytest.raises(RunError, match=r"no agent is alive after reset\(\)$"):
        made("Troupe", ". ab").reset([0, 1, 2])
    with pytest.raises(
        ConfigError, match=r"^env.id: .* does not name all agents that may appear, its possible_agents$"
    ):
        made("Nameless")


@pytest.mark.parametrize("script", ["ab abc ab", "abc ac abc b"])
@pytest.mark.parametrize("name", ["Troupe", "OtherSpaces"])
def test_the_kit_accepts_agents_that_come_and_go(name, script, monkeypatch):
    monkeypatch.setattr(kit, "STEPS", 30)
    monkeypatch.setattr(kit, "complete", lambda name: [""])  # another test compares worker processes
    kit.check_env("pettingzoo", "pettingzoo", id=f"{TROUPE}:{name}", kwargs={"script": script}, max_episode_steps=3)


def test_a_failed_environment_is_replaced():
    env = made("Vanishes", "ab ab ab", restart_failed=True)
    env.reset([0, 1, 2])
    for t in range(5):
        row = env.step(np.zeros((3, 3), np.int64))
        assert row["restarted"].all() == (t % 3 == 2)
        assert row["alive"][:, :2].all()
    env.close()


def test_workers_give_the_rows_of_a_list_also_after_a_resume():
    here, there = (made("OtherSpaces", "ab abc a", vectorization=how) for how in ("list", "subprocess"))
    assert here.spec == there.spec
    walks = [list(kit.walk(env, 5, 8)) for env in (here, there)]
    assert not kit.differences(*walks)
    state = there.state()
    there.reset([7, 8, 9])
    there.load(state)
    assert not kit.differences(there.state(), state)
    there.close()


@pytest.mark.parametrize("vectorization", ["list", "subprocess"])
def test_metrics_of_agents_are_averaged_per_episode(vectorization):
    env = made("Scored", "ab abc a", vectorization=vectorization)
    given = np.zeros((kit.COLUMNS, 3), np.int64)
    try:
        env.reset(range(kit.COLUMNS))
        assert env.traits.metrics() == []
        for _ in range(2):
            env.step(given)
        state = env.state()
        env.reset(range(kit.COLUMNS))
        env.load(state)  # replays two of three steps
        env.step(given)
        expected = {"age": pytest.approx((1 + 1 + 2 + 2 + 1 + 3) / 6), "left": 1.0}
        assert env.traits.metrics() == [(i, expected) for i in range(kit.COLUMNS)]
        assert env.traits.metrics() == []
        env.load(state)
        assert env.traits.metrics() == []
        for _ in range(5):  # a step that begins the next episode, and the rest
            env.step(given)
        ended = env.state()
        assert ended["metrics"] == [expected] * 2 * kit.COLUMNS
    finally:
        env.close()


def test_metrics_that_map_no_names_end_the_run():
    env = made("Miscounted")
    with pytest.raises(RunError, match=r"info\['metrics'\] is int; it should map names to numbers"):
        played(env, 1)


def test_two_groups_of_a_butterfly_game_whose_agents_die():
    """Knights and archers are killed by zombies; an episode ends when none is left."""
    groups = {"knights": ["knight_*"], "archers": ["archer_*"]}
    env = kit.make("pettingzoo", id="pettingzoo.butterfly.knights_archers_zombies_v11", groups=groups)
    assert {name: len(group.agents) for name, group in env.spec.groups.items()} == {"knights": 2, "archers": 2}
    row, died = env.reset([0, 1, 2]), 0
    for _ in range(400):
        alive = {name: row[name]["alive"].copy() for name in groups}
        actions = {name: np.full((3, 2), 5, np.int64) for name in groups}  # all wait
        row = env.step(actions)
        for name in groups:
            over = row[name]["terminated"]
            died += int(over.sum())
            assert not (over & ~alive[name]).any()
            assert np.isfinite(row[name]["obs"]).all()
    assert died > 3


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_in_an_aec_game_one_acts_and_the_other_may_only_wait():
    env = kit.make("pettingzoo", id="pettingzoo.classic.tictactoe_v3")
    row = env.reset([0, 1, 2])
    for move, turn in [(0, 0), (4, 1), (1, 0), (8, 1)]:
        assert row["alive"].all()
        assert row["action_mask"][:, 1 - turn].nonzero()[1].tolist() == [0, 0, 0]
        assert row["action_mask"][:, turn].sum() == 3 * (9 - (row["obs"][0, 0] != 0).sum())
        action = np.zeros((3, 2), np.int64)
        action[:, turn] = move
        row = env.step(action)
        assert not row["reward"].any()
    row = env.step(np.full((3, 2), 2))  # the first wins, and both are paid in the row of the last move
    assert row["reward"].tolist() == [[1.0, -1.0]] * 3
    assert row["terminated"].all()
    assert not row["alive"].any()


def test_rewards_between_turns_are_those_of_the_parallel_interface():
    """In MPE as AEC, the last agent of a cycle moves all, and everybody is paid in its row."""
    turns, parallel = (
        kit.make("pettingzoo", id="mpe2.simple_spread_v3", api=api, mask_key=None, kwargs={"max_cycles": 5})
        for api in ("aec", "parallel")
    )
    turns.reset([3, 4, 5])
    parallel.reset([3, 4, 5])
    for cycle in range(5):
        action = np.array([[1, 2, 3], [4, 0, 1], [2, 2, 4]])
        for agent in range(3):
            row = turns.step(action)
            assert row["reward"].any() == (agent == 2)
        together = parallel.step(action)
        np.testing.assert_array_equal(row["reward"], together["reward"])
        np.testing.assert_array_equal(row["obs"], together["obs"])
        np.testing.assert_array_equal(row["truncated"], together["truncated"])
        assert row["truncated"].all() == (cycle == 4)


def test_turns_without_masks_are_refused():
    with pytest.raises(ConfigError, match=r"^env.mask_key: agent_0 of simple_spread\S* has no action_mask .* use null"):
        kit.make("pettingzoo", id="mpe2.simple_spread_v3", api="aec")
    with pytest.raises(
        ConfigError, match=r"^env: agent_0 waits for its turn, which needs masks, but its actions are Box"
    ):
        kit.make("pettingzoo", id="mpe2.simple_spread_v3", api="aec", kwargs={"continuous_actions": True})


def test_dicts_by_agent_in_turn():
    env = kit.make("multi", entry_point=f"{TROUPE}:Relay", turns=True, mask_key=None)
    (group,) = env.spec.groups.values()
    assert group.agents == ("0", "1", "2")
    row, total = env.reset([0, 1, 2]), 0.0
    for t in range(6):
        assert row["alive"].tolist() == [[j <= t for j in range(3)]] * 3  # an agent begins when it first acts
        allowed = [4 if j == t % 3 or j > t else 1 for j in range(3)]
        assert row["action_mask"].sum(2).tolist() == [allowed] * 3
        assert row["obs"][0, t % 3, 0] == t
        row = env.step(np.zeros((3, 3), np.int64))
        total = total + row["reward"]
    assert row["terminated"].all()
    assert total[0].tolist() == [5.0, 2.0, 2.0]


def test_dicts_by_agent_without_turns_or_end_are_refused():
    env = kit.make("multi", entry_point=f"{TROUPE}:Relay")
    env.reset([0, 1, 2])
    with pytest.raises(
        RunError,
        match=r"the agent 0 has no observation, but has not ended; if it waits for its turn, use env.turns=true$",
    ):
        env.step(np.zeros((3, 3), np.int64))
    env = kit.make("multi", entry_point=f"{TROUPE}:Relay", turns=True, mask_key=None, kwargs={"ends": False})
    with pytest.raises(RunError, match=r"no agent acts next, but '__all__' does not end the episode$"):
        played(env, 3)


# ---- groups and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"team": ["a", "x*"]}, r"^env.groups.team: no agent matches 'x\*'; the agents are a, b, c"),
        ({"team": ["*"], "one": ["b"]}, "^env.groups.one: has b, which is in the group team too"),
        ({"team": ["a"]}, "^env.groups: names no group for b, c"),
        ({"obs": ["*"]}, "^env.groups.obs: is a key of batches"),
        ({"team": []}, "^env.groups.team: has no agents"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, said):
    with pytest.raises(ConfigError, match=said):
        made("Troupe", groups=groups)


def test_groups_by_pattern():
    groups = made("Troupe", groups={"first": ["a"], "others": ["[bc]"]}).spec.groups
    assert {name: group.agents for name, group in groups.items()} == {"first": ("a",), "others": ("b", "c")}
    with pytest.raises(ConfigError, match=r"^env.groups.all: has agents with different spaces: a Box\(.*; b Box\("):
        made("OtherSpaces", groups={"all": ["*"]})
    masked = kit.make("pettingzoo", id="pettingzoo.classic.tictactoe_v3", groups={"x": ["player_1"], "o": ["player_2"]})
    assert masked.spec.has_masks
    assert masked.reset([0, 1, 2])["o"]["action_mask"].sum() == 3


def test_arguments_contain_the_number_of_the_environment():
    env = made("Troupe", "ab ab", kwargs={"cut": "{env_id}"})
    env.reset(range(kit.COLUMNS))
    action = np.zeros((kit.COLUMNS, 3), np.int64)
    row = [env.step(action) for _ in range(2)][-1]
    assert row["terminated"][:, :2].tolist() == [[True, True], *[[False, False]] * (kit.COLUMNS - 1)]
    assert row["truncated"][:, :2].tolist() == [[False, False], *[[True, True]] * (kit.COLUMNS - 1)]


def test_an_observation_function_sees_all_agents():
    env = made("Troupe", "abc ab", observation_fn=f"{TROUPE}:nearest")
    assert [row["obs"][0, 2] for row in played(env, 2)] == [3.0, 3.0, 2.0]
    with pytest.raises(ConfigError, match=r"^env.observation_fn: the module 'tests.envs.troupe' has no 'absent'"):
        made("Troupe", observation_fn=f"{TROUPE}:absent")


@pytest.mark.parametrize("name", ["Troupe", "Flagged"])
def test_a_joint_agent_acts_for_its_members(name):
    env = made(name, "abc abc", joint={"pair": ["a", "b"]})
    groups = env.spec.groups
    assert {name: group.agents for name, group in groups.items()} == {"pair": ("pair",), "c": ("c",)}
    assert groups["pair"].action.nvec.tolist() == [3, 3]
    row = env.reset([0, 1, 2])
    assert row["pair"]["obs"]["b"][0].tolist()[0][:2] == [1.0, 0.0]
    action = {"pair": np.full((3, 1, 2), 2), "c": np.zeros((3, 1), np.int64)}
    row = env.step(action)
    assert row["pair"]["reward"].tolist() == [[6.0]] * 3
    row = env.step(action)
    assert row["pair"]["terminated"].all()
    with pytest.raises(ConfigError, match=r"^env.joint.\w+: has b, which is in the joint agent \w+ too$"):
        made("Troupe", joint={"x": ["a", "b"], "y": ["b", "c"]})
    with pytest.raises(ConfigError, match=r"^env.joint.c: is the name of an agent that is no member; rename it$"):
        made("Troupe", joint={"c": ["a", "b"]})
    broken = made("Troupe", "abc bc abc", joint={"pair": ["a", "b"]})
    broken.reset([0, 1, 2])
    with pytest.raises(RunError, match=r"a of the joint agent pair is not alive, but others of it are$"):
        broken.step(action)


def test_a_class_with_several_agents_is_led_to_their_environments():
    with pytest.raises(ConfigError, match=r"^env.entry_point: .* environments with several agents need env=multi or"):
        kit.make("gymnasium", entry_point=f"{TROUPE}:Troupe")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"id": "mpe2.simple_spred_v3"},
            "^env.id: there is no module 'mpe2.simple_spred_v3'; mpe2 has simple_spread_v3",
        ),
        ({"id": "nowhere"}, "^env.id: there is no module 'nowhere'; write it as in mpe2.simple_spread_v3"),
        ({"id": "pettingzoo.classic.tictactoe_v3", "api": "parallel"}, "^env.api: .* has no parallel_env"),
        ({"id": "mpe2.simple_spread_v3", "kwargs": {"M": 1}}, "^env.kwargs: .*takes no 'M'"),
        ({"id": "json"}, "^env.id: json has no parallel_env or env"),
    ],
)
def test_what_cannot_be_made_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        kit.make("pettingzoo", **changes)


class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "mpe2":
            raise ModuleNotFoundError("No module named 'mpe2'", name=name)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpe2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"not installed: pip install 'rlplug\[pettingzoo\]'$"):
        kit.make("pettingzoo", id="mpe2.simple_spread_v3")
