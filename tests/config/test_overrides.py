import json

import pytest
import yaml

from rlplug import ConfigError, compose
from rlplug.config import parse
from rlplug.config.changes import change
from rlplug.config.errors import differences, told
from rlplug.config.schema import RESUMABLE, WHY
from tests.installing import install, site  # noqa: F401  fixtures

RAW = compose(["algo=sac", "env=pendulum", "exploration=[gaussian]"]).raw
EVALUATED = ("eval.episodes", "env", "hardware")


def resumed(*overrides: str, may=RESUMABLE):
    return change(RAW, overrides, may, WHY)


def test_nothing_changes_without_a_command_line():
    assert resumed() == RAW


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("total_steps=40_000", [("total_steps", 20_000, 40_000)]),
        ("eval.every=0 eval.episodes=3", [("eval.every", 10_000, 0), ("eval.episodes", 20, 3)]),
        ("eval={episodes:3}", [("eval.episodes", 20, 3)]),
        ("checkpoint.every=10min", [("checkpoint.every", "5min", "10min")]),
        ("checkpoint.every='10min'", [("checkpoint.every", "5min", "10min")]),
        ("compile=true", [("compile", "auto", True)]),
        ("on_nan=skip on_nan=stop on_nan=skip", [("on_nan", "stop", "skip")]),
        ("log.every=${total_steps} total_steps=30000", [("total_steps", 20_000, 30_000), ("log.every", 1_000, 30_000)]),
        ("++log.every=3", [("log.every", 1_000, 3)]),
        ("logger.progress.every=3.5", [("logger.progress.every", 10.0, 3.5)]),
        ("hardware=cpu", [("hardware.name", "auto", "cpu")]),
        ("hardware.threads=2 hardware=auto", [("hardware.threads", 1, 2)]),
        ("logger=[progress,tensorboard]", []),
        ("logger.only=[progress]", [("logger.tensorboard", RAW["logger"]["tensorboard"], None)]),
        ("logger=[]", []),
        ("logger={}", []),
    ],
)
def test_what_changes(line: str, changed: list):
    new = resumed(*line.split())
    assert differences(RAW, new) == changed
    assert parse(new).raw == new


def test_options_of_a_group_come_from_its_yaml_and_csv_stays():
    new = resumed("logger.wandb.tags=[a,'b, c',null]", "logger.only=[progress,wandb]", "logger.wandb.mode=disabled")
    assert list(new["logger"]) == ["csv", "progress", "wandb"]
    assert new["logger"]["wandb"] == {
        "name": "wandb",
        "mode": "disabled",
        "project": "rlplug",
        "entity": None,
        "group": None,
        "job_type": "train",
        "run_name": None,
        "tags": ["a", "b, c", None],
        "notes": None,
        "log_model": True,
    }
    assert list(resumed("logger.only=wandb")["logger"]) == ["csv", "wandb"]


def test_loggers_are_added_to_those_of_the_run_which_keep_their_settings():
    raw = resumed("logger.only=[wandb]", "logger.wandb.project=mine")
    new = change(raw, ["logger=[wandb,progress]"], RESUMABLE, WHY)
    assert sorted(new["logger"]) == ["csv", "progress", "wandb"]
    assert new["logger"]["wandb"] == raw["logger"]["wandb"]
    assert new["logger"]["progress"] == RAW["logger"]["progress"]
    assert list(resumed("logger.only=[]")["logger"]) == ["csv"]


def test_what_the_yaml_says_now_does_not_matter(install):  # noqa: F811
    """An option of another package, whose defaults changed since the run began."""
    install(
        "rlplug-x",
        "rlplug_x",
        {
            "rlplug_x/__init__.py": "from rlplug import hookimpl\n"
            "@hookimpl\ndef rlplug_conf(): return 'rlplug_x.conf'\n",
            "rlplug_x/conf/hardware/x.yaml": "name: cpu\nthreads: ${num_envs}\nfloat32_matmul_precision: highest\n",
            "rlplug_x/conf/env/x.yaml": "name: gymnasium\nid: A-v0\n",
        },
    )
    raw = RAW | {"env": {"name": "gymnasium", "id": "B-v0"}, "num_envs": 7}
    new = change(raw, ["hardware=x", "log.every=5"], RESUMABLE, WHY)
    assert new["env"] == raw["env"]
    assert new["hardware"] == {"name": "cpu", "threads": 7, "float32_matmul_precision": "highest"}  # the run's num_envs
    assert change(raw, ["env=x"], EVALUATED, "")["env"] == {"name": "gymnasium", "id": "A-v0"}


def test_the_configuration_that_was_given_stays_as_it_is():
    before = json.dumps(RAW)
    resumed("eval.every=3", "logger.only=[]", "+env.kwargs.a=3", may=(*RESUMABLE, "env"))
    assert json.dumps(RAW) == before


def test_keys_are_added_to_a_free_mapping():
    new = change(RAW, ["+env.kwargs.g=9.8", "env.max_episode_steps=50"], EVALUATED, "")
    assert differences(RAW, new) == [("env.kwargs.g", None, 9.8), ("env.max_episode_steps", None, 50)]
    assert parse(new).env.cfg.kwargs == {"g": 9.8}
    assert change(RAW, ["+env.kwargs={g:1,h:2}"], EVALUATED, "")["env"]["kwargs"] == {"g": 1, "h": 2}
    again = change(new, ["env.kwargs.g=1"], EVALUATED, "")
    assert again["env"]["kwargs"] == {"g": 1}


