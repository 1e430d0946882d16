"""``sweeper=pbt``: decisions of a population, and sweeps that are interrupted and continued."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlplug.cli import main, pbt, space
from rlplug.cli.jobs import Ray
from rlplug.cli.pbt import PBT, Population

TINY = ["env=pendulum", "algo=ppo", "tuned=none", "hardware=cpu", "compile=off", "num_envs=2", "logger.only=[]"]
TINY += ["rollout_fragment_length=16", "algo.sgd_minibatch_size=16", "eval.every=0", "eval.episodes=1"]
TINY += [
    "total_steps=192",
    "sweeper=pbt",
    "sweeper.every=64",
    "algo.lr=interval(1e-5,1e-2)",
    "algo.gamma=0.9,0.95,0.99",
]


def settings(**changes: object) -> PBT:
    given = {"name": "pbt", "members": 8, "every": 10, "quantile": 0.25, "perturb": [0.5, 2.0], "resample": 0.0}
    return PBT(**given | {"workers": None, "ray": Ray(None, 1, 0)} | changes)  # type: ignore[arg-type]


def population(**changes: object) -> Population:
    searched = {"lr": space.Interval(1e-4, 1e-1, True, False), "n": space.Choices(["1", "2", "4"])}
    return Population(settings(**changes), 0, searched)


def test_the_worst_continue_from_the_best_with_perturbed_settings():
    people = population()
    first = people.next()
    for i, one in enumerate(first):
        one.score = float(i)
    second = people.next()
    for i, one in enumerate(second[2:], 2):
        assert (one.parent, one.settings) == (first[i].folder, first[i].settings)
    for one in second[:2]:
        parent = next(old for old in first[6:] if old.folder == one.parent)
        old, new = float(parent.settings["lr"]), float(one.settings["lr"])
        assert any(math.isclose(new, min(max(old * factor, 1e-4), 1e-1), rel_tol=1e-5) for factor in (0.5, 2.0))
        at = ["1", "2", "4"].index(parent.settings["n"])
        assert one.settings["n"] in ["1", "2", "4"][max(at - 1, 0) : at + 2]
        assert one.settings["n"] != parent.settings["n"]


@pytest.mark.parametrize(
    ("one", "value", "found"),
    [
        (space.Choices(["1", "2", "4"]), "4", {"2"}),
        (space.Choices(["1", "2", "4"]), "2", {"1", "4"}),
        (space.Interval(1, 10, False, True), "1", {"2"}),
        (space.Interval(1, 10, False, True), "2", {"1", "3"}),
        (space.Interval(1, 10, False, True), "10", {"8"}),
        (space.Interval(0.0, 1.0, False, False), "1.0", {"0.8"}),
    ],
)
def test_a_copy_differs_from_its_original(one, value, found):
    rng = np.random.default_rng(0)
    assert {one.perturbed(value, [0.8, 1.25], rng) for _ in range(100)} == found


def test_a_value_that_no_factor_changes_is_drawn_again():
    rng, one = np.random.default_rng(0), space.Interval(0.0, 1.0, False, False)
    assert len({one.perturbed("0.0", [0.8, 1.25], rng) for _ in range(10)}) == 10
    assert space.Choices(["1"]).perturbed("1", [0.8], rng) == "1"


def test_an_interval_is_one_of_integers_if_its_option_is():
    words = ["sweeper=pbt", "algo=ppo", "env=cartpole", "algo.entropy_coeff=interval(0,1)"]
    _, found = pbt.prepared([*words, "algo.num_sgd_iter=interval(2,20)", "algo.lr=interval(1e-4,1)"])
    assert {key: one.whole for key, one in found.space.items()} == {
        "algo.num_sgd_iter": True,
        "algo.entropy_coeff": False,
        "algo.lr": False,
    }


def test_a_member_that_failed_is_replaced_and_never_copied():
    people = population(members=2, quantile=0.5)
    first = people.next()
    first[1].score = -5.0
    assert [one.parent for one in people.next()] == [first[1].folder] * 2


def test_intervals_are_sampled_between_their_ends():
    rng = np.random.default_rng(0)
    logs = [float(space.Interval(1e-5, 1e-1, True, False).sample(rng)) for _ in range(2000)]
    assert min(logs) >= 1e-5
    assert max(logs) <= 1e-1
    assert abs(np.mean(np.log10(logs)) + 3) < 0.1  # uniform between -5 and -1
    whole = {space.Interval(1, 4, False, True).sample(rng) for _ in range(200)}
    assert whole == {"1", "2", "3", "4"}


def test_an_interrupted_sweep_equals_one_that_was_not_interrupted(tmp_path):
    words = ["-m", *TINY, "sweeper.members=2", "sweeper.workers=0"]
    assert main([*words, f"hydra.sweep.dir={tmp_path / 'whole'}"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/round_002")  # killed before round 2, while a member of round 1 was trained
    shutil.rmtree(tmp_path / "cut/round_001/member_1")
    state = json.loads((tmp_path / "cut" / pbt.STATE).read_text())
    state["rounds"] = state["rounds"][:2]
    (tmp_path / "cut" / pbt.STATE).write_text(json.dumps(state))
    assert main([*words, f"hydra.sweep.dir={tmp_path / 'cut'}"]) == 0
    require_equal(tmp_path / "whole", tmp_path / "cut")
    assert (tmp_path / "whole/lineage.svg").exists()


def test_a_sweep_ends_with_the_round_whose_last_update_reaches_total_steps(tmp_path, capsys):
    words = ["env=pendulum", "algo=es", "algo.stepsize=interval(1e-3,1e-1)", "algo.episodes_per_batch=2"]
    words += ["hardware=cpu", "logger.only=[]", "eval.episodes=1", "eval.every=0", "total_steps=700", "tuned=none"]
    words += ["sweeper=pbt", "sweeper.members=2", "sweeper.every=500", "sweeper.workers=0"]
    assert main(["-m", *words, f"hydra.sweep.dir={tmp_path / 'pop'}"]) == 0
    assert len(json.loads((tmp_path / "pop" / pbt.STATE).read_text())["rounds"]) == 1
    assert "round 1, " in capsys.readouterr().err


def test_a_continued_sweep_keeps_the_scores_that_decided_its_rounds(tmp_path):
    """Also of a member that failed and was replaced, which is not trained again."""
    words = ["-m", *TINY, "sweeper.members=2", "sweeper.workers=0", f"hydra.sweep.dir={tmp_path}"]
    assert main(words) == 0
    state = json.loads((tmp_path / pbt.STATE).read_text())
    replaced = next(i for i, one in enumerate(state["rounds"][1]) if one["parent"] != f"round_000/member_{i}")
    state["rounds"][0][replaced]["score"] = None
    (tmp_path / pbt.STATE).write_text(json.dumps(state))
    shutil.rmtree(tmp_path / f"round_000/member_{replaced}")
    assert main(words) == 0
    assert json.loads((tmp_path / pbt.STATE).read_text())["rounds"] == state["rounds"]
    assert not (tmp_path / f"round_000/member_{replaced}").exists()


def require_equal(one: Path, other: Path) -> None:
    files = sorted(path.relative_to(one) for path in one.glob("round_*/member_*/checkpoints/step_*/weights.pt"))
    assert len({path.parts[0] for path in files}) == 3
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()
    rounds = [json.loads((folder / pbt.STATE).read_text())["rounds"] for folder in (one, other)]
    assert rounds[0] == rounds[1]


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_the_undisturbed_one(tmp_path):
    words = ["-m", *TINY, "sweeper.members=4", "sweeper.workers=2", "total_steps=3072", "sweeper.every=1024"]

    def start(folder: Path) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "rlplug", *words, f"hydra.sweep.dir={folder}"]
        return subprocess.Popen(line, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "whole").wait(600) == 0
    whole_s, rng = time.monotonic() - began, random.Random(time.time_ns())
    for _ in range(3):
        process = start(tmp_path / "killed")
        time.sleep(rng.uniform(0.2, 0.6) * whole_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed").wait(600) == 0
    require_equal(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["sweeper.members=1"], "sweeper.members: 1 is out of range"),
        (["sweeper.every=192"], "sweeper.every: 192 leaves a single round in total_steps=192"),
        (["sweeper.quantile=0.9"], "sweeper.quantile: 0.9 is out of range"),
        (["seed=1,2"], "seed: cannot be searched by pbt: a fork continues with the random numbers of the checkpoint"),
        (["algo.lr=interval(1e-2,1e-5)"], "algo.lr: interval(0.01,1e-05) is empty: write the smaller end first"),
        (["algo.lr=interval(-1,1e-5)"], "algo.lr"),
        (["algo.lr=between(1e-5,1e-2)"], "algo.lr"),
        (["sweeper.every=interval(64,96"], "sweeper.every"),
        (["total_steps=192,256"], "total_steps: cannot be searched by pbt: all members train equally long"),
        (["sweeper.every=64,96"], "sweeper.every: has one value for the whole sweep"),
        (
            ["algo.gamma=0.9,0.95", "algo.gamma=0.5"],
            "algo.gamma: has a single value and a search space; leave one out",
        ),
        (["rollout_fragment_length=1"], "algo.sgd_minibatch_size: "),
        (["stop={env_steps: 3}"], "stop: is set by pbt at the end of every round; use total_steps"),
        (["sweeper=pbd"], "sweeper: there is no sweeper 'pbd'; there are: optuna, pbt"),
        (["sweeper.member=3"], "did you mean sweeper.members?"),
        (["~algo.lr", "~algo.gamma"], "algo"),
    ],
)
def test_bad_input_is_one_message_before_anything_is_written(tmp_path, capsys, changed, said):
    keys = [word.partition("=")[0] for word in changed]
    words = [word for word in TINY if word.partition("=")[0] not in keys]
    assert main(["-m", *words, *changed, f"hydra.sweep.dir={tmp_path / 'pop'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "pop").exists()


def test_settings_to_search_and_the_flag_are_asked_for(tmp_path, capsys):
    words = [word for word in TINY if not word.startswith(("algo.lr", "algo.gamma"))]
    assert main(["-m", *words]) == 2
    assert "sweeper: pbt needs settings to search, as in 'algo.lr=interval(1e-5,1e-2)'" in capsys.readouterr().err
    for verb in ([], ["check"]):
        assert main([*verb, *words]) == 2
        assert "sweeper: starts several runs, which needs -m" in capsys.readouterr().err


def test_a_folder_of_another_population_is_refused(tmp_path, capsys):
    words = ["-m", *TINY, "sweeper.members=2", "sweeper.workers=0", f"hydra.sweep.dir={tmp_path}"]
    (tmp_path / pbt.STATE).write_text('{"overrides": [], "searched": {}, "sweeper": {}, "rounds": []}')
    assert main(words) == 2
    assert "choose another folder" in capsys.readouterr().err
