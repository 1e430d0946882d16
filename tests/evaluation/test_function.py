"""``eval.function``: an evaluation of the user's own."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import rlplug
from rlplug import script
from rlplug.api import Job
from rlplug.cli import main
from rlplug.config import compose, parse
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.testing.rank_pool import ranks
from rlplug.types import ConfigError, RunError

LINE = ["algo=ppo", "env=cartpole", "model.hidden=[4]", "algo.num_sgd_iter=1", "algo.sgd_minibatch_size=32"]
LINE += ["tuned=none", "num_envs=2", "rollout_fragment_length=32", "total_steps=128", "eval.episodes=4"]
LINE += ["logger.only=[]", "hardware=cpu", "eval.every=64"]
HERE = f"eval.function={__name__}:"


def both(algorithm, play, episodes):
    """The usual metrics, and what sampling from the policy costs."""
    jobs = [Job(0, episodes=episodes, mode="greedy"), Job(1, episodes=episodes, mode="explore")]
    (_, greedy), (_, sampled) = play(jobs)
    metrics = algorithm.episode_metrics(greedy)
    return metrics | {"eval/cost": metrics["eval/return_mean"] - sampled["return"].mean().item()}


def elsewhere(algorithm, play, episodes):
    """Play no episodes in the run's environment."""
    return {"eval/return_mean": float(episodes), "eval/weights": sum(p.sum().item() for p in algorithm.parameters())}


def nothing(algorithm, play, episodes):
    return None


def word(algorithm, play, episodes):
    return {"eval/return_mean": "high"}


def nested(algorithm, play, episodes):
    return {"eval/return_mean": 1.0, "eval/each": {"a": 1.0}}


def other(algorithm, play, episodes):
    return {"eval/mean": 1.0}


def few(algorithm):
    return {"eval/return_mean": 1.0}


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())


def test_its_metrics_are_those_of_the_run(tmp_path):
    score = train(compose([*LINE, f"{HERE}both"]), tmp_path / "a")
    found = summary(tmp_path / "a")
    assert found["eval/return_mean"] == score
    assert "eval/cost" in found
    plain = train(compose(LINE), tmp_path / "plain")
    assert plain == score  # the same greedy episodes, and nothing else has changed


def evaluated(fabric, raw):
    with closing(build(parse(raw), Path(), fabric)) as trainer:
        return trainer.reports.evaluate(trainer)


def test_two_ranks_get_the_metrics_of_one():
    words = [word for word in LINE if word != "hardware=cpu"] + [f"{HERE}both"]
    alone = evaluated(None, compose([*words, "hardware=cpu"]).raw)
    assert ranks(2)(evaluated, compose([*words, "hardware=2cpu"]).raw) == [alone, alone]


def test_a_checkpoint_is_evaluated_by_it(tmp_path, capsys):
    words = [word for word in LINE if not word.startswith("logger")]
    train(compose([*words, f"{HERE}elsewhere"]), tmp_path / "run")
    assert " 4.0\n" in capsys.readouterr().err
    assert main(["push", str(tmp_path / "run")]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "eval.episodes=7"]) == 0
    assert "weights" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "run"), "eval.function=null"]) == 0
    assert "weights" not in capsys.readouterr().out


def test_a_function_of_the_script(tmp_path, monkeypatch):
    def judge(algorithm, play, episodes):
        return {"eval/return_mean": 5.0}

    assert float(rlplug.train(LINE, eval={"function": judge}, folder=tmp_path / "run")) == 5.0
    monkeypatch.setattr(script, "_objects", {})  # as in another process
    with pytest.raises(ConfigError, match="as in rlplug"):
        rlplug.resume(tmp_path / "run", ["total_steps=192"])
    found = rlplug.resume(tmp_path / "run", ["total_steps=192"], eval_function=judge)
    assert found is not None
    assert float(found) == 5.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.function=nosuchmodule:judge"], "eval.function: nosuchmodule:judge: the module 'nosuchmodule' cannot"),
        ([f"{HERE}judge"], "eval.function: the module 'tests.evaluation.test_function' has no 'judge'"),
        (
            [f"{HERE}few"],
            "eval.function: tests.evaluation.test_function:few takes (algorithm), and is called with "
            "(algorithm, play, episodes)",
        ),
        (["eval.function=judge"], "eval.function: is 'judge'; write module:name"),
        ([f"{HERE}LINE"], "eval.function: tests.evaluation.test_function:LINE is list, which cannot be called"),
        (
            [f"{HERE}both", "eval.steps=100"],
            "eval.steps: runs greedy episodes, but tests.evaluation.test_function:both",
        ),
    ],
)
def test_bad_input_is_one_error_before_anything_is_written(tmp_path, words, message):
    with pytest.raises(ConfigError) as error:
        train(compose([*LINE, *words]), tmp_path / "run")
    assert str(error.value).startswith(message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "returned NoneType instead of a dict of metrics"),
        ("word", "returned eval/return_mean='high', which is not a number"),
        ("nested", "returned eval/each={'a': 1.0}, which is not a number"),
        ("other", "returned no eval/return_mean"),
    ],
)
def test_a_wrong_result_ends_the_run_in_one_line(tmp_path, function, message):
    with pytest.raises(RunError) as error:
        train(compose([*LINE, f"{HERE}{function}"]), tmp_path / "run")
    assert str(error.value).startswith(f"{__name__}:{function} {message}; there is no checkpoint yet")
