"""Rows of agents: an axis, groups, and who is alive; segments join without a seam."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from rlplug import tree
from rlplug.api import Algorithm, Job, Needs
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.nonfinite import check_segment
from rlplug.collection.play import Player
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard
from rlplug.functional.returns import ended
from rlplug.testing.context import context
from rlplug.types import ConfigError, RunError
from tests.contract.tenants.teams import Carts, Relay, Signals

COLUMNS = 4
KEYS = ("obs", "action", "value", "prev_action", "prev_reward", "state")


class Swinging(Algorithm):
    """Acts by what it sees alone; its value names the row."""

    def __init__(self, nested):
        super().__init__()
        self.nested = nested

    def group(self, part, actions):
        sums = part["obs"].sum(-1)
        who = torch.arange(sums.shape[1]) if sums.ndim == 2 else 0
        return {"action": ((sums * 1000).long().abs() + who) % actions, "value": 2.0 * sums}

    def act(self, step, carry, mode):
        if self.nested:
            return {"scouts": self.group(step["scouts"], 3), "base": self.group(step["base"], 4)}, carry
        return self.group(step, 2), carry


def made(cls, **options):
    shard = SimpleNamespace(env_ids=range(COLUMNS))
    return cls(SimpleNamespace(**options), shard)


ENVS = {"carts": (Carts, {"agents": 3, "max_steps": 20}), "signals": (Signals, {"max_steps": 5})}


def source(name, env=None):
    cls, options = ENVS[name]
    env = env or made(cls, **options)
    keys = tuple(key for key in KEYS if key != "state" or "state" in env.spec.extras)
    ctx = context(env.spec, needs=Needs(keys=keys), num_envs=COLUMNS)
    shard = EnvShard("actor", COLUMNS, range(COLUMNS))
    return make_shard(env, Swinging(env.spec.nested), ctx, shard, list(range(COLUMNS)))


def clone(batch):
    return tree.map(torch.clone, batch)


def joined(name, rows, n):
    """Collect ``n`` segments, and put them one behind the other without the rows that stand in two of them."""
    player = source(name)
    segments = [clone(player.collect(rows)) for _ in range(n)]
    for before, after in pairwise(segments):
        for part in ("obs", "alive", "prev_action"):
            for path, leaf in tree.items(before):
                if path[-1] == part:
                    other = dict(tree.items(after))[path]
                    assert torch.equal(leaf[-1], other[0]), path
    return tree.cat([tree.take(segment, slice(0, rows)) for segment in segments])


def groups(batch):
    return [batch[name] for name in ("scouts", "base")] if "scouts" in batch else [batch]


@pytest.mark.parametrize("name", ENVS)
def test_segments_of_any_length_are_the_same_stream(name):
    whole = joined(name, 60, 1)
    assert int(ended({**whole}).sum()) > 4
    for rows in (1, 7, 30):
        parted = joined(name, rows, 60 // rows)
        for path, leaf in tree.items(parted):
            assert torch.equal(leaf, dict(tree.items(whole))[path][: len(leaf)]), path


@pytest.mark.parametrize("name", ENVS)
def test_rows_are_what_the_environment_gave(name):
    """Play the stored actions again, in an environment of its own."""
    batch, (cls, options) = joined(name, 60, 1), ENVS[name]
    env = made(cls, **options)
    row = env.reset(list(range(COLUMNS)))
    nested = "scouts" in batch
    for t in range(59):
        array = tree.map(lambda x, t=t: x[t].numpy(), batch)
        for path, leaf in tree.items(row):
            if path[-1] in ("obs", "alive", "state"):
                assert np.array_equal(dict(tree.items(array))[path], leaf), (t, path)
        action = {key: array[key]["action"] for key in ("scouts", "base")} if nested else array["action"]
        row = env.step(action)
        for path, leaf in tree.items(row):
            if path[-1] in ("reward", "terminated", "truncated"):
                assert np.array_equal(dict(tree.items(array))[path], leaf), (t, path)


@pytest.mark.parametrize("name", ENVS)
def test_the_stream_rule_holds_for_the_column_and_for_every_agent(name):
    batch = joined(name, 60, 1)
    valid, first = batch["valid"], batch["is_first"]
    someone = torch.stack([part["alive"].reshape(60, COLUMNS, -1).any(2) for part in groups(batch)]).any(0)
    assert torch.equal(valid, someone)
    assert torch.equal(first[1:], ~valid[:-1])
    left = 0
    for part in groups(batch):
        alive, over = part["alive"].reshape(60, COLUMNS, -1), (part["terminated"] | part["truncated"])
        over, reward = over.reshape(60, COLUMNS, -1), part["reward"].reshape(60, COLUMNS, -1)
        acted = alive & valid.unsqueeze(-1)
        going = acted & ~over
        begins = first[1:].unsqueeze(-1)
        assert torch.equal(alive[1:], going[:-1] | begins & alive[1:])  # it goes on, or a new episode begins
        assert not (over & ~acted).any()
        assert not reward[~acted].any()
        left += int((over & valid.unsqueeze(-1))[:-1][valid[1:]].sum())
        value, obs = part["value"][:-1], part["obs"][:-1]
        torch.testing.assert_close(value[valid[:-1]], 2.0 * obs.sum(-1)[valid[:-1]])
    assert left > 3  # agents that left an episode before it ended


@pytest.mark.parametrize("name", ENVS)
def test_what_was_done_before_stands_in_the_next_row(name):
    batch = joined(name, 60, 1)
    for part in groups(batch):
        acted = part["alive"] & batch["valid"].reshape(60, COLUMNS, *(1 for _ in part["alive"].shape[2:]))
        for key in ("action", "reward"):
            expected = torch.where(acted, part[key], 0)[:-1]
            assert torch.equal(part[f"prev_{key}"][1:], expected)
    assert any(part["prev_action"].any() for part in groups(batch))


@pytest.mark.parametrize("name", ENVS)
def test_goes_on_where_its_state_was_taken(name):
    one, other = source(name), source(name)
    one.collect(11)
    state = decode(encode(copy_to_host(one.state())))
    other.load(state)
    for _ in range(3):
        for (path, a), (_, b) in zip(tree.items(one.collect(9)), tree.items(other.collect(9)), strict=True):
            assert torch.equal(a, b), path


@pytest.mark.parametrize("name", ENVS)
def test_environments_that_cannot_be_saved_begin_new_episodes(name):
    one, other = source(name), source(name)
    one.collect(2)
    state = one.state() | {"env": None}
    other.load(state)
    segment = other.collect(6)
    assert not segment["valid"][0].any()
    assert segment["is_first"][1].all()
    assert all(part["alive"][1].all() for part in groups(segment))
    assert not any(part["reward"][0].any() for part in groups(segment))


def test_returns_are_means_over_agents():
    batch = source("signals").collect(60)
    counted = EpisodeStats(COLUMNS, ("scouts", "base"))
    steps = counted.add(batch)
    assert steps == int(batch["valid"][:-1].sum())
    episodes = counted.drain()
    rewards = torch.cat([batch["scouts"]["reward"], batch["base"]["reward"].unsqueeze(-1)], 2)
    sums, found = torch.zeros(COLUMNS, 3), []
    for t in range(60):
        for b in range(COLUMNS):
            sums[b] = rewards[t, b] + (0 if batch["is_first"][t, b] else sums[b])
            if ended(batch)[t, b]:
                found.append((float(sums[b].mean()), float(sums[b, :2].mean()), float(sums[b, 2])))
    assert len(found) > 8
    assert [(total, scouts, base) for total, _, _, scouts, base in episodes] == [pytest.approx(x) for x in found]
    alive = [batch["scouts"]["alive"], batch["base"]["alive"].unsqueeze(-1)]
    assert counted.agent_steps == int((torch.cat(alive, 2) & batch["valid"].unsqueeze(-1))[:-1].sum()) > steps
    again = EpisodeStats(COLUMNS, ("scouts", "base"))
    again.load(decode(encode(copy_to_host(counted.state()))))
    for part in (counted, again):
        part.add(batch)
    assert (counted.drain(), counted.agent_steps) == (again.drain(), again.agent_steps)


def test_a_number_that_is_none_names_group_and_environment():
    class Broken(Signals):
        def play(self, action, where):
            result = super().play(action, where)
            result["base"]["reward"][2] = np.nan
            return result

    player = source("signals", Broken(SimpleNamespace(max_steps=5), SimpleNamespace(env_ids=range(COLUMNS))))
    with pytest.raises(RunError, match="reward of base in environment 2 is NaN at environment step 4"):
        check_segment(player.collect(4), 0, range(COLUMNS))


def test_agents_that_reset_within_the_step_are_refused():
    env = made(*ENVS["signals"][:1], **ENVS["signals"][1])
    env.autoreset = AutoresetMode.SAME_STEP
    with pytest.raises(ConfigError, match="env: has agents, and resets within the step"):
        source("signals", env)


# ---- agents that begin in mid-episode --------------------------------------------------------------------------------


class Remembering(Algorithm):
    """An LSTM for every agent, whose state is that of its own rows alone."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.first = torch.nn.LSTMCell(3, 4), first

    def initial_carry(self, n):
        return {key: torch.zeros(n, 3, 4) for key in ("h", "c")}

    def row(self, obs, first, carry):
        state = [(carry[key] * ~first.unsqueeze(-1)).flatten(0, 1) for key in ("h", "c")]
        h, c = self.cell(obs.flatten(0, 1), (state[0], state[1]))
        return {"h": h.view(-1, 3, 4), "c": c.view(-1, 3, 4)}

    def act(self, step, carry, mode):
        first = step[self.first]
        carry = self.row(step["obs"], first if first.ndim == 2 else first.unsqueeze(-1), carry)
        return {"action": (carry["h"].sum(-1) > 0).long(), "value": carry["h"].sum(-1)}, carry


