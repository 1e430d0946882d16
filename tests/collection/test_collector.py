"""Streams: every way of resetting gives the same rows, and segments join without a seam."""

import copy
from collections import defaultdict
from itertools import pairwise

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlplug import tree
from rlplug.api import Algorithm, Exploration, Needs, Window
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.collection.episodes import EpisodeStats
from rlplug.collection.shard import ShardCollector
from rlplug.collection.stepping import make_shard
from rlplug.config import compose
from rlplug.context import EnvShard
from rlplug.envs import NativeVector
from rlplug.run.build import build
from rlplug.testing.context import context

COLUMNS = 5


class Follower(Algorithm):
    """Pushes the cart against its angle, so that episodes end after 8 to 10 steps; its value names the row."""

    def act(self, step, carry, mode):
        obs = step["obs"]
        return {"action": (obs[:, 2] < 0).long(), "value": obs.sum(-1) * 2.0}, carry


def short_cartpole():
    return gymnasium.make("CartPole-v1", disable_env_checker=True, max_episode_steps=9)


ACTED = Needs(keys=("obs", "action", "value"))


def source(
    mode: AutoresetMode, algorithm: Algorithm | None = None, needs: Needs = ACTED, exploration=None
) -> ShardCollector:
    env = NativeVector(SyncVectorEnv([short_cartpole] * COLUMNS, autoreset_mode=mode))
    ctx = context(env.spec, needs=needs, num_envs=COLUMNS)
    shard = EnvShard("actor", COLUMNS, range(COLUMNS))
    return make_shard(env, algorithm or Follower(), ctx, shard, list(range(COLUMNS)), exploration)


def segments(mode: AutoresetMode, rows: int, n: int):
    made = source(mode)
    for _ in range(n):
        yield {key: leaf.clone() for key, leaf in made.collect(rows).items()}


def transitions(mode: AutoresetMode, rows: int, n: int) -> dict[int, list[tuple]]:
    """Per column: obs, action, reward, ends, next obs and the value of the next row."""
    found = defaultdict(list)
    for s in segments(mode, rows, n):
        assert not s["valid"][-1].any()
        torch.testing.assert_close(s["value"][:-1][s["valid"][:-1]], 2 * s["obs"].sum(-1)[:-1][s["valid"][:-1]])
        for column in range(COLUMNS):
            for t in range(rows):
                if s["valid"][t, column]:
                    ends = bool(s["terminated"][t, column]), bool(s["truncated"][t, column])
                    row = (
                        tuple(s["obs"][t, column].tolist()),
                        int(s["action"][t, column]),
                        float(s["reward"][t, column]),
                    )
                    following = tuple(s["obs"][t + 1, column].tolist()), float(s["value"][t + 1, column])
                    found[column].append((*row, *ends, *following, bool(s["is_first"][t, column])))
    return found


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("rows", [1, 2, 7, 30])
def test_every_autoreset_mode_gives_the_same_transitions(mode, rows):
    expected = transitions(AutoresetMode.NEXT_STEP, rows, 60 // rows)
    actual = transitions(mode, rows, 60 // rows)
    for column in range(COLUMNS):
        common = min(len(expected[column]), len(actual[column]))
        assert common > 20
        assert actual[column][:common] == expected[column][:common]
        assert any(row[3] for row in expected[column][:common])
        assert any(row[4] for row in expected[column][:common])


@pytest.mark.parametrize("length", [1, 7])
def test_an_episode_of_l_steps_has_l_plus_one_rows_and_is_counted_once(length):
    counted = EpisodeStats(COLUMNS)
    steps, lengths, rows = 0, [], 0
    for segment in segments(AutoresetMode.NEXT_STEP, length, 140 // length):
        steps += counted.add(segment)
        rows += length * COLUMNS
        for episode_return, steps_of_it, _ in counted.drain():
            assert episode_return == steps_of_it
            lengths.append(steps_of_it)
    assert set(lengths) <= {8, 9, 10}
    assert rows - steps == pytest.approx(len(lengths), abs=COLUMNS)  # one dead row an episode


def test_an_episode_that_broke_off_is_not_counted():
    """Column 0 breaks off at row 2, and its next episode ends at row 4; column 1 goes on from segment to segment."""
    counted = EpisodeStats(2)
    valid = torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1], [1, 1], [0, 1]]).bool()
    first = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]).bool()
    ended = torch.zeros_like(valid)
    ended[4, 0] = True
    reward = torch.tensor([[1.0, 1.0], [2.0, 1.0], [9.0, 1.0], [4.0, 1.0], [8.0, 1.0], [9.0, 9.0]])
    segment = {"valid": valid, "is_first": first, "reward": reward, "terminated": ended, "truncated": ended & False}
    assert counted.add(segment) == 4 + 5
    assert counted.drain() == [(12.0, 2, 0)]
    again = segment | {"is_first": first & torch.tensor([True, False])}
    again["truncated"] = torch.zeros_like(valid)
    again["truncated"][0, 1] = True
    counted.add(again)
    assert counted.drain() == [(6.0, 6, 1), (12.0, 2, 0)]


