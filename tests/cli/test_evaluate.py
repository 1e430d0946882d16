"""``rlplug evaluate``: what a person reads, and what is refused."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlplug
from rlplug.cli import main
from rlplug.cli.evaluate import table
from tests.checkpointing.runs import punctual

SETTINGS = ["algo=sac", "env=pendulum", "total_steps=600", "eval.every=0", "eval.episodes=3", "checkpoint.every=200"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with punctual():
        rlplug.train([*SETTINGS, "model.hidden=[8]", "logger=[]", f"hydra.run.dir={folder}"])
    return folder


@pytest.fixture(autouse=True)
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, called ``run``, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def said(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def test_a_table(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "run"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    head, steps, updates, episodes, returns, length = capsys.readouterr().out.splitlines()
    assert head == "checkpoint  run/checkpoints/step_000000000600"
    assert steps == "env steps   600"
    assert updates.startswith("updates ")
    assert episodes == "episodes    3 (seed 0)"
    assert returns.startswith(
        f"return      {summary['eval/return_mean']:,.2f} ± {summary['eval/return_std']:,.2f} (min -"
    )
    assert length == "length      200.0"


def test_metrics_of_the_algorithms_own_are_in_the_table():
    result = {f"eval/{key}": 2.0 for key in ("return_mean", "return_std", "return_min", "return_max", "length_mean")}
    counts = {"checkpoint": "run", "env_steps": 1, "updates": 1, "episodes": 1, "seed": 0}
    *_, length, regret = table(result | counts | {"eval/regret": 0.03125}).splitlines()
    assert (length, regret) == ("length      2.0", "regret      0.03125")


def test_as_json_it_is_the_runs_own_evaluation_to_the_last_bit(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "run", "--json"]) == 0
    result, summary = said(capsys), json.loads((run / "summary.json").read_text())
    for key in ("env_steps", "eval/return_mean", "eval/return_std", "eval/length_mean"):
        assert result[key] == summary[key]
    assert set(result) == {
        *("checkpoint", "env_steps", "updates", "episodes", "seed", "eval/return_mean", "eval/return_std"),
        *("eval/return_min", "eval/return_max", "eval/length_mean"),
    }


def test_in_another_process(run: Path):
    line = [sys.executable, "-m", "rlplug", "evaluate", "run", "--json"]
    done = subprocess.run(line, env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    noted = json.loads((run / "summary.json").read_text())["eval/return_mean"]
    assert json.loads(done.stdout)["eval/return_mean"] == noted


def test_of_one_checkpoint_with_other_settings(capsys: pytest.CaptureFixture[str]):
    line = ["evaluate", "--json", "run/checkpoints/step_000000000400", "eval.episodes=40", "seed=7", "hardware=cpu"]
    assert main(line) == 0
    result = said(capsys)
    assert (result["env_steps"], result["episodes"], result["seed"]) == (400, 40, 7)
    assert main(["evaluate", "run/checkpoints/best", "--json", "env.max_episode_steps=9", "+env.kwargs.g=9.8"]) == 0
    assert said(capsys)["eval/length_mean"] == 9


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
    (run / "checkpoints" / "step_000000000600" / "manifest.json").write_text("{")
    assert main(["evaluate", "run", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["env_steps"] == 400
    (line,) = printed.err.splitlines()
    assert line.startswith("rlplug: run/checkpoints/step_000000000600 is damaged or was altered: manifest.json")


def test_a_folder_with_an_equals_sign_in_its_name(run: Path, capsys: pytest.CaptureFixture[str]):
    run.rename(run.with_name("seed=3"))
    assert main(["evaluate", "seed=3"]) == 0
    assert "seed=3/checkpoints" in capsys.readouterr().out


BAD = {
    "evaluate": "evaluate takes a run folder or a checkpoint first; see rlplug evaluate --help",
    "evaluate --json": "evaluate takes a run folder or a checkpoint first; see rlplug evaluate --help",
    "evaluate eval.episodes=3": "evaluate takes a run folder or a checkpoint first; see rlplug evaluate --help",
    "evaluate nowhere": "nowhere does not exist",
    "evaluate .": ". contains no run; the newest run in it is run",
    "evaluate run/config.yaml": "run/config.yaml is not a run or checkpoint of rlplug: ",
    "evaluate empty": "empty holds no checkpoint yet",
    "evaluate run -m": "evaluate has no flag -m; see rlplug evaluate --help",
    "evaluate run run": "cannot read 'run': should be key=value",
    "evaluate run eval.episodes=0": "eval.episodes: 0 is out of range: should be greater than 0",
    "evaluate run eval.episodes=many": "eval.episodes: 'many' has the wrong type: should be a valid integer",
    "evaluate run eval.episode=3": "eval.episode: unknown key; did you mean eval.episodes? There are: ",
    "evaluate run seed=1,2": "seed: 1,2 is several values: give one",
    "evaluate run seed=-1": "seed: -1 is out of range: should be greater than or equal to 0",
    "evaluate run algo.gamma=0.9": "algo.gamma: cannot be changed: an evaluation can change only eval.episodes, eval.",
    "evaluate run eval.every=3": "eval.every: cannot be changed: an evaluation can change only eval.episodes, eval.",
    "evaluate run hardware=1gpu": "hardware: needs a CUDA device, but none was found; use hardware=cpu",
    "evaluate run hardware=cpuu": "hardware: unknown option 'cpuu'; did you mean cpu? There are: ",
    "evaluate run env=cartpole": "env: is not the environment of run/checkpoints/step_000000000600: the observation ",
    "evaluate run env=gymnasium": "env.id: must be given: env.id=<value>",
    "evaluate run env.id=Pendulum-v7": "env.id: ",
    "evaluate run +env.kwargs.nope=1": "env.kwargs: ",
    "evaluate run +env.nope=1": "env.nope: unknown key; an argument of its constructor is written ",
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


def test_it_explains_itself(capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "--help"]) == 0
    assert capsys.readouterr().out.startswith("rlplug evaluate <run folder or checkpoint>")
