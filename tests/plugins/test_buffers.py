"""What each buffer draws, and that images come back as they were; streams and checkpoints are the kit's checks."""

from __future__ import annotations

import builtins
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from rlplug import tree
from rlplug.api import Needs, Segment, Window
from rlplug.checkpointing.format import Checkpoint, FileRowLog, folder_of, write
from rlplug.checkpointing.serialize import copy_to_host, decode, encode
from rlplug.config import choose, default_node
from rlplug.plugins.algo.ddpg import DDPG
from rlplug.plugins.algo.dqn import DQN
from rlplug.plugins.algo.sac import SAC
from rlplug.testing.checks.runs import differences
from rlplug.testing.configs import config
from rlplug.testing.context import context, spec
from rlplug.types import ConfigError, RunError
from tests.checkpointing.test_format import snapshot

WINDOWS = Needs(data="windows", off_policy=True, keys=("obs", "action"))


def make(name, needs=WINDOWS, columns=2, batch=64, of=None, rows=1, shards=1, **changes):
    run = {"num_envs": columns, "rollout_length": rows, "batch_size": batch, "num_shards": shards}
    node = default_node("buffer", name)
    node |= {"capacity": 200} if "capacity" in node and needs.data == "windows" else {}
    return choose("buffer", "buffer", node | changes).build(context(of, needs=needs, **run))


def segment(start, length=1, columns=2, valid=None, **more):
    number = torch.arange(start * columns, (start + length + 1) * columns).view(-1, columns)
    flags = {key: torch.zeros(length + 1, columns, dtype=torch.bool) for key in ("terminated", "truncated", "is_first")}
    flags["valid"] = torch.ones(length + 1, columns, dtype=torch.bool) if valid is None else valid.clone()
    flags["valid"][-1] = False
    obs = number[..., None].float().repeat(1, 1, 4)
    return Segment(flags | {"obs": obs, "action": number, "reward": number.float()} | more)


# ---- priorities ----------------------------------------------------------------------------------------------------


def four(**changes):
    """Four transitions with priorities 1 to 4."""
    buffer = make("prioritized", columns=1, epsilon=1e-12, **changes)
    buffer.add(segment(0, 4, 1))
    buffer.feedback(torch.arange(4), {"priority": torch.arange(1.0, 5.0)})
    return buffer


def test_probabilities_and_weights():
    sample = four(alpha=0.6, beta=0.4).sample()
    prob = torch.tensor([0.14823, 0.22467, 0.28655, 0.34054])
    weight = torch.tensor([1.0, 0.84675, 0.76823, 0.71698])
    torch.testing.assert_close(sample["sample_prob"], prob[sample["index"]], atol=6e-6, rtol=0)
    torch.testing.assert_close(sample["weight"], (4 * sample["sample_prob"]) ** -0.4)
    torch.testing.assert_close(sample["weight"] / sample["weight"].max(), weight[sample["index"]], atol=1e-5, rtol=0)


def test_draws_follow_the_priorities_one_of_each_stratum():
    buffer = four(alpha=1.0)
    drawn = torch.stack([buffer.sample()["index"] for _ in range(100)])
    # of 64 strata, 6.4, 12.8, 19.2 and 25.6 lie in the four: only the strata on their borders are left to chance
    counts = torch.stack([(drawn == i).sum(1) for i in range(4)], 1)
    assert ((counts.float() - 64 * torch.tensor([0.1, 0.2, 0.3, 0.4])).abs() < 2).all()
    torch.testing.assert_close(counts.float().mean(0) / 64, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.004, rtol=0)


def test_new_rows_have_the_largest_priority_so_far_even_where_it_is_gone():
    buffer = four(alpha=1.0)
    buffer.feedback(torch.arange(4), {"priority": torch.ones(4)})
    buffer.add(segment(4, 1, 1))
    sample = buffer.sample()
    assert sample["sample_prob"][sample["index"] == 4][0] == pytest.approx(4 / 8)


def test_beta_follows_its_schedule():
    buffer = four(alpha=1.0, beta=[[0, 0.0], [100, 1.0]])
    torch.testing.assert_close(buffer.sample()["weight"], torch.ones(64))
    buffer.ctx.schedules.refresh(100)
    sample = buffer.sample()
    torch.testing.assert_close(sample["weight"], 1 / (4 * sample["sample_prob"]))


def test_only_whole_windows_are_drawn_and_only_those_that_are_still_there():
    buffer = make(
        "prioritized",
        Needs(Window(3), data="windows", off_policy=True, keys=("obs", "action")),
        columns=1,
        batch=256,
        capacity=20,
    )
    buffer.add(segment(0, 1, 1))
    buffer.add(segment(1, 1, 1))
    assert not buffer.ready()
    for start in range(2, 50):
        buffer.add(segment(start, 1, 1))
        oldest, newest = max(0, start + 1 - 20), start + 1 - 3
        assert sorted(set(buffer.sample()["index"].tolist())) == list(range(oldest, newest + 1))
        assert len(buffer) == newest - oldest + 1