def remembered(rows, n, first="agent_is_first"):
    env = made(Relay, max_steps=9)
    ctx = context(env.spec, needs=Needs(keys=("obs", "value", "action", "carry", first)), num_envs=COLUMNS)
    player = make_shard(env, Remembering(first), ctx, EnvShard("actor", COLUMNS, range(COLUMNS)), list(range(COLUMNS)))
    return player, [clone(player.collect(rows)) for _ in range(n)]


def parts(batch):
    """Yield column, agent, and rows from which on it is alive until it is not."""
    alive = batch["alive"] & batch["valid"].unsqueeze(-1)
    for column in range(COLUMNS):
        for agent in range(3):
            begin = None
            for t, here in enumerate(alive[:, column, agent].tolist()):
                if here and begin is None:
                    begin = t
                if not here and begin is not None:
                    yield column, agent, begin, t
                    begin = None


def difference_from_fresh_states(player, batch):
    """Return how many parts there are, how many begin in mid-episode, and in how many values are not their own."""
    count, born, wrong = 0, 0, 0
    for column, agent, begin, end in parts(batch):
        if begin == 0:
            continue  # it may have begun in a segment before
        state = tuple(torch.zeros(1, 4) for _ in range(2))
        with torch.no_grad():
            for t in range(begin, end):
                state = player.algorithm.cell(batch["obs"][t, column, agent][None], state)
                if not torch.allclose(batch["value"][t, column, agent], state[0].sum(), atol=1e-5):
                    wrong += 1
                    break
        count, born = count + 1, born + (not batch["is_first"][begin, column])
    return count, born, wrong