def test_segments_of_other_lengths_hold_the_same_stream():
    assert transitions(AutoresetMode.NEXT_STEP, 24, 2) == transitions(AutoresetMode.NEXT_STEP, 3, 16)
    cut = [*segments(AutoresetMode.NEXT_STEP, 4, 12)]
    for before, after in pairwise(cut):
        for key in ("obs", "is_first"):
            assert torch.equal(before[key][-1], after[key][0])


def test_noise_of_actors_does_not_depend_on_other_columns():
    drawn = []
    for ids in (range(4), [1, 3]):
        ctx = context(num_envs=4, seed=7)
        with ctx.acting(EnvShard("actor", 4, ids)):
            drawn.append(ctx.randn(len(ids), 2))
    assert torch.equal(drawn[1], drawn[0][[1, 3]])


@pytest.mark.parametrize(
    ("env", "algo"), [("cartpole", "ppo"), ("pendulum", "sac"), ("pendulum", "ppo")], ids=lambda name: name
)
def test_a_restored_source_continues_the_same_stream(env, algo, tmp_path):
    def made():
        config = compose([f"algo={algo}", f"env={env}", "num_envs=3", "tuned=none", "total_steps=20_000", "logger=[]"])
        return build(config, tmp_path)

    def follow(trainer, n):
        rows = [{k: v.clone() for k, v in trainer.collector.player.collect(50).items()} for _ in range(n)]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    first, second = made(), made()
    follow(first, 5)
    second.collector.load(copy.deepcopy(first.collector.state()))
    for role, generator in first.ctx.generators.items():
        second.ctx.generators[role].set_state(generator.get_state())
    second.algorithm.load_state_dict(first.algorithm.state_dict())
    expected, actual = follow(first, 5), follow(second, 5)
    for key, leaf in expected.items():
        assert torch.equal(leaf, actual[key]), key
    assert expected["is_first"].any()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_where_environments_cannot_be_restored_new_episodes_begin(mode):
    first = source(mode)
    begun = first.collect(7)["obs"][0].clone()
    for _ in range(2):
        before = first.collect(7)
    state = first.state()
    assert state["env"] is None
    resumed, twin, later = source(mode), source(mode), source(mode)
    resumed.load(decode(encode(copy_to_host(state))))
    twin.load(decode(encode(copy_to_host(state))))
    after = {key: leaf.clone() for key, leaf in resumed.collect(7).items()}
    assert all(torch.equal(leaf, after[key]) for key, leaf in twin.collect(7).items())
    assert torch.equal(after["obs"][0], before["obs"][-1])
    assert not after["valid"][0].any()  # as a final observation: it bootstraps, and no transition leads over it
    assert not (after["terminated"] | after["truncated"])[0].any()
    assert not after["reward"][0].any()
    assert after["is_first"][1].all()
    assert after["valid"][1].all()
    assert not after["is_first"][2].any()
    later.load(copy_to_host(resumed.state()))  # which could not be restored either
    assert (after["obs"][1].abs() < 0.05).all()  # where CartPole begins
    for other in (begun, later.collect(7)["obs"][1]):  # and not where other episodes began
        assert not torch.isclose(after["obs"][1], other).any()


def test_stop_pads_short_columns():
    made = source(AutoresetMode.NEXT_STEP)
    asked = iter([False, False, True])
    cut = made.collect(6, stop=lambda: next(asked))
    cut = {key: leaf.clone() for key, leaf in cut.items()}
    assert cut["valid"].sum(0).tolist() == [2] * COLUMNS
    assert torch.equal(cut["obs"][2], cut["obs"][-1])
    following = made.collect(6)
    assert torch.equal(following["obs"][0], cut["obs"][2])
    assert following["valid"][0].all()


