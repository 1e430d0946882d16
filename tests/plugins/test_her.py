"""Goals in hindsight: which ones, what they are worth, and that a continued run draws the same."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlplug
from rlplug.api import Needs, Segment, Window
from rlplug.config import choose, default_node
from rlplug.envs import EnvList
from rlplug.envs.goals import EnvGoals
from rlplug.functional.sequences import n_step_transitions
from rlplug.testing.context import context
from rlplug.types import ConfigError, EnvSpec, Group

COLUMNS, LENGTH = 3, 90
VECTOR = spaces.Box(-np.inf, np.inf, (2,), np.float32)
SPEC = EnvSpec(
    {"agent": Group(spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), VECTOR)), VECTOR)}
)


class Near:
    """Rewards of goals that are numbers: reached within 1.5; ``ends`` of those that are even."""

    def __init__(self, ends=True):
        self.ends = ends

    def reward(self, achieved, desired):
        return -(np.abs(achieved - desired)[..., 0] > 1.5 * COLUMNS).astype(np.float32)

    def terminated(self, achieved, desired):
        return (self.reward(achieved, desired) == 0) & (desired[..., 0] % 2 == 0) if self.ends else None


class Stream:
    """Row ``i`` of column ``b`` achieves ``i * COLUMNS + b``; column 0 is one long episode, others end by chance."""

    def __init__(self):
        dice = np.random.default_rng(0)
        self.number = torch.arange(LENGTH * COLUMNS).view(LENGTH, COLUMNS)
        final = torch.from_numpy(dice.random((LENGTH, COLUMNS)) < 0.15)
        final[:, 0] = False
        final[1:] &= ~final[:-1]
        self.final, self.valid = final, ~final
        self.is_first = torch.cat([torch.ones(1, COLUMNS, dtype=torch.bool), final[:-1]])
        ended = torch.cat([final[1:], torch.zeros(1, COLUMNS, dtype=torch.bool)])
        self.terminated, self.truncated = ended & (self.number % 2 == 0), ended & (self.number % 2 == 1)

    def segment(self, start, length, columns=slice(0, COLUMNS), shard=0):
        rows = slice(start, start + length + 1)
        keys = ("valid", "is_first", "terminated", "truncated")
        batch = {key: getattr(self, key)[rows, columns].clone() for key in keys}
        batch["valid"][-1] = False
        number = self.number[rows, columns]
        goal = number[..., None].repeat(1, 1, 2).float()
        obs = {"observation": -goal, "achieved_goal": goal, "desired_goal": torch.full_like(goal, -1000.0)}
        return Segment(batch | {"obs": obs, "action": number, "reward": number * 1.0 + 0.5}, columns, shard)

    def episode(self, number):
        """First and last row of the episode of a row; the end of the stream where it has not ended."""
        row, column = divmod(number, COLUMNS)
        first = np.flatnonzero(self.is_first[: row + 1, column].numpy())[-1]
        return first, next(iter(row + np.flatnonzero(self.final[row:, column].numpy())), LENGTH)


STREAM = Stream()


def make(window=1, batch=256, ends=True, capacity=COLUMNS * 200, rows=1, seed=0, **changes):
    needs = Needs(Window(window), data="windows", off_policy=True, keys=("obs", "action"))
    ctx = context(SPEC, needs=needs, num_envs=COLUMNS, batch_size=batch, rollout_length=rows, seed=seed)
    ctx.goals = lambda: Near(ends)
    node = default_node("buffer", "her") | {"capacity": capacity} | changes
    return choose("buffer", "buffer", node).build(ctx)


def other(sample):
    """Which windows of a sample have another goal, ``[B]``."""
    return sample["obs"]["desired_goal"][0, :, 0] != -1000.0


def goals(sample):
    """Number of the row whose goal a window has, and of the window's own first row."""
    mine = other(sample)
    goal, number = sample["obs"]["desired_goal"], sample["action"][0]
    assert (goal == goal[:1]).all()
    assert (goal[..., 0] == goal[..., 1]).all()
    return list(zip(number[mine].tolist(), goal[0, mine, 0].long().tolist(), strict=True))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_other_goals_were_achieved_in_the_same_episode(strategy, window, rows):
    buffer, written = make(window, rows=rows, strategy=strategy), 0
    seen = set()
    while written + rows < LENGTH:
        buffer.add(STREAM.segment(written, rows))
        written += rows
        if written % 12 or not buffer.ready():
            continue
        pairs = goals(buffer.sample())
        assert pairs
        for number, goal in pairs:
            (row, column), (at, of) = divmod(number, COLUMNS), divmod(goal, COLUMNS)
            first, last = STREAM.episode(number)
            last = min(last, written)  # the open row is the last one so far
            low = {"future": min(row + window, last), "final": last, "episode": first}[strategy]
            assert of == column
            assert low <= at <= last
            seen.add((number, at - low))
    if strategy == "future":
        assert {behind for _, behind in seen} > {0, 1, 2, 3, 4, 5}


