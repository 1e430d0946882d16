"""Settings of a pair, conf/tuned/<algo>_<env>.yaml: what takes them, and what they leave alone."""

from functools import cache
from pathlib import Path

import pytest
import yaml

from rlplug.cli import main
from rlplug.config import compose, composed, default_node, option_names, tuned
from rlplug.types import ConfigError


def line(*overrides: str) -> str | None:
    pair = tuned(composed(overrides).hydra)
    return pair and str(pair)


def test_the_plain_line_has_the_settings_of_its_pair():
    run = compose(["algo=dqn", "env=cartpole"])
    assert (run.total_steps, run.replay_ratio, run.models["model"].cfg.hidden) == (75_000, 0.25, [256])
    assert line("algo=dqn", "env=cartpole") == "tuned for dqn on cartpole; tuned=none for the algorithm's own defaults"


@pytest.mark.parametrize("words", [["tuned=none"], ["~tuned"]])
def test_switched_off_the_algorithm_has_its_own_defaults(words):
    run = compose(["algo=dqn", "env=cartpole", *words])
    assert run.total_steps == 100_000
    assert {"name": "dqn", **vars(run.algo.cfg)} == default_node("algo", "dqn")
    assert line("algo=dqn", *words) is None


def test_a_pair_without_settings_has_the_algorithms_own():
    assert compose(["algo=dqn", "env=acrobot"]).raw == compose(["algo=dqn", "env=acrobot", "tuned=none"]).raw
    assert line("algo=dqn", "env=acrobot") is None


def test_another_component_gets_nothing_of_them():
    """What a pair sets for the model that its algorithm chooses is not for another model."""
    run = compose(["algo=dqn", "env=cartpole", "model=lstm", "buffer=sequence", "buffer.capacity=3000"])
    assert run.raw["model"] == default_node("model", "lstm")
    assert run.raw["buffer"] == default_node("buffer", "sequence", {"capacity": 3000})
    assert run.algo.cfg.adam_epsilon == 1e-4
    assert line("algo=dqn", "env=cartpole", "model=lstm").startswith("tuned for dqn on cartpole, except model=lstm;")


def test_an_environment_may_choose_the_model_of_algorithms_without_one():
    """The settings of the pair are for that model."""
    own = compose(["algo=league", "env=connect_four"])
    assert own.raw["model"] == default_node("model", "cnn", {"filters": [[64, 4, 1]], "hidden": [256]})
    assert compose(["algo=league", "env=connect_four", "model=mlp"]).raw["model"] == default_node("model", "mlp")
    assert compose(["algo=independent_dqn", "env=connect_four"]).raw["model"] == default_node("model", "mlp256")
    assert line("algo=league", "env=connect_four", "model=mlp").startswith(
        "tuned for league on connect_four, except model=mlp;"
    )


def test_a_pair_may_bring_exploration_and_its_settings():
    assert list(compose(["algo=sac", "env=mountaincar_continuous"]).exploration) == ["ornstein_uhlenbeck"]
    assert compose(["algo=sac", "env=mountaincar_continuous", "exploration=[]"]).exploration == {}
    for name in ("ornstein_uhlenbeck", "gaussian"):
        assert list(compose(["algo=sac", "env=mountaincar_continuous", f"exploration={name}"]).exploration) == [name]
    curious = compose(["algo=ppo", "env=frozenlake_12x12", "exploration=icm"])
    assert curious.exploration["icm"].cfg.eta == 0.05
    assert compose(["algo=ppo", "env=frozenlake_12x12"]).exploration == {}


def test_a_component_that_is_chosen_by_its_own_name_changes_nothing():
    words = ["algo=sac", "env=mountaincar_continuous", "exploration.ornstein_uhlenbeck.sigma=0.3"]
    plain = compose(words)
    assert plain.exploration["ornstein_uhlenbeck"].cfg.sigma == 0.3
    assert compose([*words, "model=mlp256"]).raw == plain.raw


def test_they_can_be_taken_for_another_environment(capsys):
    words = ["algo=dqn", "env=acrobot", "tuned=dqn_cartpole"]
    assert compose(words).total_steps == 75_000
    assert line(*words).startswith("settings of tuned/dqn_cartpole.yaml;")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tuned=dqn_cartpol", "tuned: unknown option 'dqn_cartpol'; did you mean dqn_cartpole"),
        ("tuned=null", "tuned: unknown option 'null'"),
        ("algo=[dqn]", "algo: should be exactly one option of a2c"),
        ("~env", "env: should be exactly one option of acrobot"),
        ("~env algo=sac", "env: should be exactly one option of acrobot"),
    ],
)
def test_mistakes(word, message):
    with pytest.raises(ConfigError) as error:
        compose(word.split())
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_folder_of_ones_own_brings_them_too(tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "sac_pendulum.yaml").write_text("# @package _global_\nalgo:\n  gamma: 0.9\n")
    folder = f"hydra.searchpath=[file://{tmp_path}]"
    assert compose([folder, "algo=sac", "env=pendulum"]).algo.cfg.gamma == 0.9
    assert line(folder, "algo=sac", "env=pendulum").startswith("tuned for sac on pendulum;")
    assert compose([folder, "algo=sac", "env=pendulum", "model=lstm"]).raw["model"] == default_node("model", "lstm")


def test_every_job_of_a_sweep_has_those_of_its_pair(tmp_path, capsys):
    quick = ["total_steps=512", "num_envs=2", "rollout_fragment_length=128", "logger.only=[]", "eval.every=0"]
    quick += ["num_steps_sampled_before_learning_starts=100", "eval.episodes=1"]
    assert main(["-m", "algo=dqn,ppo", "env=cartpole", *quick, f"hydra.sweep.dir={tmp_path}"]) == 0
    said = capsys.readouterr().err
    assert all(f"rlplug: tuned for {algo} on cartpole;" in said for algo in ("dqn", "ppo"))
    nodes = [yaml.safe_load(path.read_text())["algo"] for path in sorted(tmp_path.rglob("config.yaml"))]
    values = {node["name"]: node.get("adam_epsilon", node.get("lambda_")) for node in nodes}
    assert values == {"dqn": 1e-4, "ppo": 0.8}


def test_every_pair_composes():
    pairs = [name for name in option_names("tuned") if name != "none"]
    assert len(pairs) > 10
    algos = sorted(option_names("algo"), key=len)
    named = cache(lambda algo: default_node("algo", algo)["name"])
    for pair in pairs:
        algo = next(name for name in reversed(algos) if pair.startswith(f"{name}_"))
        env = pair.removeprefix(f"{algo}_")
        assert compose([f"algo={algo}", f"env={env}"]).algo.name == named(algo)


def test_a_pair_leaves_the_environment_to_its_preset():
    for path in Path(__file__).parents[2].glob("conf/tuned/*.yaml"):
        assert "env" not in (yaml.safe_load(path.read_text()) or {}), path.name
