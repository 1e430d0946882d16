"""``rlplug evaluate``: what a person reads, and what is refused."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

import rlplug
from rlplug.cli import main
from rlplug.cli.evaluate import table
from tests.checkpointing.runs import punctual

SETTINGS = [
    "algo=sac",
    "env=pendulum",
    "total_steps=200",
    "num_steps_sampled_before_learning_starts=150",
    "eval.every=0",
]
SETTINGS += ["eval.episodes=3", "checkpoint.every=100", "model.hidden=[8]", "logger.only=[]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with punctual():
        rlplug.train([*SETTINGS, f"hydra.run.dir={folder}"])
    return folder


@pytest.fixture(autouse=True)
def run(trained: Path, here: Path) -> Path:
    """A copy of the run, called ``run``, in the working directory."""
    return shutil.copytree(trained, here / "run", symlinks=True)


def said(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def test_a_table(run: Path, capsys: pytest.CaptureFixture[str]):
    summary = json.loads((run / "summary.json").read_text())
    run.rename(run.with_name("seed=3"))  # which is no setting
    assert main(["evaluate", "seed=3"]) == 0
    head, steps, updates, episodes, returns, length = capsys.readouterr().out.splitlines()
    assert head == "checkpoint  seed=3/checkpoints/step_000000000200"
    assert (steps, updates[:8], episodes) == ("env steps   200", "updates ", "episodes    3 (seed 0)")
    mean, std = summary["eval/return_mean"], summary["eval/return_std"]
    assert returns.startswith(f"return      {mean:,.2f} ± {std:,.2f} (min -")
    assert length == "length      200.0"


def test_metrics_of_the_algorithms_own_are_in_the_table():
    result = {f"eval/{key}": 2.0 for key in ("return_mean", "return_std", "return_min", "return_max", "length_mean")}
    counts = {"checkpoint": "run", "env_steps": 1, "updates": 1, "episodes": 1, "seed": 0}
    *_, length, regret = table(result | counts | {"eval/regret": 0.03125}).splitlines()
    assert (length, regret) == ("length      2.0", "regret      0.03125")
    long = table(result | counts | {"eval/exploitability_greedy": 1.0}).splitlines()
    assert long[-2:] == ["length                2.0", "exploitability_greedy 1"]  # one column of values


def test_as_json_it_is_the_runs_own_evaluation_to_the_last_bit(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "run", "--json"]) == 0
    result, summary = said(capsys), json.loads((run / "summary.json").read_text())
    for key in ("env_steps", "eval/return_mean", "eval/return_std", "eval/length_mean"):
        assert result[key] == summary[key]
    assert set(result) == {
        *("checkpoint", "env_steps", "updates", "episodes", "seed", "eval/return_mean", "eval/return_std"),
        *("eval/return_min", "eval/return_max", "eval/length_mean"),
    }


def test_of_one_checkpoint_with_other_settings(capsys: pytest.CaptureFixture[str]):
    line = ["evaluate", "--json", "run/checkpoints/step_000000000100", "eval.episodes=40", "seed=7", "hardware=cpu"]
    assert main(line) == 0
    result = said(capsys)
    assert (result["env_steps"], result["episodes"], result["seed"]) == (100, 40, 7)
    assert main(["evaluate", "run/checkpoints/best", "--json", "env.max_episode_steps=9", "+env.kwargs.g=9.8"]) == 0
    assert said(capsys)["eval/length_mean"] == 9


def test_random_actions_are_uniform_whatever_the_policy(capsys: pytest.CaptureFixture[str]):
    words = ["algo=a2c", "env=cartpole", "tuned=none", "total_steps=512", "model.hidden=[8]", "algo.lr=0.3"]
    rlplug.train([*words, "seed=1", "eval.every=0", "logger.only=[]", "hydra.run.dir=always_left"])
    returns = {}
    for mode in ("--random", "--explore"):
        capsys.readouterr()
        assert main(["evaluate", "always_left", mode, "--json", "eval.episodes=100"]) == 0
        returns[mode] = said(capsys)["eval/return_mean"]
    assert returns["--random"] == pytest.approx(22, abs=4)  # as of random play
    assert returns["--explore"] < 12


def test_it_writes_nothing_and_takes_a_folder_that_nobody_may_write(run: Path, tmp_path: Path):
    before = everything(tmp_path)
    for path in [run, *run.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert main(["evaluate", "run"]) == 0
        assert everything(tmp_path) == before
    finally:
        for path in [run, *(path for path in run.rglob("*") if path.is_dir())]:
            path.chmod(0o755)


def test_a_damaged_checkpoint_is_passed_over_and_told(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "checkpoints" / "step_000000000200" / "manifest.json").write_text("{")
    assert main(["evaluate", "run", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["env_steps"] == 100
    (line,) = printed.err.splitlines()
    assert line.startswith("rlplug: run/checkpoints/step_000000000200 is damaged or was altered: manifest.json")


TAKES = "evaluate takes a run folder or a checkpoint first; see rlplug evaluate --help"
BAD = {  # refusals of settings that change are in tests/config/test_overrides.py
    **dict.fromkeys(("evaluate", "evaluate eval.episodes=3"), TAKES),
    "evaluate .": ". holds a run: run; name it",
    "evaluate run/config.yaml": "run/config.yaml is a file, not a run folder",
    "evaluate empty": "empty holds no checkpoint yet",
    "evaluate run -m": "there is no flag -m; see rlplug evaluate --help",
    "evaluate run --episodes 9": "there is no flag --episodes: settings are written eval.episodes=<value>",
    "evaluate run run": "cannot read 'run': write key=value",
    "evaluate run algo.gamma=0.9": "algo.gamma: cannot be changed: an evaluation can change only eval.episodes, eval.",
    "evaluate run eval.every=3": "eval.every: cannot be changed: an evaluation can change only eval.episodes, eval.",
    "evaluate run hardware=1gpu": "hardware: needs a CUDA device, but none was found; use hardware=cpu",
    "evaluate run env=cartpole": "env: is not the environment of run/checkpoints/step_000000000200: the observation ",
    "evaluate run env.id=Pendulum-v7": "env.id: ",
}


@pytest.mark.parametrize("line", BAD)
def test_one_message_and_nothing_else(line: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "empty")
    before = everything(tmp_path)
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (message,) = printed.err.splitlines()
    assert message.startswith("rlplug: " + BAD[line])
    assert everything(tmp_path) == before