class Remembering(Follower):
    def act(self, step, carry, mode):
        self.seen.append({key: leaf.clone() for key, leaf in step.items()})
        return super().act(step, carry, mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_previous_action_and_reward_are_those_of_the_row_before(mode):
    algorithm = Remembering()
    algorithm.seen = []
    made = source(mode, algorithm, Needs(keys=("obs", "action", "prev_action", "prev_reward")))
    rewarded = 0
    for segment in (made.collect(12) for _ in range(4)):
        first = segment["is_first"]
        assert (segment["prev_action"][first] == 0).all()
        assert (segment["prev_reward"][first] == 0).all()
        follows = segment["valid"][:-1] & ~first[1:]
        for prev, key in (("prev_action", "action"), ("prev_reward", "reward")):
            assert torch.equal(segment[prev][1:][follows], segment[key][:-1][follows])
        rewarded += int(segment["prev_reward"].sum())
    assert rewarded > 50
    assert {"prev_action", "prev_reward"} <= algorithm.seen[0].keys()


class Counting(Algorithm):
    """Its state counts the rows of the episode; it stands in the row, as does what ``act`` was given."""

    def __init__(self):
        super().__init__()
        self.push = torch.nn.Parameter(torch.zeros(()))

    def initial_carry(self, n):
        return {"rows": torch.zeros(n, 1)}

    def act(self, step, carry, mode):
        before = torch.where(step["is_first"][:, None], 0.0, carry["rows"])
        action = (step["obs"][:, 2] < 0).long() if self.push < 0.5 else torch.ones_like(step["is_first"]).long()
        return {"action": action, "given": before.squeeze(-1)}, {"rows": before + 1}


class Pushing(Exploration):
    """Noise on weights that shows in every action."""

    def __init__(self):
        super().__init__()
        self.told = []

    def perturb_weights(self, w):
        return {name: torch.ones_like(x) for name, x in w.items()}

    def adapt_noise(self, plain, noisy):
        self.told.append((plain["action"].clone(), noisy["action"].clone()))


def counting(mode: AutoresetMode, exploration=None) -> ShardCollector:
    needs = Needs(keys=("obs", "action", "given", "carry"), window=Window(stride=1))
    return source(mode, Counting(), needs, exploration)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_row_has_the_recurrent_state_before_it(mode, rows):
    made, seen = counting(mode), 0
    for _ in range(60 // rows):
        s = made.collect(rows)
        carry = torch.where(s["is_first"], 0.0, s["carry"]["rows"].squeeze(-1))
        assert torch.equal(carry[:-1][s["valid"][:-1]], s["given"][:-1][s["valid"][:-1]])
        final = ~s["valid"][1:] & s["valid"][:-1]  # where an episode, or the segment, ends
        assert torch.equal(carry[1:][final], carry[:-1][final] + 1)
        seen += int(final.sum())
    assert seen > COLUMNS


def test_parameter_noise_acts_and_leaves_no_trace():
    extra = Pushing()
    made = counting(AutoresetMode.NEXT_STEP, {"pushing": extra})
    segment = made.collect(6)
    assert segment["action"][:-1].all()
    assert not made.algorithm.push
    assert len(extra.told) == 1
    assert not torch.equal(*extra.told[0])
    segment = made.collect(6, mode="greedy")
    assert not segment["action"][:-1].all()
    assert len(extra.told) == 1


class Talkative(Follower):
    """Says more than is kept, and that cannot be brought to the host."""

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return out | {"q": torch.empty(COLUMNS, 2, device="meta")}, carry


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_is_not_kept_is_not_brought_to_the_host(mode):
    made = source(mode, Talkative())
    assert "q" not in made.spec.row
    for asked in ("random", "explore", "greedy"):
        segment = made.collect(12, mode=asked)
        assert "q" not in segment
        assert segment["valid"].any()


class Ranking(Follower):
    """Packages what nobody keeps into what is kept."""

    def act(self, step, carry, mode):
        out, carry = super().act(step, carry, mode)
        return out | {"extra": out["value"] + 1.0}, carry

    def postprocess(self, data):
        return data | {"value": data["extra"]}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_package_sees_all_that_the_algorithm_said(mode):
    segment = source(mode, Ranking()).collect(7)
    acted = segment["valid"]
    torch.testing.assert_close(segment["value"][acted], 2 * segment["obs"].sum(-1)[acted] + 1.0)
    assert "extra" not in segment


def test_segments_of_one_row_count_what_a_long_one_does():
    rows, columns, generator = 60, 3, torch.Generator().manual_seed(0)
    ends = torch.rand(2, rows + 1, columns, generator=generator) < 0.1
    over = ends[0] | ends[1]
    valid = torch.ones(rows + 1, columns, dtype=torch.bool)
    valid[1:] = ~over[:-1]  # the row behind an end is its final observation
    first = torch.ones_like(valid)
    first[1:] = ~valid[:-1]
    reward = torch.rand(rows + 1, columns, generator=generator)
    stream = {"valid": valid, "is_first": first, "reward": reward, "terminated": ends[0], "truncated": ends[1]}
    whole, single = EpisodeStats(columns), EpisodeStats(columns)
    steps = whole.add(stream)
    assert sum(single.add(tree.take(stream, slice(t, t + 2))) for t in range(rows)) == steps
    one, other = whole.drain(), single.drain()
    assert len(one) > 5
    assert [(n, env) for _, n, env in one] == [(n, env) for _, n, env in other]
    torch.testing.assert_close(torch.tensor([r for r, *_ in one]), torch.tensor([r for r, *_ in other]))


def test_padded_rows_end_no_episode():
    """Their memory may hold the ends of an earlier rollout."""
    valid = torch.tensor([[True], [True], [False], [False]])
    first = torch.tensor([[True], [False], [False], [False]])
    stream = {"valid": valid, "is_first": first, "reward": torch.ones(4, 1)}
    stream |= {"terminated": torch.tensor([[False], [False], [True], [True]]), "truncated": torch.zeros_like(valid)}
    episodes = EpisodeStats(1)
    assert episodes.add(stream) == 2
    assert episodes.drain() == []
    assert episodes.add(stream | {"is_first": torch.zeros_like(valid), "terminated": valid}) == 2
    assert episodes.drain() == [(3.0, 3, 0), (1.0, 1, 0)]
