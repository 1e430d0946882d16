"""Every option of an environment does what it says, in whatever vector it can."""

from contextlib import closing
from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv

from rlplug.envs import EnvList, NativeVector
from rlplug.envs.checking import MisfitError
from rlplug.envs.making import find, make_list, make_native
from rlplug.envs.spaces import equal
from rlplug.envs.wrapping import Wrapping
from rlplug.types import ConfigError
from tests.envs.making import gym
from tests.envs.walking import Counting, Everything, Walk, rows

atari = pytest.mark.skipif(not (find_spec("ale_py") and find_spec("cv2")), reason="needs ale_py and cv2")


def wrapped(env, **options):
    return Wrapping(**options)(env)


def test_frame_stack_is_oldest_first_and_black_before_the_first():
    env = wrapped(Counting(), frame_stack=3)
    assert env.observation_space == Box(0, 255, (3, 6, 7), np.uint8)
    seen = [env.reset(seed=0)[0]] + [env.step(0)[0] for _ in range(3)]
    assert [obs[:, 2, 3].tolist() for obs in seen] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert env.reset(seed=0)[0][:, 0, 0].tolist() == [0, 0, 1]


def test_frame_stack_of_colours_is_channel_first():
    env = wrapped(Counting((6, 7, 3)), frame_stack=2)
    assert env.observation_space == Box(0, 255, (6, 6, 7), np.uint8)
    env.reset(seed=0)
    assert env.step(0)[0][:, 4, 5].tolist() == [1, 101, 201, 2, 102, 202]
    assert wrapped(Counting((3, 6, 7)), frame_stack=2).observation_space.shape == (6, 6, 7)


@pytest.mark.parametrize(("env", "what"), [(Walk(), "Dict"), (gymnasium.make("CartPole-v1"), "a vector")])
def test_frame_stack_is_for_images(env, what):
    with pytest.raises(ConfigError, match=f"env.frame_stack: is 4, but only images are stacked, .* is {what}"):
        wrapped(env, frame_stack=4)


def test_pixels_are_means_of_areas_of_the_rendered_image():
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)

    class Shown(Walk):
        render_mode = "rgb_array"

        def render(self):
            return image

    env = wrapped(Shown(), pixels=2)
    assert env.observation_space == Box(0, 255, (2, 2, 3), np.uint8)
    expected = np.floor(image.reshape(2, 3, 2, 4, 3).mean((1, 3)) + 0.5)
    for obs in (env.reset(seed=0)[0], env.step(1)[0]):
        np.testing.assert_array_equal(obs, expected)
        assert obs in env.observation_space
    np.testing.assert_array_equal(wrapped(Shown(), pixels=4).reset(seed=0)[0][:, 0, 0], [2, 38, 74, 110])
    large = wrapped(Shown(), pixels=12).reset(seed=0)[0]
    np.testing.assert_array_equal(large[::2, ::3], image[:, ::2])
    stacked = wrapped(Shown(), pixels=4, frame_stack=3)
    assert stacked.reset(seed=0)[0].shape == (9, 4, 4)


def test_pixels_of_a_registered_environment():
    with closing(make_list(find("CartPole-v1"), 2, pixels=32)) as env:
        obs = env.reset([0, 1])["obs"]
        assert obs.shape == (2, 32, 32, 3)
        assert obs.min() < 100 < 200 < obs.mean()  # a dark cart on white


def test_pixels_that_cannot_be_had():
    with pytest.raises(
        ConfigError, match=r"env\.pixels: is 64, which takes images of render_mode rgb_array, .* is None"
    ):
        wrapped(Walk(), pixels=64)
    with pytest.raises(ConfigError, match=r"env\.pixels renders single environments; use auto or list"):
        make_native(find("CartPole-v1"), 2, pixels=64)


@atari
def test_pixels_are_not_rendered_beside_those_of_atari():
    with pytest.raises(ConfigError, match=r"env\.pixels: renders images, but env\.atari=true already observes them"):
        make_list(find("ALE/Pong-v5"), 1, pixels=64, atari=True)


def test_frame_skip_repeats_the_action_and_adds_up_the_rewards():
    env = wrapped(Counting(), frame_skip=3)
    env.reset(seed=0)
    obs, reward, *_ = env.step(2)
    assert (obs[0, 0], reward) == (4, 6.0)
    env = gym("Pendulum-v1", frame_skip=3)
    assert env.spec.max_episode_steps == 67  # of the registered 200
    ends = [row["truncated"].all() for row in rows(env, 67, [0, 1])[1:]]
    assert ends == [False] * 66 + [True]


def test_a_limit_counts_the_steps_of_the_agent_and_replaces_the_registered_one():
    for options in ({"max_episode_steps": 7, "frame_skip": 3}, {"max_episode_steps": 300}):
        env = gym("Pendulum-v1", **options)
        limit = options["max_episode_steps"]
        assert env.spec.max_episode_steps == limit
        assert [row["truncated"].all() for row in rows(env, limit, [0, 1])[1:]] == [False] * (limit - 1) + [True]


