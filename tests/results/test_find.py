"""Which runs a command line means: paths, names, filters, copies; and how they are grouped."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplug.results.find import find, single, split, sweeps
from rlplug.results.groups import grouped, repeated
from rlplug.results.places import located, run_at
from rlplug.types import CheckpointError, ConfigError
from tests.results.conftest import Make

SWEEP = Path("runs/sweep")


def names(places: list[str], *filters: str) -> list[str]:
    return [run.path.name for run in find(places, split([*filters])[1], pytest.fail)]


def test_runs_are_found_below_folders_by_path_and_by_name(here: Path):
    every = ["algo=a2c,seed=1", "algo=a2c,seed=2", "algo=dqn,seed=1", "algo=dqn,seed=2"]
    assert names([]) == names(["."]) == names(["runs"]) == names([str(SWEEP)]) == every
    assert names(["runs", str(SWEEP / every[0])]) == every  # each once
    assert names([str(SWEEP / every[2])]) == names([every[2]]) == names([f"sweep/{every[2]}"]) == [every[2]]
    assert single(every[3]).path == SWEEP / every[3]


def test_links_and_hidden_folders_are_not_followed(here: Path):
    (here / "runs/loop").symlink_to(here / "runs")
    shutil.copytree(SWEEP, "runs/.hidden")
    assert len(names(["runs"])) == 4


def test_a_folder_with_too_many_folders_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlplug.results.places.MOST", 20)
    assert len(names(["runs"])) == 4
    for i in range(20):
        (here / f"runs/x{i}").mkdir()
    with pytest.raises(ConfigError, match=r"^runs holds more than 20 folders; name one that is nearer to the runs"):
        names(["runs"])


def test_folders_that_may_not_be_read_are_passed_over(here: Path, monkeypatch: pytest.MonkeyPatch):
    scan = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    (here / "runs/secret").mkdir()
    monkeypatch.setattr(os, "scandir", refused)
    assert len(names(["runs"])) == 4


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        (["algo=dqn"], 2),
        (["algo=dqn,a2c"], 4),
        (["algo=dqn", "seed=1"], 1),
        (["seed=1,2"], 4),
        (["env=cartpole"], 4),
        (["env=CartPole-v1"], 4),
        (["env=gymnasium"], 4),
        (["env=Cartpole"], 4),
        (["state=finished"], 4),
        (["state=failed,finished"], 4),
        (["model.hidden=[8]"], 4),
        (["model=mlp"], 4),
        (["exploration=epsilon_greedy"], 2),
        (["eval.every=80"], 4),
        (["log.every=6_4"], 4),
        (["critic_model=null"], 4),
    ],
)
def test_filters(filters: list[str], count: int, here: Path):
    assert len(names([], *filters)) == count


def test_a_path_with_an_equals_sign_is_no_filter(here: Path):
    assert split([f"{SWEEP}/algo=a2c,seed=1", "algo=a2c,seed=1", "algo=a2c"])[0] == [f"{SWEEP}/algo=a2c,seed=1"]
    shutil.copytree(SWEEP / "algo=a2c,seed=1", "algo=a2c")
    assert split(["algo=a2c", "seed=1"]) == (["algo=a2c"], [("seed", ("1", "1"))])


BAD = {
    "nowhere": "nowhere does not exist",
    "algo=dqn,sead=1/": "algo=dqn,sead=1/ does not exist",
    "empty": "empty holds no run",
    f"{SWEEP}/algo=a2c,seed=1/metrics.csv": f"{SWEEP}/algo=a2c,seed=1/metrics.csv is a file, not a run folder; "
    f"did you mean {SWEEP}/algo=a2c,seed=1?",
    "runs/sweep/algo=a2c,seed=1/checkpoints": "runs/sweep/algo=a2c,seed=1/checkpoints holds no run",
    "a\0b": "a\\x00b does not exist",
    "x" * 5000: "x" * 5000,
}


@pytest.mark.parametrize("place", BAD)
def test_a_place_without_a_run(place: str, here: Path):
    (here / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        find([place], [], pytest.fail)
    assert str(caught.value).startswith(BAD[place][:1990])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "sweep": "",
        "sweep/algo=dqn,seed=2": "algo=dqn,seed=2",
        "algo=dqn,seed=2": "algo=dqn,seed=2",
        "dqn,seed=2": "algo=dqn,seed=2",
        "run": "run-1",
        "sweep/run-": "run-1",
        "run-1": "run-1",
        "run-1/checkpoints/best": "run-1/checkpoints/best",
        "run/checkpoints/best": "run-1/checkpoints/best",
        "1": "1",
    }.items(),
)
def test_names_below_runs(name: str, meant: str, here: Path):
    for own in ("run-1", "1"):
        shutil.copytree(SWEEP / "algo=a2c,seed=1", SWEEP / own, symlinks=True)
    assert located(name) == SWEEP / meant
    if meant:
        assert run_at(name) == SWEEP / meant


def test_a_name_that_several_runs_have(here: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(SWEEP, "runs/again")
    os.utime("runs/again/algo=a2c,seed=1/manifest.json", (1, 1))
    said = "2 runs have the name {}: runs/sweep/algo=a2c,seed=1, runs/again/algo=a2c,seed=1; give more of one's path"
    for name in ("algo=a2c,seed=1", "a2c,seed=1", "algo=a2c,seed=1/checkpoints/best"):
        with pytest.raises(ConfigError, match=f"^{re.escape(said.format(name))}$"):
            located(name)
    assert single("again/algo=a2c,seed=1").path == Path("runs/again/algo=a2c,seed=1")
    monkeypatch.setattr("rlplug.results.places.LISTED", 1)
    with pytest.raises(ConfigError, match=r"^2 runs have .*: runs/sweep/algo=a2c,seed=1 and 1 older ones; give more"):
        located("algo=a2c,seed=1")


def test_a_folder_of_runs_where_one_is_asked_for(here: Path):
    with pytest.raises(ConfigError, match=r"^sweep holds 4 runs: runs/sweep/algo=.*; name one of them$"):
        run_at("sweep")
    with pytest.raises(ConfigError, match=r"^sweeep does not exist; did you mean sweep\?$"):
        run_at("sweeep")
    with pytest.raises(ConfigError, match=r"^algo=sac,seed=1 does not exist; did you mean algo=a2c,seed=1\?$"):
        run_at("algo=sac,seed=1")


def test_copies_of_a_run_do_not_count_twice(here: Path):
    shutil.copytree(SWEEP / "algo=a2c,seed=1", "runs/copy")
    with pytest.raises(
        ConfigError, match=r"^runs/copy and runs/sweep/algo=a2c,seed=1 are copies of one run; leave one"
    ):
        find([], [], pytest.fail)
    assert len(find([], [], pytest.fail, copies=True)) == 5
    assert names([], "algo=dqn") == ["algo=dqn,seed=1", "algo=dqn,seed=2"]


def test_a_damaged_run_is_left_out_with_a_line_unless_it_is_meant(here: Path):
    folder = SWEEP / "algo=dqn,seed=2"
    (folder / "manifest.json").write_text("{")
    lines: list[str] = []
    assert len(find([], [], lines.append)) == 3
    (line,) = lines
    assert line.startswith(f"left out: {folder} is damaged or was altered: manifest.json: ")
    with pytest.raises(CheckpointError, match="is damaged or was altered"):
        find([str(folder)], [], pytest.fail)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algoo=dqn", "algoo: no run has such a setting; did you mean algo"),
        ("algo.nope=1", "algo.nope: no run has such a setting"),
        ("seed=9", "none of 4 runs matches seed=9"),
        ("state=stopped", "state: 'stopped' is no state; there are: running, finished, interrupted, failed, killed"),
    ],
)
def test_filters_that_match_nothing(word: str, said: str, here: Path):
    with pytest.raises(ConfigError) as caught:
        names([], word)
    assert str(caught.value).startswith(said)


def test_a_sweep_knows_its_jobs(here: Path):
    shutil.rmtree(SWEEP / "algo=dqn,seed=2")
    (SWEEP / "algo=dqn,seed=2").mkdir()
    (SWEEP / "algo=dqn,seed=2/job.json").write_text(json.dumps({"values": {}, "status": "failed", "error": "x"}))
    runs = find([], [], pytest.fail)
    (sweep,) = sweeps(Path("runs"), runs, "eval/return_mean")
    assert (sweep.path, sweep.states) == (SWEEP, {"finished": 3, "failed": 1})
    assert sweep.best is not None
    assert sweep.best.last("eval/return_mean") == max(run.last("eval/return_mean") or 0.0 for run in runs)
    assert sweeps(Path("runs"), [], "eval/return_mean") == []


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_runs_are_grouped_by_all_but_their_seed_and_outputs(make: Make):
    for i, settings in enumerate([{"seed": 1}, {"seed": 2, "record__path": "x"}, {"seed": 1, "algo__gamma": 0.9}]):
        make(f"runs/r{i}", {"a": [1]}, logger={} if i else {"csv": {"name": "csv"}}, **settings)
    groups = grouped(find([], [], pytest.fail))
    assert [(group.label, [run.path.name for run in group.runs]) for group in groups] == [
        ("a2c gamma=0.99", ["r0", "r1"]),
        ("a2c gamma=0.9", ["r2"]),
    ]
    assert repeated(groups) == []


def test_groups_of_an_algorithm_are_named_by_what_differs_between_them(here: Path, make: Make):
    """Not by what differs from another algorithm."""
    make("runs/other", {"a": [1]}, seed=1, algo__gamma=0.9)
    groups = grouped(find([], [], pytest.fail))
    assert [group.label for group in groups] == ["a2c gamma=0.9", "a2c gamma=0.99", "dqn"]


def test_environments_are_named_if_there_are_several(make: Make):
    make("runs/r0", {"a": [1]})
    make("runs/r1", {"a": [1]}, env__id="Acrobot-v1", env__max_episode_steps=3)
    groups = grouped(find([], [], pytest.fail))
    assert [group.label for group in groups] == ["a2c, CartPole-v1", "a2c, Acrobot-v1"]
    assert [group.method for group in groups] == ["a2c", "a2c"]


def test_labels_are_short_and_unique(make: Make):
    for i in range(3):  # the algorithm's settings come first
        settings = {"algo__gamma": 0.9 + i / 100, "total_steps": 100 + i, "num_envs": 1 + i, "log__every": 1 + i}
        make(f"runs/r{i}", {"a": [1]}, algo__lr=[[0, 0.1], [1_000_000 * 10 ** (9 * i), 0.0]], **settings)
    labels = [group.label for group in grouped(find([], [], pytest.fail))]
    assert labels == ["a2c gamma=0.9", "a2c gamma=0.91", "a2c gamma=0.92"]


def test_as_many_settings_are_in_a_label_as_are_needed(make: Make):
    values = [(gamma, steps, every) for gamma in (0.9, 0.8) for steps in (1, 2) for every in (1, 2)]
    for i, (gamma, steps, every) in enumerate(values):
        make(f"runs/r{i}", {"a": [1]}, algo__gamma=gamma, total_steps=steps, log__every=every, eval__every=every + 5)
    labels = [group.label for group in grouped(find([], [], pytest.fail))]
    assert labels[:2] == ["a2c gamma=0.9 total_steps=1 every=6", "a2c gamma=0.9 total_steps=1 every=7"]
    assert len({*labels}) == 8


def test_long_values_are_cut_in_labels(make: Make):
    for i in range(2):
        make(f"runs/r{i}", {"a": [1]}, algo__lr=[[0, 0.1], [1_000_000_000_000_000 + i, 0.0]])
    labels = [group.label for group in grouped(find([], [], pytest.fail))]
    assert labels == ["a2c lr=[[0, 0.1], [10000000000…", "a2c lr=[[0, 0.1], [10000000000… #2"]


@pytest.mark.parametrize("seed", [0, 3])
def test_runs_of_one_seed_are_named(make: Make, seed: int):
    for name in ("runs/r0", "runs/r1"):
        make(name, {"a": [1]}, seed=seed)
    assert repeated(grouped(find([], [], pytest.fail))) == [f"a2c: 2 runs have seed {seed}, and each of them counts"]