def test_priorities_of_rows_that_are_gone_not_whole_or_not_valid_are_ignored():
    valid = torch.ones(2, 1, dtype=torch.bool)
    buffer = make("prioritized", columns=1, capacity=10, alpha=1.0)
    for start in range(30):
        buffer.add(segment(start, 1, 1, valid & (start != 25)))
    before = buffer.sample()["sample_prob"]
    buffer.feedback(torch.tensor([10, 19, 25, 30, 10**6]), {"priority": torch.full((5,), 1e6)})
    torch.testing.assert_close(buffer.sample()["sample_prob"], before, rtol=0, atol=0)
    assert buffer.max_priority == 1.0
    assert 25 not in buffer.sample()["index"]
    buffer.feedback(torch.tensor([20]), {"priority": torch.tensor([1e6])})
    assert set(buffer.sample()["index"].tolist()) == {20}


def test_a_priority_that_is_no_number_stops_the_run():
    with pytest.raises(RunError, match="NaN"):
        four().feedback(torch.tensor([1]), {"priority": torch.tensor([torch.nan])})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("prioritized", "carry"), ("replay", "carry"), ("sequence", "td_error"), ("rollout", "priority")),
        *(("queue", "priority"), ("circular", "priority"), ("episodes", "carry")),
    ],
)
def test_feedback_that_a_buffer_does_not_keep_is_refused(name, key):
    windows = name in ("prioritized", "replay", "sequence")
    buffer = recurrent(name) if windows else make(name, Needs(data="episodes" if name == "episodes" else "segments"))
    with pytest.raises(RunError, match=rf"'{key}' was fed back to the buffer {name}, which does not keep it"):
        buffer.feedback(torch.tensor([0]), {key: torch.ones(1)})


def test_the_first_priority_is_that_of_the_row_where_a_window_begins():
    needs = Needs(Window(2), data="windows", off_policy=True, keys=("obs", "action", "priority"))
    buffer = make("prioritized", needs, 1, 1024, alpha=1.0, epsilon=1e-12, rows=3)
    for start in (0, 3):  # row 3 comes twice: open, then with its action
        priority = torch.arange(start + 1.0, start + 5.0)[:, None]
        priority[-1] = 1e6
        buffer.add(segment(start, 3, 1, priority=priority))
    sample = buffer.sample()
    assert set(sample["index"].tolist()) == set(range(5))
    torch.testing.assert_close(sample["sample_prob"], (sample["index"] + 1).float() / 15)
    with pytest.raises(RunError, match=r"an initial priority.*NaN"):
        buffer.add(segment(6, 3, 1, priority=torch.full((4, 1), torch.nan)))


@pytest.mark.parametrize("algorithm", [DQN, DDPG, SAC])
def test_sequences_end_with_the_rows_that_only_returns_reach(algorithm):
    needs = algorithm.recurrent(
        config(f"algo/{algorithm.__name__.lower()}", n_step=3, sequence_length=5), Needs(Window(3))
    )
    assert (needs.window.length, needs.window.lookahead) == (7, 2)


@pytest.mark.parametrize(("lookahead", "wanted"), [(0, {0: 5 / 17, 2: 9 / 17, 4: 3 / 17}), (1, {0: 5 / 14, 2: 9 / 14})])
def test_the_first_priority_of_a_sequence_is_the_largest_of_the_rows_that_it_learns_from(lookahead, wanted):
    keys = ("obs", "action", "priority")
    needs = Needs(Window(3 + lookahead, 2, 2, lookahead), data="windows", off_policy=True)
    needs = replace(needs, keys=(*keys, "carry"))
    buffer = make("sequence", needs, 1, 1024, alpha=1.0, epsilon=1e-12, rows=3)
    priority = torch.tensor([1e6, 1e6, 1.0, 5.0, 2.0, 9.0, 3.0, 1.0, 0.0, 0.0])[:, None]
    for start in range(0, 9, 3):  # windows learn from rows 2 to 4, 4 to 6 and 6 to 8
        own = priority[start : start + 4]
        buffer.add(segment(start, 3, 1, priority=own, carry={"h": torch.zeros(4, 1, 2)}))
    sample = buffer.sample()
    assert {i: round(p, 5) for i, p in zip(sample["index"].tolist(), sample["sample_prob"].tolist(), strict=True)} == {
        i: round(p, 5) for i, p in wanted.items()
    }


def test_the_largest_priority_resumes():
    buffer, store = four(alpha=1.0), FileRowLog()
    buffer.feedback(torch.arange(4), {"priority": torch.ones(4)})
    buffer.save(store)
    other = make("prioritized", columns=1, epsilon=1e-12, alpha=1.0)
    other.load(store)
    assert other.max_priority == 4.0
    assert len(other) == 4


# ---- a replay in parts -----------------------------------------------------------------------------------------------