def test_sticky_actions_repeat_the_last_one_that_often():
    env = wrapped(Counting(), sticky_actions=0.25)
    env.reset(seed=0)
    actions = np.random.default_rng(0).permutation(np.arange(4000) % 10)
    done = [int(env.step(action)[1]) for action in actions]
    changed = [k for k in range(1, 4000) if done[k] != actions[k]]
    assert all(done[k] == done[k - 1] for k in changed)
    assert abs(len(changed) - 0.25 * 0.9 * 4000) < 100  # nine of ten last actions are other ones
    again = wrapped(Counting(), sticky_actions=0.25)
    again.reset(seed=0)
    assert [int(again.step(action)[1]) for action in actions] == done


def test_select_hides_velocities_natively_too():
    for vectorization in ("native", "list"):
        env = gym("CartPole-v1", vectorization=vectorization, select=[0, 2])
        whole = gym("CartPole-v1", vectorization=vectorization)
        assert env.spec.single_agent.obs == Box(
            whole.spec.single_agent.obs.low[[0, 2]], whole.spec.single_agent.obs.high[[0, 2]]
        )
        for a, b in zip(rows(env, 60, [0, 1]), rows(whole, 60, [0, 1]), strict=True):
            assert np.array_equal(a.pop("obs"), b.pop("obs")[:, [0, 2]])
            assert equal(a, b)


def test_drop_and_mask_in_a_vector():
    options = {"drop": ["hand"], "mask_key": "action_mask"}
    native = NativeVector(SyncVectorEnv([Everything] * 2), **options)
    single = EnvList([Wrapping(**options)(Everything()) for _ in range(2)], mask_key="action_mask")
    assert native.spec.single_agent == single.spec.single_agent
    assert list(native.spec.single_agent.obs.spaces) == ["bits", "seen"]
    assert native.spec.extras == single.spec.extras
    for key in ("select", "drop"):
        with pytest.raises(ConfigError, match=f"env.{key}: "):
            NativeVector(SyncVectorEnv([Everything]), **{key: {"select": [0], "drop": ["x"]}[key]})
    with pytest.raises(ConfigError, match=r"env\.select: "):
        NativeVector(SyncVectorEnv([Everything]), drop=["hand"], select=[0])
    with pytest.raises(ConfigError, match="no key of the observation is left"):
        wrapped(Walk(), drop=["position", "side"])


def test_flatten_is_one_vector_of_floats_with_one_hot_indices():
    env = wrapped(Everything(), flatten=True, mask_key="action_mask")
    obs, info = env.reset(seed=0)
    raw, _ = Everything().reset(seed=0)
    assert env.observation_space.dtype == obs.dtype == np.float32
    assert env.observation_space.contains(obs)
    assert obs.shape == (4 + 7 + 60 + 3,)
    hand = [*np.eye(3)[raw["hand"][0] - 1], *np.eye(4)[raw["hand"][1]]]
    turn = np.eye(3)[raw["seen"][1]["turn"] + 1]
    assert obs.tolist() == [*raw["bits"].ravel(), *hand, *raw["seen"][0].ravel(), *turn]
    assert np.array_equal(info["action_mask"], raw["action_mask"])
    assert wrapped(gymnasium.make("Taxi-v4"), flatten=True).reset(seed=0)[0].sum() == 1
    chosen = wrapped(Walk(), flatten=True, select=[1, 4])
    assert chosen.observation_space.shape == (2,)
    with pytest.raises(ConfigError, match=r"env.flatten: the observation space .* cannot be flattened to a vector"):
        wrapped(Worded(), flatten=True)


class Worded(Walk):
    observation_space = Dict(words=gymnasium.spaces.Sequence(Discrete(3)))


def test_auto_takes_the_native_vector_where_that_can_do_what_is_asked_for():
    assert isinstance(gym("CartPole-v1", select=[0], max_episode_steps=9), NativeVector)
    for options in ({"frame_skip": 2}, {"sticky_actions": 0.1}, {"flatten": True}):
        assert isinstance(gym("CartPole-v1", **options), EnvList)
        with pytest.raises(ConfigError, match=f"env.vectorization: env.{next(iter(options))} wrap single environments"):
            gym("CartPole-v1", vectorization="native", **options)


def without_no_ops(env):
    """They are drawn in another way than by ALE's own vector, which takes their number as an argument."""
    preprocessing = env.envs[0]
    while not hasattr(preprocessing, "noop_max"):
        preprocessing = preprocessing.env
    assert preprocessing.noop_max == 30
    preprocessing.noop_max = 0


ATARI = {"atari": True, "frame_skip": 4, "frame_stack": 4, "sticky_actions": 0.0}


