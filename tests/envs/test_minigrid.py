"""MiniGrid and BabyAI: any id plays, and what varies in a mission is seen."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import MultiDiscrete

from rlplug.cli import main
from rlplug.config import choose, default_node
from rlplug.envs.mission import BABYAI
from rlplug.types import ConfigError, RunError

pytest.importorskip("minigrid")
COLORS = ("blue", "green", "grey", "purple", "red", "yellow")
FETCH = "MiniGrid-Fetch-5x5-N2-v0"
SMALL = ("algo=ppo", "num_envs=2", "rollout_fragment_length=8", "algo.sgd_minibatch_size=16", "model.hidden=[8]")
SHORT = ("total_steps=32", "eval.every=0", "eval.episodes=1", "env.max_episode_steps=10", "logger.only=[]")


def build(id, n=2, option="minigrid", **changes):
    node = default_node("env", option, {"id": id} | changes)
    return choose("env", "env", node).build(SimpleNamespace(env_ids=range(n), num_envs=n, render=False, role="actor"))


def said(env, tokens):
    """The mission of one column, in words."""
    words = ["", *sorted(["a", "ball", "fetch", "get", "go", "key", "must", "you", *COLORS])]
    return " ".join(words[token] for token in tokens).strip()


def test_the_words_of_a_mission_are_numbers_that_its_space_decides():
    env = build(FETCH)
    assert env.spec.single_agent.obs["mission"] == MultiDiscrete([15] * 6)
    single = gymnasium.make(FETCH)
    for seed in range(5):
        row = env.reset([seed, seed + 1])
        wanted = single.reset(seed=int(np.random.SeedSequence([seed, 0]).generate_state(1)[0]))[0]["mission"]
        assert said(env, row["obs"]["mission"][0]) == wanted
    env.close()


@pytest.mark.parametrize(
    ("id", "changes", "keys"),
    [
        (FETCH, {"mission": False}, ["direction", "image"]),
        ("MiniGrid-Empty-5x5-v0", {}, ["direction", "image"]),
        ("MiniGrid-Empty-5x5-v0", {"mission": True}, ["direction", "image", "mission"]),
        ("MiniGrid-Playground-v0", {}, ["direction", "image"]),
        ("BabyAI-GoToLocal-v0", {}, ["direction", "image", "mission"]),
        ("BabyAI-GoToLocal-v0", {"vectorization": "subprocess"}, ["direction", "image", "mission"]),
    ],
)
def test_what_is_always_the_same_is_left_out(id, changes, keys):
    env = build(id, **changes)
    assert sorted(env.reset([0, 1])["obs"]) == keys
    env.close()


@pytest.mark.parametrize(
    ("id", "changes", "message"),
    [
        (FETCH, {"backend": "envpool"}, r"env\.backend: is envpool, which does not provide missions; use gymnasium"),
        ("CartPole-v1", {"mission": True}, r"env\.mission: is true, but the observation has no mission: it is Box"),
        (
            "MiniGrid-Playground-v0",
            {"mission": True},
            r"env\.mission: is true, but the mission has no words; use false",
        ),
    ],
)
def test_a_mission_that_cannot_be_shown_is_refused(id, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(id, **changes)


def test_a_word_that_the_mission_space_does_not_know_ends_the_run():
    env = build("BabyAI-GoToLocal-v0", 1)
    env.envs[0].unwrapped.reset = lambda **_: ({"direction": 0, "image": None, "mission": "go to the zebra"}, {})
    with pytest.raises(RunError, match=r"environment 0 .* has the word 'zebra', which its space does not contain"):
        env.reset([0])
    env.close()


def test_gymnasium_names_the_preset_that_serves_missions(capsys):
    assert main(["env=gymnasium", f"env.id={FETCH}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "rlplug: env.id: its observation contains a mission as text; use env=minigrid, which encodes it"


@pytest.mark.parametrize("model", ["mlp", "multi_input"])
def test_a_run_learns_from_missions(model, tmp_path):
    model = [f"model={model}", *(["model@model.image=mlp"] if model == "multi_input" else [])]
    words = ["env=minigrid", f"env.id={FETCH}", *model, *SMALL, *SHORT, f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(words) == 0


@pytest.mark.slow
def test_every_id_plays():
    """And no episode has a word that its space does not know."""
    import minigrid  # noqa: F401  registers them

    ids = [id for id in gymnasium.registry if id.startswith(("MiniGrid-", "BabyAI-"))]
    assert len(ids) > 150
    for id in ids:
        if "-WFC-" in id:  # its patterns are not in the package
            continue
        env = build(id, 1)
        for seed in range(4):
            env.reset([seed])
            env.step(np.zeros(1, int))
        env.close()
    assert len(set(BABYAI)) == len(BABYAI)
