"""In which order episodes come, and how they become segments."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlplug import testing, tree
from rlplug.api import Algorithm, Needs, Segment
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard
from rlplug.data import parquet
from rlplug.data.collector import Cursor, RecordingCollector
from rlplug.data.recorder import EpisodeFiles, RunRecorder
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.envs.spec_json import to_json
from rlplug.functional.previous import PREVIOUS
from rlplug.testing.context import context
from rlplug.types import ConfigError
from tests.collection.test_agents import COLUMNS, ENVS, Remembering, Swinging, made, source
from tests.contract.tenants.teams import Relay
from tests.data.episodes import plain, same, write_parquet

SPEC = testing.spec(2, 2)
LENGTHS = [4, 1, 6, 2, 3, 5]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Six episodes in two files of several row groups."""
    monkeypatch.setattr(parquet, "GROUP", 150)
    for name, numbers in (("a", range(4)), ("b", range(4, 6))):
        write_parquet(tmp_path / f"{name}.parquet", [plain(LENGTHS[i], i, i % 2 == 0) for i in numbers], SPEC)
    return tmp_path


class Idle(Algorithm):
    """Remembers what passes through it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def postprocess(self, data):
        self.seen.append(data)
        return data | {"twice": 2 * data["reward"]}

    def initial_carry(self, n):
        return {"h": torch.ones(n, 3)}


def collector(folder, num_envs=1, env_ids=None, once=True, seed=None, keys=("obs", "action", "twice"), weights=None):
    recording = Recording([str(folder)], Reading(SPEC), weights, seed)
    ctx = testing.context(SPEC, num_envs=num_envs, env_ids=env_ids, needs=Needs(keys=keys, off_policy=True))
    return RecordingCollector(recording, Idle(), ctx, EnvShard("actor", num_envs, ctx.env_ids), once)


# ---- order ----------------------------------------------------------------------------------------------------------


def test_every_pass_has_each_episode_once_and_in_its_own_order(folder):
    recording = Recording([str(folder)], Reading(), seed=3)
    first, second = recording.order(0), recording.order(1)
    assert sorted(first.tolist()) == sorted(second.tolist()) == [*range(6)]
    assert len({tuple(recording.order(number).tolist()) for number in range(5)}) > 1
    assert Recording([str(folder)], Reading(), seed=3).order(1).tolist() == second.tolist()
    assert Recording([str(folder)], Reading()).order(0).tolist() == [*range(6)]


def test_a_chunk_is_read_once_in_a_pass(folder, monkeypatch):
    """So that what is larger than memory is streamed: at most so many chunks as are kept are in memory."""
    recording, read = Recording([str(folder)], Reading(), seed=0), []
    for one in recording.files:
        monkeypatch.setattr(one, "read", lambda chunk, keys, s=one: read.append((s, chunk)) or type(s).read(s, chunk))
    for number in recording.order(0):
        recording.episode(int(number), None, 1)
        assert len(recording._kept) == 1
    assert len(read) == len({*read}) == sum(len(source.chunks) for source in recording.files) == 4


def test_weights_are_shares_of_steps(tmp_path):
    for name, count in (("a", 100), ("b", 40)):
        write_parquet(tmp_path / f"{name}.parquet", [plain(10, i) for i in range(count)], SPEC)
    paths = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    recording = Recording(paths, Reading(), weights=[1.0, 3.0], seed=0)
    order = recording.order(0)
    assert (order >= 100).sum() == 40  # all of what is the shortest for its weight
    assert (order < 100).sum() == 13
    assert len({*order.tolist()}) == 53
    shares = (order[:20] >= 100).mean()
    assert 0.7 <= shares <= 0.8  # from the beginning on
    assert {*order.tolist()} != {*recording.order(1).tolist()}
    with pytest.raises(ConfigError, match=r"data.weights: 1 weights for 2 paths"):
        Recording(paths, Reading(), weights=[1.0])


# ---- segments -------------------------------------------------------------------------------------------------------


def test_a_column_waits_for_a_pass_that_has_an_episode_for_it(tmp_path):
    """By weights, passes have more or fewer episodes, where these are of other lengths."""
    for name, lengths in (("a", [10] * 4), ("b", [1, 2, 30, 2, 1, 25, 3, 2, 20, 1])):
        write_parquet(tmp_path / f"{name}.parquet", [plain(n, i) for i, n in enumerate(lengths)], SPEC)
    paths = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    recording = Recording(paths, Reading(SPEC), [1.0, 1.0], seed=0)
    counts = [len(recording.order(number)) for number in range(40)]
    most = max(counts)
    assert min(counts) < most
    column = Cursor(recording, most - 1, most, once=False)
    column.at = (counts.index(most), most - 1, 0)
    taken = column.take(200, ["obs", "reward", "valid", "is_first"], ())
    assert len(taken["valid"]) == 200


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_segments_are_the_stream(folder, steps):
    """Row T reopens the next segment, and is not valid; behind the last episode, its final row is repeated."""
    of = collector(folder)
    found = [of.collect(steps) for _ in range(-(-27 // steps) + 1)]
    for before, after in pairwise(found):
        torch.testing.assert_close(before["obs"][-1], after["obs"][0])
        assert not before["valid"][-1].any()
    rows = tree.cat([tree.take(one, slice(0, steps)) for one in found])
    expected = tree.cat([plain(n, i, i % 2 == 0) for i, n in enumerate(LENGTHS)])
    for key in ("obs", "reward", "terminated", "truncated", "is_first", "valid"):
        np.testing.assert_array_equal(rows[key][:27, 0], expected[key], err_msg=key)
    assert not rows["valid"][27:].any()
    assert not rows["is_first"][27:].any()
    torch.testing.assert_close(rows["twice"], 2 * rows["reward"])


def test_returns_are_those_of_the_episodes(folder):
    of, counted = collector(folder, num_envs=2), EpisodeStats(2)
    steps = sum(counted.add(of.collect(4)) for _ in range(8))
    assert steps == of.spec.steps == sum(LENGTHS)
    assert sorted(counted.drain()) == sorted((sum(range(1, n + 1)), n, i % 2) for i, n in enumerate(LENGTHS))
    assert of.spec.rows == max(sum(LENGTHS[b::2]) + 3 for b in (0, 1))


def test_columns_of_ranks_are_those_of_one_process(folder):
    whole, parts = collector(folder, 2, seed=5), [collector(folder, 2, [rank], seed=5) for rank in (0, 1)]
    for _ in range(5):
        both = tree.cat([part.collect(3) for part in parts], 1)
        tree.map(torch.testing.assert_close, whole.collect(3), both)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_it_goes_on_where_its_state_was_taken(folder, after):
    of, again = collector(folder, 2, once=False, seed=1), collector(folder, 2, once=False, seed=1)
    _ = of.spec  # reads rows, and gives them all the same
    for _ in range(after):
        of.collect(5)
    again.load(of.state())
    for _ in range(6):
        tree.map(torch.testing.assert_close, of.collect(5), again.collect(5))


def test_other_data_than_before_is_refused(folder):
    state = collector(folder).state()
    write_parquet(folder / "c.parquet", [plain(2, 9)], SPEC)
    with pytest.raises(ConfigError, match=r"data.path: differs from the data that the run began with"):
        collector(folder).load(state)


def test_what_an_actor_would_have_remembered(folder):
    """Actions and rewards of the row before, none at first rows; the state that an episode begins with."""
    of = collector(folder, keys=("obs", "action", "prev_action", "prev_reward", "carry"))
    rows = tree.cat([tree.take(of.collect(3), slice(0, 3)) for _ in range(9)])
    first, before = rows["is_first"][1:], rows["valid"][:-1]
    expected = torch.where(before & ~first, rows["reward"][:-1], 0)
    torch.testing.assert_close(rows["prev_reward"][1:], expected)
    torch.testing.assert_close(rows["prev_action"][1:], torch.where(before & ~first, rows["action"][:-1], 0))
    torch.testing.assert_close(rows["carry"]["h"], torch.ones(27, 1, 3))


def test_more_columns_than_episodes(folder):
    with pytest.raises(ConfigError, match=r"num_envs: 7 environments, but the dataset has 6 episodes"):
        collector(folder, num_envs=7)


@pytest.mark.parametrize("name", ENVS)
def test_agents_go_out_and_in(name, tmp_path):
    player = source(name)
    spec, cfg = player.ctx.spec, SimpleNamespace(path=tmp_path, format="parquet", compress=True, max_file_size=10**9)
    recorder = RunRecorder(EpisodeFiles(cfg, "a", {"spec": to_json(spec), "versions": {}}), COLUMNS)
    recorder.rlplug_started(None)
    played = 0
    for _ in range(6):
        segment = tree.map(torch.clone, player.collect(20))
        recorder.rlplug_collected(None, Segment(segment, slice(0, COLUMNS)))
        played += int(segment["valid"].sum())
    state = recorder.state()
    recording = Recording([str(tmp_path)], Reading(spec))
    assert len(recording.lengths) > 8
    open_rows = sum(len(rows["valid"]) for _, _, shard in state["shards"] for rows in shard["rows"] if rows)
    assert recording.steps() + open_rows == played

    keys = ("obs", "action", *(["state"] if "state" in spec.extras else []))
    ctx = context(spec, needs=Needs(keys=keys, off_policy=True))
    of = RecordingCollector(recording, Swinging(spec.nested), ctx, EnvShard("actor", 1, range(1)), once=True)
    segment = of.collect(recording.steps() + len(recording.lengths))
    rows, at = tree.map(lambda x: x[:, 0].numpy(), segment), 0
    kept = (*keys, "reward", "terminated", "truncated", "alive", "is_first", "valid")
    for number in range(len(recording.lengths)):
        written = tree.only(recording.episode(number, None, 1), kept, spec.nested)
        length = len(written["valid"])
        same(tree.take(tree.only(rows, kept, spec.nested), slice(at, at + length)), written)
        at += length
    assert np.count_nonzero(rows["valid"]) == recording.steps()


@pytest.mark.parametrize("name", [*ENVS, "relay"])
def test_what_follows_from_the_rows_before_is_what_collecting_gives(name, tmp_path):
    """Of agents that left, of those that come later, and of several groups."""
    keys = ("obs", "action", *PREVIOUS)
    if name == "relay":
        env, algorithm = made(Relay, max_steps=9), Remembering("agent_is_first")
    else:
        env = made(ENVS[name][0], **ENVS[name][1])
        algorithm = Swinging(env.spec.nested)
    spec, shard = env.spec, EnvShard("actor", COLUMNS, range(COLUMNS))
    ctx = context(spec, needs=Needs(keys=keys, off_policy=True), num_envs=COLUMNS)
    player = make_shard(env, algorithm, ctx, shard, list(range(COLUMNS)))
    cfg = SimpleNamespace(path=tmp_path, format="parquet", compress=True, max_file_size=10**9)
    recorder = RunRecorder(EpisodeFiles(cfg, "a", {"spec": to_json(spec), "versions": {}}), COLUMNS)
    segment = tree.map(torch.clone, player.collect(60))
    for rows in (segment, *(segment[group] for group in spec.nested)):
        rows |= {f"collected_{key}": rows.pop(key) for key in PREVIOUS if key in rows}
    recorder.rlplug_collected(None, Segment(segment, slice(0, COLUMNS)))
    recorder.state()
    recording = Recording([str(tmp_path)], Reading(spec))
    of = RecordingCollector(recording, algorithm, ctx, EnvShard("actor", 1, range(1)), once=True)
    rows = of.collect(recording.steps() + len(recording.lengths))
    at, whole = 0, Recording([str(tmp_path)], Reading(spec))
    for number in range(len(recording.lengths)):
        written = whole.episode(number, None, 1)
        length = len(written["valid"])
        for group in spec.nested or ("",):
            own, expected = (x[group] if group else x for x in (rows, written))
            for key in PREVIOUS:
                ours = own[key][at : at + length, 0].numpy()
                np.testing.assert_array_equal(ours[:-1], expected[f"collected_{key}"][:-1], err_msg=key)
        at += length
    assert at > 40
