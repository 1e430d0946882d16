"""Episodes of agents, and of groups of agents: written, read, and given as segments."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlplug import tree
from rlplug.api import Needs, Segment
from rlplug.collection.segment import PREVIOUS, only
from rlplug.collection.stepping import make_shard
from rlplug.context import EnvShard
from rlplug.data.collector import RecordingCollector
from rlplug.data.recorder import EpisodeFiles, RunRecorder
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.envs.spec_json import to_json
from rlplug.testing.context import context
from tests.collection.test_agents import COLUMNS, ENVS, Remembering, Swinging, made, source
from tests.contract.tenants.teams import Relay
from tests.data.episodes import same


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
        written = only(recording.episode(number, None, 1), kept, spec.nested)
        length = len(written["valid"])
        same(tree.take(only(rows, kept, spec.nested), slice(at, at + length)), written)
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