def test_every_row_that_may_give_a_goal_is_drawn_equally_often():
    buffer = make(batch=50_000, k=10**6)
    buffer.add(STREAM.segment(0, 10))
    pairs = goals(buffer.sample())
    behind = np.bincount([divmod(goal, COLUMNS)[0] for number, goal in pairs if number == 0], minlength=11)
    assert behind[0] == 0
    assert behind[1:] == pytest.approx(behind.sum() / 10, rel=0.15)


@pytest.mark.parametrize(("k", "share"), [(0, 0.0), (1, 0.5), (4, 0.8)])
def test_k_of_k_and_1_windows_have_another_goal(k, share):
    buffer = make(batch=20_000, k=k)
    buffer.add(STREAM.segment(0, 50))
    sample = buffer.sample()
    assert other(sample).float().mean() == pytest.approx(share, abs=0.012)
    own = ~other(sample)
    assert torch.equal(sample["reward"][0, own], sample["action"][0, own] + 0.5)  # as it was
    for key in ("terminated", "truncated", "valid"):
        number = sample["action"][0, own]
        assert torch.equal(sample[key][0, own], getattr(STREAM, key).view(-1)[number])


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("window", [1, 3])
def test_rewards_and_ends_are_those_of_the_new_goal_in_all_rows_of_a_window(window, ends):
    buffer, near = make(window, batch=500, ends=ends), Near()
    buffer.add(STREAM.segment(0, LENGTH - 1))
    sample = buffer.sample()
    assert torch.equal(sample["obs"]["achieved_goal"], -sample["obs"]["observation"])
    found = {key: sample[key].numpy() for key in ("action", "reward", "valid", "terminated", "truncated")}
    was = {key: getattr(STREAM, key).numpy() for key in ("final", "terminated", "truncated")}
    ended = 0
    for b in np.flatnonzero(other(sample)):
        goal, (row, column) = sample["obs"]["desired_goal"][0, b].numpy(), divmod(found["action"][0, b], COLUMNS)
        for i, now in enumerate(range(row, row + window)):
            if was["final"][now, column]:
                break  # what is behind is of another episode
            achieved = np.float32([(now + 1) * COLUMNS + column])
            over = near.terminated(achieved, goal[:1]) if ends else was["terminated"][now, column]
            assert found["valid"][i, b]
            assert found["reward"][i, b] == near.reward(achieved, goal[:1])
            assert found["terminated"][i, b] == over
            assert found["truncated"][i, b] == (was["truncated"] | was["terminated"] & ~over)[now, column]
            ended += over
            if ends and over:
                assert not found["valid"][i + 1 :, b].any()
                break
    assert ended > 20


def test_the_discount_of_n_steps_stops_where_the_new_goal_is_reached():
    buffer = make(3, batch=4000, k=10**6)
    buffer.add(STREAM.segment(0, 30))  # of column 0, one episode
    sample = buffer.sample()
    gap = ((sample["obs"]["desired_goal"][0, :, 0] - sample["action"][0]) / COLUMNS).long()
    even = sample["obs"]["desired_goal"][0, :, 0] % 2 == 0
    folded = n_step_transitions(sample, 0.5)
    whole = (sample["action"][0] % COLUMNS == 0) & other(sample)
    for behind, returns, discount in ((3, -1.0, 0.0), (4, -1.5, 0.0), (5, -1.75, 0.125)):  # reached within one row
        there = whole & (gap == behind) & even
        assert there.any()
        assert (folded["returns"][there] == returns).all()
        assert (folded["discount"][there] == discount).all()
    odd = whole & (gap == 3) & ~even
    assert (folded["discount"][odd] == 0.125).all()
    assert (folded["returns"][odd] == -1.0).all()


def test_around_the_end_of_the_ring():
    buffer = make(2, batch=200, capacity=COLUMNS * 12, strategy="episode", k=10**6)
    for start in range(LENGTH - 1):
        buffer.add(STREAM.segment(start, 1))
        if start < 20:
            continue
        oldest, written = start + 1 - 12, start + 1
        for number, goal in goals(buffer.sample()):
            first, last = STREAM.episode(number)
            assert goal % COLUMNS == number % COLUMNS
            assert max(first, oldest) <= goal // COLUMNS <= min(last, written)