def parts_of(env_ids, num_envs, ranks=1, rank=0, batch=8, columns=None, num_shards=None, rows=9, **changes):
    """A buffer of the environments ``env_ids`` of one rank, and its first rows; row t of column b has t + 10 b."""
    needs = Needs(data="windows", off_policy=True, keys=("obs", "action", "priority"))
    ctx = context(needs=needs, num_envs=num_envs, env_ids=env_ids, world_size=ranks, rank=rank, batch_size=batch)
    node = default_node("buffer", "prioritized") | {"capacity": 200, "num_shards": num_shards} | changes
    buffer = choose("buffer", "buffer", node).build(ctx)
    for shard, part in enumerate(columns or [slice(0, len(env_ids))]):
        ids = torch.tensor(list(env_ids)[part])
        priority = (torch.arange(rows + 1.0)[:, None] + 1) * (1 + ids) ** 3
        numbers = {"action": torch.arange(rows + 1)[:, None] + 10 * ids, "priority": priority}
        own = segment(0, rows, len(ids), **numbers)
        buffer.add(replace(own, columns=part, shard=shard))
    return buffer


def test_every_part_gives_as_much_of_a_sample():
    """The last environment's rows have the largest priorities by far: half of a sample without parts."""
    for shards, most in ((1, 45), (2, 29), (4, 25)):
        batch = parts_of(range(4), 4, num_shards=shards, batch=100).sample()
        counts = torch.bincount(batch["action"][0] // 10, minlength=4)
        per_part = counts.view(shards, -1).sum(1).tolist()
        assert per_part == [100 // shards] * shards
        assert counts[3] >= most
        for part in range(shards):  # within a part, in proportion to its priorities
            mine = (batch["action"][0] // 10) // (4 // shards) == part
            ids = torch.arange(part * (4 // shards), (part + 1) * (4 // shards))
            weight = (torch.arange(9.0)[:, None] + 1) * (1 + ids) ** 3
            prob = (weight + 1e-6) ** 0.6
            prob = prob[batch["action"][0][mine] % 10, batch["action"][0][mine] // 10 - ids[0]] / prob.sum()
            torch.testing.assert_close(batch["sample_prob"][mine], prob)
            torch.testing.assert_close(batch["weight"][mine], (9 * len(ids) * prob) ** -0.4)


@pytest.mark.parametrize("columns", [None, [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]], ids=["one", "actors"])
def test_one_rank_with_two_parts_draws_what_two_ranks_draw(columns):
    """Ranks draw their share of one global noise; the shards of a collector have nothing to do with the parts."""
    whole = parts_of(range(4), 4, num_shards=2, columns=columns)
    halves = [parts_of(range(2 * rank, 2 * rank + 2), 4, 2, rank, num_shards=2) for rank in range(2)]
    for _ in range(3):
        drawn, shares = whole.sample(), [half.sample() for half in halves]
        for key in ("action", "sample_prob", "weight"):
            axis = int(key == "action")
            torch.testing.assert_close(drawn[key], torch.cat([share[key] for share in shares], axis))
        for buffer, batch in ((whole, drawn), *zip(halves, shares, strict=True)):
            buffer.feedback(batch["index"], {"priority": batch["action"][0].float() + 1})
    assert len(whole) == sum(map(len, halves))


def test_a_part_without_rows_gives_none_and_parts_are_kept():
    needs = Needs(data="windows", off_policy=True, keys=("obs", "action"))
    buffer = make("prioritized", needs, columns=4, batch=6, num_shards=4)
    for shard in (0, 2, 3):  # another actor has sent nothing yet
        buffer.add(replace(segment(0, 5, 1), columns=slice(shard, shard + 1), shard=shard))
    index, store = buffer.sample()["index"], FileRowLog()
    assert (index % 4).tolist() == [0, 0, 2, 2, 3, 3]
    buffer.feedback(index, {"priority": torch.arange(1.0, 7.0)})
    buffer.save(store)
    other = make("prioritized", needs, columns=4, batch=6, num_shards=4)
    other.load(store)
    for one in (buffer, other):
        one.ctx.generators["learner"].manual_seed(3)
    again, now = buffer.sample(), other.sample()
    assert torch.equal(again["index"], now["index"])
    assert torch.equal(again["sample_prob"], now["sample_prob"])
    assert buffer.nbytes(segment(0).batch) >= buffer._tree._sums.nbytes


@pytest.mark.parametrize(
    ("envs", "ranks", "parts", "said"),
    [
        (4, 2, 1, "1 is less than the 2 ranks, which need at least one each; use 2 or more"),
        (4, 2, 3, "3 parts cannot be shared equally among num_envs=4, and among 2 rank(s); use 2 or 4"),
        (6, 1, 4, "4 parts cannot be shared equally among num_envs=6, and among 1 rank(s); use 1 or 2 or 3 or 6"),
        (3, 2, 2, "2 parts cannot be shared equally among num_envs=3, and among 2 rank(s); use 3"),
        (1, 2, 2, "2 parts cannot be shared equally among num_envs=1, and among 2 rank(s); use null"),
    ],
)
def test_parts_that_cannot_be_shared_are_refused(envs, ranks, parts, said):
    ids = range(envs // ranks) if envs % ranks == 0 else range(envs)
    with pytest.raises(ConfigError) as error:
        parts_of(ids, envs, ranks, num_shards=parts)
    assert str(error.value) == f"buffer.num_shards: {said}"


# ---- sequences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("burn_in", "window", "every"), [(0, 4, 4), (2, 5, 3), (4, 4, 1), (1, 3, 7)])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_sequences_against_a_brute_force_stream(burn_in, window, every, length):
    columns, total, capacity = 3, 120, 40 * 3
    dice = np.random.default_rng(0)
    valid = torch.from_numpy(dice.random((total + 1, columns)) < 0.4)
    valid[50:75, 1] = False
    needs = Needs(Window(window, burn_in, every), data="windows", off_policy=True, keys=("obs", "action", "carry"))
    buffer = make("sequence", needs, columns, 512, rows=length, capacity=capacity, alpha=0.0, beta=1.0)
    ever = set()
    for start in range(0, total - length, length):
        number = torch.arange(start * columns, (start + length + 1) * columns).view(-1, columns)
        carry = {"h": -number[..., None].float(), "inner": {"c": number.float()}}
        buffer.add(segment(start, length, columns, valid[start : start + length + 1], carry=carry))
        written = start + length
        oldest = max(0, written - capacity // columns)
        wanted = {
            (row, column)
            for row in range(0, written, every)
            for column in range(columns)
            if row >= oldest
            and row + burn_in + window <= written
            and valid[row + burn_in : row + burn_in + window, column].any()
        }
        assert buffer.ready() == bool(wanted)
        if not wanted:
            continue
        sample = buffer.sample()
        rows, found = sample["action"] // columns, sample["action"] % columns
        drawn = set(zip(rows[0].tolist(), found[0].tolist(), strict=True))
        assert drawn == wanted
        ever |= drawn
        torch.testing.assert_close(sample["sample_prob"], torch.full((512,), 1 / len(wanted)))
        torch.testing.assert_close(sample["weight"], torch.ones(512))
        assert torch.equal(rows, rows[0] + torch.arange(burn_in + window + 1)[:, None].expand_as(rows))
        assert (found == found[0]).all()
        known = valid.clone()
        known[written:] = False
        assert torch.equal(sample["valid"], known[rows, found])
        assert torch.equal(sample["carry"]["h"][..., 0], -sample["action"][:1].float())
        assert torch.equal(sample["carry"]["inner"]["c"], sample["action"][:1].float())
    assert len(ever) > 10


def test_sequences_by_priority():
    needs = Needs(Window(4, 2, 2), data="windows", off_policy=True, keys=("obs", "action", "carry"))
    buffer = make("sequence", needs, 1, 64, alpha=1.0, epsilon=1e-12)
    for start in range(12):
        buffer.add(segment(start, 1, 1, carry={"h": torch.zeros(2, 1, 1)}))
    index = torch.tensor([0, 2, 4, 6])
    buffer.feedback(index, {"priority": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    sample = buffer.sample()
    torch.testing.assert_close(sample["sample_prob"], (sample["index"] / 2 + 1).float() / 10)
    assert set(sample["index"].tolist()) == set(index.tolist())


def recurrent(name="sequence", columns=1, batch=256, **changes):
    window = Needs(Window(4, 2, 2), data="windows", off_policy=True, keys=("obs", "action", "carry"))
    return make(name, window, columns, batch, capacity=20 * columns, **changes)


def carried(start, columns=1, **more):
    """One transition whose states say their row and column."""
    number = torch.arange(start * columns, (start + 2) * columns).view(-1, columns)
    carry = {"q": {"h": number[..., None].float().repeat(1, 1, 2), "c": number.float()}}
    return segment(start, 1, columns, carry=carry, **more)


def states(buffer):
    sample = buffer.sample()
    return {
        int(i): (c.item(), h.tolist())
        for i, c, h in zip(sample["index"], sample["carry"]["q"]["c"][0], sample["carry"]["q"]["h"][0], strict=True)
    }


def test_states_that_are_fed_back_replace_the_stored_ones_and_a_checkpoint_has_them():
    buffer, store = recurrent(), FileRowLog()
    for start in range(30):
        buffer.add(carried(start))
    buffer.save(store)
    before = states(buffer)
    assert min(before) == 10
    fresh = torch.tensor([[-1.0, -2.0, -3.0], [-11.0, -22.0, -33.0], [-111.0, -222.0, -333.0]])
    index = torch.tensor([10, 20, 8])  # row 8 is gone
    buffer.feedback(index, {"carry": {"q": {"h": fresh[..., None].repeat(1, 1, 2), "c": fresh}}})
    wanted = before | {row: (c, [c, c]) for row, c in ((10, -1.0), (12, -11.0), (14, -111.0))}
    wanted |= {row: (c, [c, c]) for row, c in ((20, -2.0), (22, -22.0), (24, -222.0))}
    assert states(buffer) == wanted
    buffer.save(store)
    loaded = recurrent()
    loaded.load(store)
    assert states(loaded) == wanted
    buffer.add(carried(30))
    buffer.add(carried(31))
    assert states(buffer)[12] == wanted[12], "later rows leave it"
    with pytest.raises(RunError, match="n at most 4: one state for every 2 rows"):
        buffer.feedback(torch.tensor([20]), {"carry": {"q": {"h": torch.ones(5, 1, 2), "c": torch.ones(5, 1)}}})


def test_a_checkpoint_has_the_states_of_rows_that_were_written_only():
    buffer, store = recurrent(), FileRowLog()
    for start in range(7):
        buffer.add(carried(start))
    fresh = torch.tensor([[-1.0], [-2.0]])
    buffer.feedback(torch.tensor([0]), {"carry": {"q": {"h": fresh[..., None].repeat(1, 1, 2), "c": fresh}}})
    buffer.save(store)
    assert store.state["carry"]["q"]["c"].flatten().tolist() == [-1.0, -2.0, 4.0, 6.0]  # of every other row
    loaded = recurrent()
    loaded.load(store)
    for start in range(7, 10):
        for each in (buffer, loaded):
            each.add(carried(start))
    assert states(loaded) == states(buffer)


def test_of_two_states_for_a_row_the_longer_unrolled_one_is_kept():
    buffer = recurrent()
    for start in range(20):
        buffer.add(carried(start))
    fresh = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    buffer.feedback(torch.tensor([10, 8]), {"carry": {"q": {"h": fresh[..., None].repeat(1, 1, 2), "c": fresh}}})
    assert [states(buffer)[row][0] for row in (8, 10, 12)] == [-2.0, -4.0, -3.0]


@pytest.mark.parametrize("shards", [1, 2])
def test_any_stored_key_can_be_fed_back_and_a_checkpoint_has_it(shards):
    needs = Needs(Window(3), data="windows", off_policy=True, keys=("obs", "action", "target"))

    def an_empty_one():
        return make("replay", needs, capacity=20)

    buffer, store = an_empty_one(), FileRowLog()
    for start in range(15):
        rows = segment(start, 1, 2, target={"value": torch.zeros(2, 2, 3)})
        for shard in range(shards):
            of = slice(shard, shard + 1) if shards == 2 else slice(0, 2)
            buffer.add(Segment(tree.map(lambda x, of=of: x[:, of], rows.batch), of, shard))
    buffer.save(store)
    new = torch.stack([torch.full((3, 3), 1.0 + k) for k in range(2)])  # [k, n, 3]
    new[:, 1] += 10.0
    index = torch.tensor([12 * 2, 11 * 2, 0])  # rows 12 and 11 of column 0; row 0 is gone
    buffer.feedback(index, {"target": {"value": new}})

    def kept(of):
        found = of.rings.read(np.array([10]), np.array([0]), 4)
        return found["target"]["value"][:, 0, 0].tolist()

    assert kept(buffer) == [0.0, 11.0, 12.0, 2.0, 0.0]  # of row 12, what came from the window with more rows
    assert buffer.rings.read(np.array([10]), np.array([1]), 4)["target"]["value"].eq(0.0).all()
    buffer.save(store)
    loaded = an_empty_one()
    loaded.load(store)
    assert kept(loaded) == kept(buffer)
    with pytest.raises(RunError, match=r"'target.value' was fed back with shape \[2, 2, 1\]"):
        buffer.feedback(index, {"target": {"value": new[..., :1]}})
    with pytest.raises(RunError, match="'valid' was fed back"):
        buffer.feedback(index, {"valid": new})


def test_sequences_are_of_recurrent_models():
    with pytest.raises(ConfigError, match="use buffer=prioritized"):
        make("sequence")


# ---- images --------------------------------------------------------------------------------------------------------


def images(stack=4, shape=(12, 12), dtype=np.uint8):
    return replace(spec(spaces.Box(0, 255, (stack, *shape), dtype), 2), frame_stack=stack)


def walk(reset, step, turns, columns):
    """Rows of environments that reset in the step after the one that ended, and say so."""
    over, first, rows = np.zeros(columns, bool), np.ones(columns, bool), []
    obs = reset()
    for _ in range(turns):
        rows.append((obs.copy(), first, ~over))
        obs, ended = step(over)
        first, over = over, ended
    return [np.stack(leaf) for leaf in zip(*rows, strict=True)]


class Counter(gymnasium.Env):
    """Images with a patch of noise; episodes of 1 to 9 steps."""

    observation_space = spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return self.image(), {}

    def step(self, action):
        self.left -= 1
        return self.image(), 0.0, self.left == 0, False, {}

    def image(self):
        image = np.zeros((12, 12), np.uint8)
        image[3:6, 2:6] = self.np_random.integers(1, 256, (3, 4), np.uint8)
        return image


def gymnasium_rows(turns, columns, padding):
    envs = [FrameStackObservation(Counter(), 4, padding_type=padding) for _ in range(columns)]

    def step(over):
        results = [
            (env.reset()[0], False) if o else (lambda r: (r[0], r[2]))(env.step(0))
            for env, o in zip(envs, over, strict=True)
        ]
        return np.stack([r[0] for r in results]), np.array([r[1] for r in results])

    return walk(lambda: np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)]), step, turns, columns)


def atari_rows(turns, columns, **options):
    vector_env = pytest.importorskip("ale_py.vector_env")
    env = vector_env.AtariVectorEnv("breakout", columns, img_height=42, img_width=42, **options)
    dice = np.random.default_rng(0)

    def step(over):
        obs, _, terminated, truncated, _ = env.step(dice.integers(0, 4, columns))
        return obs, terminated | truncated

    return walk(lambda: env.reset(seed=np.arange(columns))[0], step, turns, columns)


STREAMS = {
    "gymnasium-first-frame": lambda: gymnasium_rows(160, 3, "reset"),
    "gymnasium-zeros": lambda: gymnasium_rows(160, 3, "zero"),
    "atari": lambda: atari_rows(250, 3),
    "atari-lives": lambda: atari_rows(250, 3, episodic_life=True),
}


@pytest.mark.parametrize(("length", "compress"), [(1, None), (5, "lz4")])
@pytest.mark.parametrize("stream", STREAMS)
def test_stacks_come_back_as_they_were(stream, length, compress):
    obs, first, valid = STREAMS[stream]()
    assert first[1:].any(), "no episode has ended"
    columns, size = obs.shape[1], obs.shape[-1]
    of, capacity = images(4, (size, size)), columns * 40
    options = {"deduplicate": True, "compress": compress, "compressed_share": 0.9}
    needs = Needs(Window(2), data="windows", off_policy=True, keys=("obs", "action"))
    buffer = make("replay", needs, columns, 128, of, length, capacity=capacity, **options)
    for start in range(0, len(obs) - length, length):
        rows = slice(start, start + length + 1)
        more = {"obs": torch.from_numpy(obs[rows]), "is_first": torch.from_numpy(first[rows])}
        buffer.add(segment(start, length, columns, torch.from_numpy(valid[rows]), **more))
        if not buffer.ready() or start // length % 5:
            continue
        sample = buffer.sample()
        row, column = sample["action"] // columns, sample["action"] % columns
        assert torch.equal(sample["obs"], torch.from_numpy(obs)[row, column])
    (ring,) = buffer.rings
    assert ring.oldest - ring.first <= 4, "of a ring that is full, more is lost than what its oldest stacks are made of"


def test_a_column_that_waits_for_others_repeats_its_row():
    obs, first, valid = gymnasium_rows(40, 1, "reset")
    again = np.repeat(np.arange(40), np.random.default_rng(1).integers(1, 4, 40))
    wait = np.append(again[1:] == again[:-1], False)
    buffer = make("replay", columns=1, of=images(), batch=256)
    for start in range(len(again) - 1):
        rows = again[start : start + 2]
        more = {"obs": torch.from_numpy(obs[rows]), "is_first": torch.from_numpy(first[rows])}
        ok = torch.from_numpy(valid[rows] & ~wait[start : start + 2, None])
        buffer.add(segment(start, 1, 1, ok, **more))
    sample = buffer.sample()
    assert torch.equal(sample["obs"], torch.from_numpy(obs)[torch.from_numpy(again)[sample["action"]], 0])


@pytest.mark.parametrize("where", ["middle", "first"])
def test_observations_that_are_no_stacks_are_refused(where):
    buffer = make("replay", columns=1, of=images())
    noise = torch.randint(1, 255, (3, 1, 4, 12, 12), dtype=torch.uint8)
    first = torch.tensor([[True], [False], [False]])
    if where == "middle":
        noise[0] = noise[0, :, :1]
    with pytest.raises(RunError, match=r"not stacks of 4 frames.*buffer\.deduplicate=false"):
        buffer.add(segment(0, 2, 1, obs=noise, is_first=first))
    plain = make("replay", columns=1, of=images(), deduplicate=False)
    plain.add(segment(0, 2, 1, obs=noise, is_first=first))
    sample = plain.sample()
    assert torch.equal(sample["obs"], noise[sample["action"], 0])


def test_a_stream_that_begins_within_an_episode_is_drawn_from_once_its_frames_are_there():
    obs, first, _ = gymnasium_rows(40, 1, "reset")
    first[:] = False
    frames = np.stack([obs[0, 0, -1] * 0 + i + 1 for i in range(40)])
    obs = np.stack([frames[i : i + 4] for i in range(30)])[:, None]
    buffer = make("replay", columns=1, of=images(), batch=256)
    for start in range(20):
        more = {"obs": torch.from_numpy(obs[start : start + 2])}
        buffer.add(segment(start, 1, 1, **more))
    sample = buffer.sample()
    assert set(sample["index"].tolist()) == set(range(3, 20))
    assert torch.equal(sample["obs"], torch.from_numpy(obs)[sample["action"], 0])


def test_colour_frames_stacked_channel_first():
    dice = np.random.default_rng(0)
    frames = dice.integers(0, 256, (30, 3, 8, 8), np.uint8)
    frames[:2] = frames[0]
    obs = np.stack([frames[max(0, i - 1) : i + 2][-2:].reshape(6, 8, 8) for i in range(20)])[:, None]
    buffer = make("replay", columns=1, of=replace(spec(spaces.Box(0, 255, (6, 8, 8), np.uint8), 2), frame_stack=2))
    for start in range(19):
        more = {"obs": torch.from_numpy(obs[start : start + 2]), "is_first": torch.tensor([[start == 0], [False]])}
        buffer.add(segment(start, 1, 1, **more))
    sample = buffer.sample()
    assert torch.equal(sample["obs"], torch.from_numpy(obs)[sample["action"], 0])
    row = {key: leaf[0] for key, leaf in segment(0, 1, 1, obs=torch.from_numpy(obs[:2])).batch.items()}
    plain = make("replay", columns=1, of=images(), deduplicate=False)
    assert buffer.nbytes(row) < 0.65 * plain.nbytes(row)


def test_images_of_a_dict_are_compressed_and_the_rest_is_not():
    space = spaces.Dict(camera=spaces.Box(0, 255, (16, 16, 3), np.uint8), speed=spaces.Box(-1, 1, (4,), np.float32))
    buffer = make("replay", columns=2, of=spec(space, 2), compress="lz4", compressed_share=1.0)
    camera = torch.zeros(31, 2, 16, 16, 3, dtype=torch.uint8)
    camera[..., 3:9, :, :] = torch.arange(62, dtype=torch.uint8).view(31, 2, 1, 1, 1)
    for start in range(30):
        more = {"camera": camera[start : start + 2], "speed": torch.full((2, 2, 4), float(start))}
        buffer.add(segment(start, 1, 2, obs=more))
    sample = buffer.sample()
    row, column = sample["action"] // 2, sample["action"] % 2
    assert torch.equal(sample["obs"]["camera"], camera[row, column])
    assert (sample["obs"]["speed"][0, :, 0] == row[0]).all()


def add_all(buffer, obs):
    for start in range(len(obs) - 1):
        buffer.add(segment(start, 1, 1, obs=obs[start : start + 2]))


def test_where_images_need_more_than_their_share_the_oldest_rows_go_and_it_is_said():
    noise = torch.randint(0, 256, (300, 1, 1, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noise[::7, ..., :7, :] = 0  # blocks of two lengths
    buffer = make("replay", columns=1, of=images(1), compress="lz4", compressed_share=0.5, batch=512)
    with pytest.warns(UserWarning, match=r"buffer\.compressed_share=0\.5"):
        add_all(buffer, noise)
    sample = buffer.sample()
    assert torch.equal(sample["obs"], noise[sample["action"], 0])
    assert 90 <= len(buffer) <= 115  # of 200
    store = FileRowLog()
    buffer.save(store)
    loaded = make("replay", columns=1, of=images(1), compress="lz4", compressed_share=0.5, batch=512)
    with pytest.warns(UserWarning, match="keeps fewer rows"):
        loaded.load(store)
    rings = [next(iter(each.rings)) for each in (buffer, loaded)]
    ends = [ring._images["obs",].pool.end for ring in rings]
    assert ends[0] == ends[1], "blocks lie elsewhere, and rows would go at other times"
    for start in range(299, 420):
        more = {"obs": noise[[start % 300, (start + 1) % 300]]}
        buffer.add(segment(start, 1, 1, **more))
        loaded.add(segment(start, 1, 1, **more))
        assert rings[0].oldest == rings[1].oldest
    tiny = make("replay", columns=1, of=images(1), compress="lz4", compressed_share=0.01)
    with pytest.raises(RunError, match=r"compressed_share=0\.01"):
        add_all(tiny, noise)


def test_only_images_are_compressed():
    with pytest.raises(ConfigError, match=r"buffer\.compress: only uint8 images.*use null"):
        make("replay", compress="lz4")
    with pytest.raises(ConfigError, match="only uint8 images"):
        make("replay", of=images(dtype=np.float32), compress="lz4")


def test_without_lz4_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("lz4"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("lz4")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rlplug\[lz4\]'"):
        make("replay", of=images(), compress="lz4")


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_what_is_saved_of_stacks_is_their_frames(compress):
    obs, first, valid = gymnasium_rows(60, 1, "reset")
    buffer, store = make("replay", columns=1, of=images(), compress=compress), FileRowLog()
    for start in range(59):
        rows = slice(start, start + 2)
        more = {"obs": torch.from_numpy(obs[rows]), "is_first": torch.from_numpy(first[rows])}
        buffer.add(segment(start, 1, 1, torch.from_numpy(valid[rows]), **more))
    buffer.save(store)
    saved = sum(leaf.nbytes for piece in store.chunks for leaf in tree.leaves(piece.rows["obs"]))
    assert saved < 59 * (144 + 4 * 2) * (0.5 if compress else 1.0001)


def test_a_capacity_that_holds_no_sample_is_refused_with_one_that_does():
    with pytest.raises(ConfigError, match=r"buffer\.capacity.*at least 10 is needed"):
        make("replay", columns=2, of=images(), capacity=9)
    make("replay", columns=2, of=images(), capacity=10)


def test_rollouts_stand_side_by_side_with_their_carries():
    buffer = make("rollout", columns=2)
    for shift in (0.0, 10.0):
        buffer.add(segment(0, 3, 2, carry={"pi": {"h": torch.full((4, 2, 5), shift)}}))
    sample = buffer.sample()
    assert sample["carry"]["pi"]["h"].shape == (4, 4, 5)
    assert sample["carry"]["pi"]["h"][0, :, 0].tolist() == [0.0, 0.0, 10.0, 10.0]


# ---- shards --------------------------------------------------------------------------------------------------------

SHARDS = (slice(0, 2), slice(2, 3), slice(3, 6))
"""of six columns; a number of transitions each in a turn"""
PACES = (1, 5, 2)


def part_of(shard, row, length, valid):
    """Rows of one shard, whose numbers say row and column of all."""
    columns = SHARDS[shard]
    width = columns.stop - columns.start
    rows = segment(0, length, width).batch
    number = (torch.arange(row, row + length + 1)[:, None] * 6) + torch.arange(columns.start, columns.stop)
    rows |= {"action": number, "reward": number.float(), "obs": number[..., None].float().repeat(1, 1, 4)}
    rows["valid"][:-1] = torch.from_numpy(valid[row : row + length, columns])
    rows["carry"] = {"h": -number.float()}
    return Segment(rows, columns, shard)


def of_shards(name, **changes):
    needs = Needs(Window(3), data="windows", off_policy=True, keys=("obs", "action"))
    if name == "sequence":
        needs = replace(needs, window=replace(needs.window, burn_in=1, stride=2), keys=(*needs.keys, "carry"))
    return make(name, needs, 6, 512, rows=5, capacity=6 * 30, **changes)


@pytest.mark.parametrize("name", ["replay", "prioritized", "sequence"])
def test_shards_have_rows_of_their_own_and_are_drawn_from_together(name):
    changes = {} if name == "replay" else {"alpha": 0.0, "beta": 1.0}
    buffer, loaded, store, ever = of_shards(name, **changes), of_shards(name, **changes), FileRowLog(), set()
    valid = np.random.default_rng(0).random((400, 6)) < 0.7
    burn_in, stride = (1, 2) if name == "sequence" else (0, 1)
    written = [0, 0, 0]
    for turn in range(60):
        for shard, pace in enumerate(PACES):
            if turn % (shard + 1) or (shard == 2 and turn < 10):  # the third one begins later
                continue
            buffer.add(part_of(shard, written[shard], pace, valid))
            if turn > 30:
                loaded.add(part_of(shard, written[shard], pace, valid))
            written[shard] += pace
        if turn == 20:
            buffer.save(store)
        if turn == 30:
            appended = {number: len(part.own) for number, part in store.parts.items()}
            buffer.save(store)
            assert not store.own
            assert sorted(store.parts) == [1, 2, 3]
            assert all(len(part.own) >= appended[number] for number, part in store.parts.items())
            loaded.load(FileRowLog(store.chunks, decode(encode(copy_to_host(store.state)))))
            loaded.ctx.load(buffer.ctx.state(), 0)
        wanted = {
            row * 6 + column
            for shard, columns in enumerate(SHARDS)
            for column in range(columns.start, columns.stop)
            for row in range(max(0, written[shard] - 30), written[shard] - 3 - burn_in + 1)
            if row % stride == 0
            and (valid[row + 1 : row + 4, column].any() if name == "sequence" else valid[row, column])
        }
        if not wanted:
            continue
        sample = buffer.sample()
        assert set(sample["index"].tolist()) <= wanted
        if name != "replay":
            assert set(sample["index"].tolist()) == wanted
        assert torch.equal(sample["action"][0], sample["index"])
        assert torch.equal(sample["action"], sample["index"] + 6 * torch.arange(len(sample["action"]))[:, None])
        torch.testing.assert_close(sample["sample_prob"], torch.full((512,), 1 / len(wanted)))
        if name == "sequence":
            assert torch.equal(sample["carry"]["h"], -sample["action"][:1].float())
        ever |= set((sample["index"] % 6).tolist())
        feedback = {"priority": 1.0 + sample["index"] % 5}
        if name == "sequence":
            feedback["carry"] = {"h": -sample["action"][:3:2].float()}
        buffer.feedback(sample["index"], feedback)
        if turn >= 30:
            other = loaded.sample()
            assert not differences(sample, other)
            loaded.feedback(other["index"], feedback)
    assert ever == set(range(6))
    assert len(set(written)) == 3


def test_priorities_of_all_shards_are_one_distribution():
    buffer = of_shards("prioritized", alpha=1.0, epsilon=1e-12)
    valid = np.ones((50, 6), bool)
    for shard in range(3):
        buffer.add(part_of(shard, 0, 5, valid))
    index = torch.arange(18)
    buffer.feedback(index, {"priority": index.float()})
    sample = buffer.sample()
    torch.testing.assert_close(sample["sample_prob"], sample["index"].float() / index.sum())


def test_a_buffer_of_several_shards_goes_through_a_checkpoint_on_disk(tmp_path):
    buffer, loaded, store = of_shards("prioritized"), of_shards("prioritized"), FileRowLog()
    valid = np.ones((50, 6), bool)
    for shard, length in enumerate((3, 5, 4)):
        buffer.add(part_of(shard, 0, length, valid))
    buffer.save(store)
    path = write(folder_of(tmp_path, 1), snapshot(1, store))
    loaded.load(FileRowLog(Checkpoint(path).chunks(), store.state))
    assert not differences(buffer.sample(), loaded.sample())
    assert sorted(file.name for file in path.glob("*_rows_*")) == [
        f"rank0_part{part}_rows_0_{length}.pt" for part, length in ((1, 3), (2, 5), (3, 4))
    ]


def test_other_shards_than_those_of_a_checkpoint_are_refused():
    buffer = of_shards("replay")
    buffer.add(part_of(0, 0, 5, np.ones((9, 6), bool)))
    with pytest.raises(RunError, match="resume it with as many actors"):
        buffer.add(Segment(segment(0, 5, 2).batch, slice(1, 3), 1))
