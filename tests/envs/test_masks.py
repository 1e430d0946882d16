"""Action masks, whichever way an environment gives them."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiBinary
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlplug.envs import EnvList, NativeVector, make_list
from rlplug.envs.making import find
from rlplug.envs.masks import Masks, find_masks
from rlplug.envs.wrapping import Wrapping
from rlplug.types import ConfigError, RunError
from tests.envs.walking import Everything, Faulty, Walk, rows

SEEDS = [3, 1, 4]


def by_hand(make, of, seed, steps):
    """(mask, is the row final) of single episodes, one after another; the actions are the first ones allowed."""
    env, episode, out = make(), 0, []
    while len(out) < steps:
        obs, info = env.reset(seed=int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]))
        end = False
        while True:
            out.append(of(obs, info))
            if end or len(out) == steps:
                break
            obs, _, terminated, truncated, info = env.step(int(np.argmax(out[-1])))
            end = terminated or truncated
        episode += 1
    return out


def first_allowed(row):
    return row["action_mask"].argmax(1)


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda: gymnasium.make("Taxi-v4", max_episode_steps=9), lambda obs, info: info["action_mask"]),
        (Everything, lambda obs, info: obs["action_mask"]),
    ],
    ids=["info", "obs"],
)
def test_masks_are_those_of_the_environment(make, of):
    wrap = Wrapping(mask_key="action_mask")
    env = EnvList([wrap(make()) for _ in SEEDS], mask_key="action_mask")
    size = int(env.envs[0].action_space.n)
    assert env.spec.extras == {"action_mask": MultiBinary(size)}
    assert "action_mask" not in getattr(env.spec.single_agent.obs, "spaces", {})
    seen = rows(env, 30, SEEDS, first_allowed)
    for i, seed in enumerate(SEEDS):
        expected = np.array(by_hand(make, of, seed, 31), np.bool_)
        assert np.array_equal([row["action_mask"][i] for row in seen], expected)
    assert all(row["action_mask"].dtype == np.bool_ for row in seen)
    assert sum(int((row["terminated"] | row["truncated"]).sum()) for row in seen[1:]) >= 9


@pytest.mark.parametrize(
    "make", [lambda: gymnasium.make("Taxi-v4", max_episode_steps=9), Everything], ids=["info", "obs"]
)
def test_vectors_give_them_in_every_mode(make):
    """The same masks beside the same observations; final ones as ``final_action_mask`` if an episode has begun."""

    def pairs(mode):
        env = NativeVector(SyncVectorEnv([make] * 3, autoreset_mode=mode), mask_key="action_mask")
        final, out = np.zeros(3, np.bool_), [[] for _ in SEEDS]
        row = env.reset(SEEDS)
        for _ in range(40):
            before = row
            row = env.step(before["action_mask"].argmax(1))
            for i in np.flatnonzero(~final):
                last = row.get("final_action_mask", row["action_mask"])[i]
                out[i].append((before["action_mask"][i].tolist(), last.tolist(), float(row["reward"][i])))
            final = (row["terminated"] | row["truncated"]) & (env.autoreset is AutoresetMode.NEXT_STEP)
            assert ("final_action_mask" in row) == (
                env.autoreset is not AutoresetMode.NEXT_STEP and bool((row["terminated"] | row["truncated"]).any())
            )
        return out

    one, *others = [pairs(mode) for mode in AutoresetMode]
    assert len({str(mask) for column in one for mask, *_ in column}) > 3
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert a == b[: len(a)]


def test_masks_of_several_parts_are_joined():
    env = EnvList([Faulty(Faulty.fine)], mask_key="action_mask")
    assert env.reset([0])["action_mask"].tolist() == [[True, True, False, True, True]]
    assert env.step(np.zeros((1, 2), np.int64))["action_mask"].tolist() == [[True, True, False, True, True]]


def test_without_the_key_there_is_none():
    for key in (None, "legal"):
        env = make_list(find("Taxi-v4"), 1, mask_key=key)
        assert env.spec.extras == {}
        assert "action_mask" not in env.reset([0]) | env.step(np.zeros(1, np.int64))
    wrapped = Wrapping()(Everything())
    assert "action_mask" in wrapped.observation_space.spaces


class Late(Walk):
    """Says which actions are allowed from a step on, and nothing of it at a reset."""

    silent = 2  # calls: a list, or a vector, asks for masks at a reset of its own

    def say(self, info):
        self.silent -= 1
        return info if self.silent >= 0 else info | {"action_mask": np.array([1, 0])}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, self.say(info)

    def step(self, action):
        *row, info = super().step(action)
        return *row, self.say(info)


class LateAtAReset(Late):
    """From the second reset on."""

    silent = 1


@pytest.mark.parametrize("cls", [Late, LateAtAReset])
@pytest.mark.parametrize(
    "make",
    [
        lambda cls, **options: EnvList([cls()], **options),
        lambda cls, **options: NativeVector(SyncVectorEnv([cls]), **options),
    ],
    ids=["list", "native"],
)
def test_masks_that_the_first_reset_had_not_stop_the_run(cls, make):
    def play(**options):
        env = make(cls, **options)
        assert not env.spec.extras
        env.reset([0])
        env.step(np.zeros(1, np.int64))

    said = "info has 'action_mask', which the first reset lacked; return it every time, or set env.mask_key=null"
    with pytest.raises(RunError, match=rf"^environment 0 .*: {said}$"):
        play(mask_key="action_mask")
    play(mask_key=None)


def test_masks_for_continuous_actions_are_refused():
    with pytest.raises(ConfigError, match=r"env.mask_key: .* for actions in Box"):
        find_masks(Box(-1, 1, (2,)), "m", {"m": 1})
    assert find_masks(Box(-1, 1, (2,)), "m", {}) is None


def test_every_part_needs_an_allowed_action():
    masks = Masks(Faulty.action_space, "m")
    assert masks.read({"m": [1, 0, 0, 0, 1]}, final=False, terminated=False).astype(int).tolist() == [1, 0, 0, 0, 1]
    assert masks.read({"m": [1, 1, 0, 0, 0]}, final=True, terminated=True).tolist() == [True] * 5
    assert masks.read({}, final=True, terminated=False).tolist() == [True] * 5