@pytest.mark.parametrize("rows", [60, 7, 1])
def test_a_newborn_agent_begins_with_a_state_of_its_own(rows):
    player, segments = remembered(rows, 60 // rows)
    batch = tree.cat([tree.take(segment, slice(0, rows)) for segment in segments])
    count, born, wrong = difference_from_fresh_states(player, batch)
    assert born > 10
    assert count > born + 10
    assert wrong == 0
    other, segments = remembered(60, 1, "is_first")  # which is of the column
    count, born, wrong = difference_from_fresh_states(other, segments[0])
    assert wrong == born


@pytest.mark.parametrize("rows", [13, 1])
def test_a_learner_unrolls_what_acting_did(rows):
    """From the carry of row 0 and ``agent_is_first`` of every row; row T is row 0 of the next segment."""
    player, segments = remembered(rows, 40 // rows)
    for before, after in pairwise(segments):
        assert torch.equal(before["agent_is_first"][-1], after["agent_is_first"][0])
    for segment in segments:
        carry = tree.take(segment["carry"], 0)
        with torch.no_grad():
            for t in range(rows):
                carry = player.algorithm.row(segment["obs"][t], segment["agent_is_first"][t], carry)
                torch.testing.assert_close(carry["h"].sum(-1), segment["value"][t], atol=1e-5, rtol=1e-4)
        first = segment["agent_is_first"]
        assert not (first & ~segment["alive"]).any()


def test_it_is_there_after_a_restart_and_from_a_state():
    """Of environments that are saved, and of those that begin new episodes."""
    one, _ = remembered(11, 1)
    state = decode(encode(copy_to_host(one.state())))
    other, _ = remembered(1, 1)
    other.load(state)
    for (path, a), (_, b) in zip(tree.items(one.collect(9)), tree.items(other.collect(9)), strict=True):
        assert torch.equal(a, b), path
    other.load(state | {"env": None})
    segment = other.collect(3)
    assert segment["agent_is_first"][1].tolist() == [[True, True, False]] * COLUMNS
    assert not segment["agent_is_first"][[0, 2]].any()


def test_an_evaluation_that_keeps_nothing_acts_as_training_does():
    """Its policy is given what it names, from the first row on."""
    (_, segments), seen = remembered(20, 1), []
    player, _ = remembered(1, 0)
    act = player.algorithm.act

    def watched(step, carry, mode):
        seen.append(step["agent_is_first"].clone())
        return act(step, carry, mode)

    player.algorithm.act = watched
    shard = EnvShard("eval", COLUMNS, range(COLUMNS))
    env = made(Relay, max_steps=9)
    evaluation = make_shard(env, player.algorithm, player.ctx, shard, list(range(COLUMNS)), keys=())
    evaluation.collect(20, "greedy")
    assert torch.equal(torch.stack(seen[-20:]), segments[0]["agent_is_first"][:20])


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job(name, episodes, max_steps=27_000):
    """Play the episodes of a job."""
    cls, options = ENVS[name]
    spec = made(cls, **options).spec
    keys = tuple(key for key in KEYS if key != "state" or "state" in spec.extras)
    ctx = context(spec, needs=Needs(keys=keys), num_envs=COLUMNS)

    def make(shard):
        return cls(SimpleNamespace(**options), SimpleNamespace(env_ids=shard.env_ids))

    player = Player(make, Swinging(spec.nested), ctx, "actor", (0,), keys)
    return player.play([Job(3, episodes=episodes, max_steps=max_steps)])[0]


@pytest.mark.parametrize("episodes", [1, 5])
@pytest.mark.parametrize("name", ENVS)
def test_returns_of_a_job_are_those_of_its_groups(name, episodes):
    batch = job(name, episodes)
    counted = EpisodeStats(1, ("scouts", "base") if name == "signals" else ())
    counted.add_whole(batch)
    found = counted.drain()
    assert len(found) == episodes
    parts = [part["reward"].reshape(*batch["valid"].shape, -1) * batch["valid"].unsqueeze(-1) for part in groups(batch)]
    sums = [reward.sum(0).mean(-1).tolist() for reward in parts]
    means = torch.cat(parts, 2).sum(0).mean(-1).tolist()
    assert any(means)
    for i, (total, length, column, *by_group) in enumerate(found):
        assert (total, length, column) == (pytest.approx(means[i]), int(batch["valid"][:, i].sum()), -1)
        assert by_group == [pytest.approx(group[i]) for group in (sums if name == "signals" else [])]


@pytest.mark.parametrize(("name", "most"), [("carts", 1), ("carts", 14), ("signals", 1), ("signals", 2)])
def test_a_job_that_is_cut_truncates_who_is_alive(name, most):
    """And nobody else: who left before has had an end, and has no other."""
    whole, cut = job(name, 9), job(name, 9, most)
    truncated, left_before = 0, 0
    for part in groups(cut):
        alive = part["alive"].reshape(*cut["valid"].shape, -1) & cut["valid"].unsqueeze(-1)
        ends = [part[key].reshape(alive.shape) for key in ("terminated", "truncated")]
        assert not ((ends[0] | ends[1]) & ~alive).any()
        assert torch.equal((ends[0].int() + ends[1].int()).sum(0), alive.any(0).int())  # one end for each
        truncated += int(ends[1].sum())
        for i, length in enumerate(cut["length"].tolist()):
            if length == most:
                left_before += int((~alive[length - 1, i]).sum())
                assert torch.equal(ends[1][length - 1, i], alive[length - 1, i] & ~ends[0][length - 1, i])
        assert not part["alive"].reshape(alive.shape)[cut["length"], range(9)].any()
    assert truncated
    assert cut["length"].max() == most < whole["length"].max()
    assert bool(left_before) == (most > 1)