@pytest.mark.parametrize("line", ["+eval.x=3", "+env.x=3", "+env.id.x=3"])
def test_what_is_added_elsewhere_is_refused_with_the_rest(line: str):
    with pytest.raises(ConfigError, match=r"unknown key|wrong type"):
        parse(change(RAW, [line], ("eval", "env"), ""))


KEPT = "cannot be changed: it changes what is learned; a resumed run keeps its settings"
BAD = {
    # not to be changed
    "algo.gamma=0.9": f"algo.gamma: {KEPT}",
    "total_steps=30000 seed=1": f"seed: {KEPT}",
    "num_envs=2": f"num_envs: {KEPT}",
    "algo=ppo": f"algo: {KEPT}",
    "env=pendulum": f"env: {KEPT}",
    "experiment=sac_pendulum": f"experiment: {KEPT}",
    "exploration.gaussian.std=3": f"exploration.gaussian.std: {KEPT}",
    "model@critic_model=mlp": f"critic_model: {KEPT}",
    "+env.kwargs.g=9": f"env.kwargs.g: {KEPT}",
    "env.kwargs={g:9}": f"env.kwargs: {KEPT}",
    "hydra.run.dir=x": "hydra.run.dir: is fixed when a run starts and cannot be changed",
    # not there
    "totl_steps=3": "totl_steps: unknown key; did you mean total_steps? There are: algo, buffer, ",
    "+totl_steps=3": "totl_steps: unknown key; did you mean total_steps? There are: algo, buffer, ",
    "gamma=0.9": "gamma: unknown key; did you mean algo.gamma or estimate.gamma?",
    "hardware.device=2": "hardware.device: unknown key; did you mean hardware.devices? There are: ",
    "eval.episode=3": "eval.episode: unknown key; did you mean eval.episodes? There are: env, episodes, every",
    "eval={episode:3}": "eval.episode: unknown key; did you mean eval.episodes? There are: env, episodes, every",
    "log.every.x=3": "log.every.x: unknown key: log.every is a single value and has no keys",
    "logger.wandb.mode=online": "logger.wandb: is not selected; add it: logger=[wandb]",
    "model@critic=mlp": "critic: unknown key; did you mean critic_model? There are: ",
    "hardware=cpuu": "hardware: unknown option 'cpuu'; did you mean cpu? There are: ",
    "hardware=3": "hardware: unknown option '3'; there are: ",
    "hardware=null": "hardware: unknown option 'null'; there are: ",
    "hardware=[cpu,auto]": "hardware: should be exactly one option",
    "logger=[wandbb]": "logger: unknown option 'wandbb'; did you mean wandb? There are: ",
    "log.every=${nope}": "log.every: Interpolation key 'nope' not found",
    # not to be read
    "+log.every=3": "log.every: exists already: write log.every=<value>, without +",
    "+logger=[wandb]": "logger: exists already: write logger=<value>, without +",
    "~logger.csv": "logger.csv: cannot be removed from a run",
    "~total_steps=3": "total_steps: cannot be removed from a run",
    "total_steps=1,2": "total_steps: 1,2 is several values: give one, or write a list [a,b]",
    "total_steps=range(3)": "total_steps: range(3) is several values: give one, or write a list [a,b]",
    "total_steps=interval(1,9)": "total_steps: interval(1,9) is several values: give one, or write a list [a,b]",
    "logger=csv,wandb": "logger: csv,wandb is several values: give one, or write a list [a,b]",
    "total_steps": "cannot read 'total_steps': write key=value",
    "total_steps=[1": "total_steps: cannot read 'total_steps=[1': write key=value",
    "=3": "cannot read '=3': write key=value",
    "-m total_steps=3": "unknown flag -m; settings are written key=value",
    "--cfg=job": "unknown flag --cfg=job; settings are written key=value",
}


@pytest.mark.parametrize("line", BAD)
def test_one_message(line: str):
    with pytest.raises(ConfigError) as refused:
        resumed(*line.split())
    assert str(refused.value).startswith(BAD[line])
    assert "\n" not in str(refused.value)


def test_below_a_key_that_may_change_but_not_beside_it():
    assert change(RAW, ["eval.episodes=3"], EVALUATED, "x")["eval"]["episodes"] == 3
    with pytest.raises(ConfigError, match=r"^eval\.every: cannot be changed: x$"):
        change(RAW, ["eval.every=3"], EVALUATED, "x")
    with pytest.raises(ConfigError, match=r"^total_steps: cannot be changed: x$"):
        change(RAW, ["total_steps=3"], ("total",), "x")
    with pytest.raises(ConfigError, match=r"^envs: unknown key; did you mean env\?"):
        change(RAW, ["envs=3"], EVALUATED, "x")


def test_the_result_is_plain_yaml():
    new = resumed("logger=[wandb]", "eval={every:3}", "log.every=${eval.every}")
    assert yaml.safe_load(yaml.safe_dump(new)) == new


def test_differences_are_told_in_the_order_of_the_configuration():
    old = {"a": 1, "b": {"c": [1, 2], "d": {}}, "e": True, "f": 1, "g": "5min"}
    new = {"a": 1.0, "b": {"c": [1], "d": {"x": None, "y": "z"}}, "e": 1, "f": 1, "h": {"i": 3}}
    assert told(differences(old, new)) == [
        "a: 1 -> 1.0",
        "b.c: [1, 2] -> [1]",
        "b.d.y: null -> 'z'",
        "e: true -> 1",
        "g: '5min' -> null",
        "+ h",
    ]
    assert differences(old, old) == []
