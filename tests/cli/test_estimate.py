"""``rlplug estimate``: what a person reads, and what is refused; and estimates while a run trains."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import rlplug
from rlplug import testing
from rlplug.cli import main
from rlplug.config import compose
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.results.evaluate import estimate, evaluate
from rlplug.run.build import build
from rlplug.run.launch import resume
from rlplug.testing import conformance
from rlplug.testing.comparing import compare_runs, differences_of_runs
from rlplug.trainer.trainer import Trainer
from rlplug.types import ConfigError
from tests.checkpointing.runs import punctual
from tests.installing import Install, manifest

SMALL = Path(testing.__file__).parent / "cartpole.npz"  # without log-probabilities
FEW = ("estimate.iterations=2", "estimate.updates=4", "estimate.batch_size=16")
QUIET = ("tuned=none", "model.hidden=[8]", "logger.only=[]", "hardware=cpu", "eval.episodes=2", *FEW)
BC = ("algo=bc", *QUIET, "total_steps=6", "eval.every=2", "train_batch_size=3", "log.every=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run``, of PPO, and ``data``, which its policy played."""
    folder = tmp_path_factory.mktemp("made")
    words = ["algo=ppo", "env=cartpole", *QUIET, "rollout_fragment_length=32", "total_steps=256", "eval.every=0"]
    with punctual():
        rlplug.train([*words, f"hydra.run.dir={folder / 'run'}"])
    evaluate(folder / "run", ["eval.episodes=20", f"record.path={folder / 'data'}", "seed=3"], print, "explore")
    return folder


@pytest.fixture(autouse=True)
def made_here(made: Path, here: Path) -> None:
    shutil.copytree(made, here, symlinks=True, dirs_exist_ok=True)