def test_shards_have_their_own_episodes():
    buffer = make(2, batch=2000, rows=3)
    for start in range(0, 60, 3):
        buffer.add(STREAM.segment(start, 3, slice(0, 1), 0))
        if start % 2:
            buffer.add(STREAM.segment(start // 6 * 3, 3, slice(1, COLUMNS), 1))
    written = (60, 30, 30)
    for number, goal in goals(sample := buffer.sample()):
        (row, column), (at, of) = divmod(number, COLUMNS), divmod(goal, COLUMNS)
        _, last = STREAM.episode(number)
        last = min(last, written[column])
        assert of == column
        assert min(row + 2, last) <= at <= last
    assert set((sample["action"][0] % COLUMNS).tolist()) == {0, 1, 2}


# ---- what the environment computes ---------------------------------------------------------------------------------


class Line(gymnasium.Env):
    """A point on a line; ``kind`` says how its functions take goals."""

    def __init__(self, kind="many", continuous=False):
        part = spaces.Box(-2.0, 2.0, (1,), np.float64)
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), part))
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if continuous else spaces.Discrete(2)
        self.kind = kind
        if kind != "none":
            self.compute_reward = self.reward_of
        if kind == "single":
            self.compute_terminated = lambda a, d, info: bool(np.linalg.norm(a - d) < 0.1)

    def reward_of(self, achieved, desired, info):
        if self.kind == "info":
            return info["distance"]
        assert achieved.dtype == np.float64
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 1)
        return self.row(), {}

    def row(self):
        return {"observation": self.at, "achieved_goal": self.at, "desired_goal": np.ones(1)}

    def step(self, action):
        self.at = np.clip(self.at + 0.1 * (np.asarray(action).reshape(-1)[:1] * 2.0 - 1.0), -2, 2)
        return self.row(), float(self.reward_of(self.at, np.ones(1), {})), False, False, {}


def test_functions_that_take_many_goals_are_called_once():
    goals = EnvList([Line()]).traits.goals()
    achieved = np.array([[0.0], [0.05], [1.0]], np.float32)
    assert goals.reward(achieved, np.zeros((3, 1), np.float32)).tolist() == [0.0, 0.0, -1.0]
    assert goals.reward(achieved, achieved).dtype == np.float32
    assert goals.terminated(achieved, achieved) is None


def test_functions_that_take_one_goal_are_called_for_each(capsys):
    goals = EnvGoals(Line("single"))
    achieved = np.array([[0.0], [0.05], [1.0]], np.float32)
    assert goals.terminated(achieved, np.zeros((3, 1), np.float32)).tolist() == [True, True, False]
    assert "accepts one goal at a time" in capsys.readouterr().err


def test_an_environment_that_computes_nothing_or_wants_more_is_refused():
    assert EnvList([Line("none")]).traits.goals() is None
    with pytest.raises(ConfigError, match=r"^env: reward_of of .* raises KeyError: 'distance'; it is given two goals"):
        EnvGoals(Line("info"))


gymnasium.register("HindsightLine-v0", entry_point=Line, max_episode_steps=20)
GOALS = ["algo=dqn", "env=gymnasium", "env.id=HindsightLine-v0"]
LINE = ["buffer=her", "total_steps=64", "logger=[]", "eval.every=0", "hardware=cpu"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["algo=dqn", "env=cartpole"],
            r"^buffer: her reads goals from a Dict .* lacks observation, achieved_goal, desired_goal",
        ),
        ([*GOALS, "+env.kwargs.kind=none"], r"^env: this environment has no compute_reward.*use buffer=replay"),
        ([*GOALS, "env.drop=[achieved_goal]"], r"^buffer: .*lacks achieved_goal"),
        ([*GOALS, "env.flatten=true"], r"^buffer: .*lacks observation, achieved_goal, desired_goal"),
        ([*GOALS, "model=lstm"], r"^buffer: her keeps no recurrent states.*buffer=sequence"),
        (
            [*GOALS, "buffer.strategy=random"],
            r"^buffer\.strategy: 'random' is none of .*'future', 'final' or 'episode'",
        ),
        ([*GOALS, "buffer.k=-1"], r"^buffer\.k: -1 is out of range"),
        (["algo=ppo", *GOALS[1:]], r"^buffer: her gives windows of older data, but ppo learns from the last round"),
    ],
    ids=str,
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_written(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        rlplug.train([*LINE, *words])
    assert not list(tmp_path.iterdir())


def test_goals_of_another_kind_are_refused():
    parts = {"observation": VECTOR, "achieved_goal": VECTOR, "desired_goal": spaces.Box(0, 1, (3,), np.float32)}
    spec = replace(SPEC, groups={"agent": Group(spaces.Dict(parts), VECTOR)})
    node = choose("buffer", "buffer", default_node("buffer", "her"))
    with pytest.raises(ConfigError, match=r"^buffer: her replaces desired goals by achieved ones"):
        node.reads(spec)