@atari
def test_the_preprocessing_of_atari_is_that_of_its_own_vector():
    """From the same state (no no-ops, which are drawn otherwise), the same rows bit for bit, over a whole episode."""
    native = gym("ALE/Pong-v5", 1, **ATARI, kwargs={"noop_max": 0})
    single = gym("ALE/Pong-v5", 1, vectorization="list", **ATARI)
    assert isinstance(native, NativeVector)
    for env in (native, single):
        assert env.spec.single_agent.obs == Box(0, 255, (4, 84, 84), np.uint8)
        assert (env.spec.frame_stack, env.spec.max_episode_steps) == (4, 27000)
    without_no_ops(single)
    row, other = native.reset([0]), single.reset([0])
    ended, steps, total = False, 0, 0.0
    while not ended:
        assert equal(row, other), steps
        action = np.array([steps % 6])
        row, other = native.step(action), single.step(action)
        ended = bool(row["terminated"][0] or row["truncated"][0])
        steps, total = steps + 1, total + float(row["reward"][0])
    assert equal(row, other)
    assert steps > 700
    assert total <= -19
    action = np.array([0])
    assert equal(native.step(action), single.step(action))  # the next episode's first row, black before it
    assert not single.step(action)["obs"][0, :2].any()


@atari
def test_every_life_of_breakout_begins_with_fire():
    """A policy that never fires loses its five lives, in the vector as in single environments, game after game."""
    native = gym("ALE/Breakout-v5", 1, **ATARI, fire=True, kwargs={"noop_max": 0})
    single = gym("ALE/Breakout-v5", 1, vectorization="list", **ATARI, fire=True)
    assert isinstance(native, NativeVector)
    without_no_ops(single)
    assert equal(native.reset([0]), single.reset([0]))
    ends, action = 0, np.array([0])
    for _ in range(600):
        row, other = native.step(action), single.step(action)
        assert equal(row, other)
        ends += bool(row["terminated"][0])
    assert ends >= 2
    waiting = gym("ALE/Breakout-v5", 1, **ATARI)
    waiting.reset([0])
    assert not any(waiting.step(action)["terminated"][0] for _ in range(600))


@atari
@pytest.mark.parametrize("vectorization", ["native", "list"])
def test_a_game_without_fire_is_told(vectorization):
    with pytest.raises(ConfigError, match=r"env.fire: ALE/Freeway-v5 has no action FIRE; its actions are NOOP, UP"):
        gym("ALE/Freeway-v5", 1, vectorization=vectorization, **ATARI, fire=True)


@atari
def test_options_of_atari():
    for vectorization in ("native", "list"):
        options = ATARI | {"vectorization": vectorization, "max_episode_steps": 13, "frame_stack": 1}
        env = gym("ALE/Breakout-v5", **options)
        assert env.spec.single_agent.obs == Box(0, 255, (1, 84, 84), np.uint8)
        ends = [row["truncated"].all() for row in rows(env, 13, [0, 1])[1:]]
        assert ends == [False] * 12 + [True]
    with pytest.raises(ConfigError, match=r"env.vectorization: the vector of ALE/Pong-v5 preprocesses images"):
        gym("ALE/Pong-v5", vectorization="native")
    assert isinstance(gym("ALE/Pong-v5", 1), EnvList)


@atari
@pytest.mark.parametrize("vectorization", ["native", "list"])
def test_rewards_of_atari_are_not_clipped(vectorization):
    env = gym("ALE/MsPacman-v5", 1, vectorization=vectorization, **ATARI)
    assert max(float(row["reward"][0]) for row in rows(env, 150, [0])[1:]) >= 10


@atari
@pytest.mark.parametrize("vectorization", ["native", "list"])
def test_sticky_actions_of_atari_are_the_emulators(vectorization):
    """Without them equal actions give equal episodes from all seeds; with them, other ones."""

    def episode(sticky, seed):
        kwargs = {"noop_max": 0} if vectorization == "native" else {}
        env = gym("ALE/Pong-v5", 1, vectorization=vectorization, **ATARI | {"sticky_actions": sticky}, kwargs=kwargs)
        if vectorization == "list":
            without_no_ops(env)
        env.reset([seed])
        for k in range(40):
            row = env.step(np.array([2 + k % 2]))
        return row["obs"].tobytes()

    assert len({episode(0.0, seed) for seed in range(5)}) == 1
    assert len({episode(0.5, seed) for seed in range(5)}) > 2


@pytest.mark.parametrize("options", [{"mask_key": "action_mask"}, {"drop": ["bits"]}])
def test_a_key_that_is_missing_is_named(options):
    env = Wrapping(**options)(Everything())
    env.reset(seed=0)
    whole = env.unwrapped._obs
    env.unwrapped._obs = lambda: {key: part for key, part in whole().items() if key != "hand"}
    with pytest.raises(MisfitError, match="the observation lacks 'hand', which its space has"):
        env.step(0)