def test_the_policy_that_played_is_worth_what_it_played(capsys: pytest.CaptureFixture[str]):
    """All its weights are 1."""
    assert main(["estimate", "run", "data.path=data", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["checkpoint"] == f"run/checkpoints/step_{out['env_steps']:012}"
    assert (out["episodes"], out["seed"], out["confidence"]) == (20, 0, 0.95)
    for method in ("episode_is", "step_is", "episode_wis", "step_wis"):
        assert out[f"estimate/{method}"] == pytest.approx(out["estimate/behavior"], rel=1e-4)
        assert out[f"estimate/{method}_low"] < out["estimate/behavior"] < out[f"estimate/{method}_high"]
    assert out["estimate/effective_sample_size"] == pytest.approx(20, rel=1e-4)
    assert main(["estimate", "run", "data.path=data", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == out


def test_a_table(capsys: pytest.CaptureFixture[str]):
    words = ["data.path=[data]", "estimator=[dm,step_wis]", "estimate.confidence=0.9"]
    assert main(["estimate", "run/checkpoints/best", *words]) == 0
    head, *_, size, empty, names, dm, wis = capsys.readouterr().out.splitlines()
    assert head.startswith("checkpoint  run/checkpoints/")
    assert size.startswith("effective   20.0 episodes")
    assert (empty, names) == ("", "method    estimate  90 % interval")
    assert (dm[:3], wis[:9]) == ("dm ", "step_wis ")


def test_an_estimator_of_another_package(here: Path, install: Install):
    """The one of the page. Nothing has a weight above 1, so it is step_is."""
    page = (Path(rlplug.__file__).parents[1] / "docs" / "estimates.md").read_text()
    (code,), (conf,) = (re.findall(rf"```{form}\n(.*?)```", page, re.DOTALL) for form in ("python", "yaml"))
    given = ("estimator", "truncated", "rlplug_truncated.estimator:Truncated")
    files = {"__init__.py": manifest(given, conf="rlplug_truncated.conf"), "estimator.py": code, "conf/__init__.py": ""}
    files |= {"conf/estimator/truncated.yaml": conf}
    install("rlplug-truncated", "rlplug_truncated", {f"rlplug_truncated/{path}": text for path, text in files.items()})
    words = ["data.path=data", "estimator=[truncated,step_is]", "estimator.truncated.maximum=5"]
    out = estimate(here / "run", words, print)
    assert (
        out["estimate/truncated"] == pytest.approx(out["estimate/step_is"]) == pytest.approx(out["estimate/behavior"])
    )
    out = estimate(here / "run", [*words[:2], "estimator.truncated.maximum=0.5"], print)
    assert out["estimate/truncated"] == pytest.approx(out["estimate/behavior"] / 2)
    with pytest.raises(ConfigError, match=r"^estimator\.truncated\.maximum: 0 .*greater than 0"):
        estimate(here / "run", [*words[:2], "estimator.truncated.maximum=0"], print)
    conformance.check_component("estimator", "truncated")


DQN = ("algo=dqn", "env=cartpole", *QUIET, "total_steps=128", "buffer.capacity=128", "eval.every=0")
WARM = "num_steps_sampled_before_learning_starts=64"


def test_dqn_samples_from_a_softmax_and_is_estimated(here: Path, capsys: pytest.CaptureFixture[str]):
    """What it plays itself has weight 1; the greedy policy never takes all the same actions, and has no ratio."""
    assert main([*DQN, WARM, "algo.temperature=0.5", "exploration=[]", "hydra.run.dir=soft"]) == 0
    evaluate(here / "soft", ["eval.episodes=20", f"record.path={here / 'played'}"], print, "explore")
    methods = ["episode_is", "step_is", "episode_wis", "step_wis", "dm"]
    out = estimate(here / "soft", ["data.path=played", f"estimator=[{','.join(methods)}]"], print)
    for method in methods[:4]:
        assert out[f"estimate/{method}"] == pytest.approx(out["estimate/behavior"], rel=1e-4)
    assert main([*DQN, WARM, "hydra.run.dir=greedy"]) == 0
    out = estimate(here / "greedy", ["data.path=played", f"estimator=[{','.join(methods)}]"], print)
    assert (out["estimate/episode_is"], out["estimate/effective_sample_size"]) == (0.0, 0.0)
    assert "estimate/episode_wis" not in out
    assert "estimate/dm" in out


def test_boltzmann_exploration_is_recorded_with_its_log_probabilities(here: Path):
    """Random steps before learning are recorded, too. A module that acts after it leaves none."""
    for number, modules in enumerate(("[boltzmann]", "[boltzmann,icm]", "[boltzmann,epsilon_greedy]")):
        words = [*DQN, WARM, "exploration.boltzmann.temperature=0.1", "exploration.epsilon_greedy.epsilon=0.5"]
        assert main([*words[: None if number == 2 else -1], f"exploration={modules}", f"record.path=d{number}"]) == 0
        recording = Recording([f"d{number}"], Reading())
        rows = [recording.episode(i, None, 1) for i in range(len(recording.lengths))]
        assert [("logp" in one) for one in rows] == [number < 2] * len(rows)
        if number < 2:
            logp = np.concatenate([one["logp"][:-1] for one in rows])
            assert logp[:8] == pytest.approx(-np.log(2.0))  # random
            assert (logp <= 0).all()
            assert not np.allclose(logp, -np.log(2.0))


BAD = {
    "estimate data.path=data": "estimate takes a run folder or a checkpoint first; see rlplug estimate --help",
    "estimate run --greedy data.path=data": "there is no flag --greedy; see rlplug estimate --help",
    "estimate run": "data.path: is missing: estimates need recorded episodes, data.path=<folder>",
    "estimate run data.path=empty": "data.path: empty contains no file of episodes",
    "estimate run data.path=data eval.episodes=2": "eval.episodes: cannot be changed: an estimate can change only ",
    "estimate run data.path=data estimator=[ips]": "estimator: unknown option 'ips'; there are: dm, dr, episode_is, ",
    "estimate run data.path=data estimator=[]": "estimator: none is chosen; choose some, as in estimator=[step_wis,dr]",
    f"estimate run data.path={SMALL} estimator=[dm] estimate.model=q_regression": f"data.path: {SMALL} has no key "
    "'logp', the behavior's log-probabilities, needed by estimate.model=q_regression; ",
    "estimate run estimate.path=nowhere": "estimate.path: nowhere does not exist",
    f"estimate run estimate.path={SMALL}": f"estimate.path: {SMALL} has no key 'logp'",
    "estimate run estimate.path=nowhere data.path=empty": "data.path: empty contains no file of episodes",
    "algo=bc env=recorded env.path=empty data.path=data": "env.path: empty contains no file of episodes",
    f"estimate run data.path={SMALL}": f"data.path: {SMALL} has no key 'logp', the behavior's log-probabilities",
    "estimate run data.path=data estimate.folds=21": "estimate.folds: 21 folds, but there are 20 episodes; use fewer",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str, here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "empty").mkdir()
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"rlplug: {BAD[line]}")


# ---- while a run trains ---------------------------------------------------------------------------------------------


def rows(run: Path) -> list[dict[str, str]]:
    return [row for row in csv.DictReader((run / "metrics.csv").open()) if row.get("estimate/dr")]


def test_without_an_environment_estimates_are_made_where_evaluations_would_be(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    words = [*BC, "env=recorded", "env.path=data", "data.path=data", "hydra.run.dir=bc"]
    assert main(words) == 0
    assert main(["evaluate", "bc"]) == 1
    assert "cannot be played; python -m rlplug estimate <run>" in capsys.readouterr().err
    assert [int(row["step"]) for row in rows(here / "bc")] == [2, 4, 6]
    summary = json.loads((here / "bc/summary.json").read_text())
    last = rows(here / "bc")[-1]
    assert summary["estimate/dr"] == pytest.approx(float(last["estimate/dr"]))
    assert float(last["estimate/dr_low"]) < float(last["estimate/dr"]) < float(last["estimate/dr_high"])
    assert float(rows(here / "bc")[0]["estimate/step_wis"]) != float(last["estimate/step_wis"])


def test_beside_evaluations_if_asked_for_and_nothing_that_is_learned_changes(here: Path):
    words = [*BC, "env=cartpole", "data.path=data", "checkpoint.every=2"]
    assert main([*words, "hydra.run.dir=without"]) == 0
    assert rows(here / "without") == []
    assert main([*words, "estimate.with_eval=true", "estimate.path=data", "hydra.run.dir=with"]) == 0
    assert len(rows(here / "with")) == 3
    differing = {part: names for part, (_, names) in compare_runs(here / "with", here / "without").items() if names}
    assert set(differing) == {"learner", "metrics.csv", "summary.json"}
    assert all(name.startswith(("estimation", "log")) for name in differing["learner"])


def test_a_run_that_was_stopped_goes_on_in_step(here: Path, monkeypatch: pytest.MonkeyPatch):
    words = [*BC, "env=recorded", "env.path=data", "data.path=data", "checkpoint.every=2"]
    assert main([*words, "hydra.run.dir=whole"]) == 0
    update = Trainer.update

    def broken(self, batch=None):
        if self.progress.updates == 5:
            raise RuntimeError("as if killed")
        return update(self, batch)

    monkeypatch.setattr(Trainer, "update", broken)
    with pytest.raises(RuntimeError):
        main([*words, "hydra.run.dir=broken"])
    monkeypatch.setattr(Trainer, "update", update)
    resume(here / "broken", tell=lambda line: None)
    assert differences_of_runs(here / "whole", here / "broken") == []


def test_a_recording_without_log_probabilities_is_told_or_refused(capsys: pytest.CaptureFixture[str]):
    words = ["env=cartpole", f"data.path={SMALL}", "estimate.with_eval=true"]
    with pytest.raises(ConfigError, match="has no key 'logp'"):
        build(compose([*BC, *words]), Path())
    for path, said in {"nowhere": "does not exist", SMALL: "has no key 'logp'"}.items():
        with pytest.raises(ConfigError, match=f"^estimate.path: {path} {said}"):
            build(compose([*BC, *words, f"estimate.path={path}"]), Path())
    with pytest.raises(ConfigError, match=r"estimate.with_eval: true needs recorded episodes"):
        build(compose(["algo=ppo", "env=cartpole", *QUIET, "estimate.with_eval=true"]), Path())
    build(compose([*BC, *words, "estimator=[dm]"]), Path()).close()
    assert capsys.readouterr().err == ""
