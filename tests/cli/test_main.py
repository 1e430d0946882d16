import dataclasses
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from omegaconf.errors import InterpolationKeyError

import rlplug
from rlplug.cli import main
from tests.cli.scores import Scores
from tests.installing import Install, install_into, manifest

SMALL = ["num_envs=2", "rollout_fragment_length=32", "algo.sgd_minibatch_size=64", "algo.num_sgd_iter=1"]
SHORT = ["env=cartpole", "tuned=none", "total_steps=64", *SMALL, "eval.episodes=1", "eval.every=0", "logger.only=[]"]


def summaries() -> dict[str, float]:
    """Run folders below the working directory, and their scores."""
    return {str(path.parent): json.loads(path.read_text())["eval/return_mean"] for path in Path().rglob("summary.json")}


def test_train_leaves_one_run_folder_and_returns_the_score():
    assert main(SHORT) == 0
    assert gc.isenabled()  # off only while modules load
    (folder,) = summaries()
    assert Path(folder).parent == Path("runs/ppo-cartpole")
    assert folder.endswith("-s0")
    assert main(["train", *SHORT, "hydra.run.dir=there"]) == 0
    assert {path.name for path in Path().iterdir()} == {"runs", "there"}
    score = rlplug.train([*SHORT, "seed=3"])
    ((last, noted),) = [(name, noted) for name, noted in summaries().items() if name not in (folder, "there")]
    assert score == noted
    assert last.endswith("-s3")


def test_what_was_composed_is_trained():
    config = rlplug.compose([*SHORT, "seed=3"])
    score = rlplug.train(config)
    (summary,) = Path("runs/ppo-CartPole-v1").glob("*-s3/summary.json")
    assert json.loads(summary.read_text())["eval/return_mean"] == score == rlplug.train([*SHORT, "seed=3"])
    with pytest.raises(rlplug.ConfigError, match=r"^seed: was changed after compose\(\); pass it to compose\(\): "):
        rlplug.train(dataclasses.replace(config, seed=4))
    with pytest.raises(rlplug.ConfigError, match=r"^hydra\.run\.dir: '' is not a folder"):
        rlplug.train([*SHORT, "hydra.run.dir="])


MINE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Mine(CartPoleEnv):
    pass
gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=9)
"""
SCRIPT = """
import sys
from rlplug.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""  # as pip writes it


@pytest.mark.parametrize(
    ("how", "hardware"),
    [("script", "2cpu"), *(pytest.param("module", where, marks=pytest.mark.slow) for where in ("cpu", "2cpu"))],
)
def test_modules_of_the_current_folder_are_found(how: str, hardware: str, tmp_path: Path):
    """Also by ranks of their own, and whichever way rlplug is called."""
    (tmp_path / "mine_env.py").write_text(MINE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rlplug").write_text(SCRIPT)
    begin = ["-m", "rlplug"] if how == "module" else [str(tmp_path / "bin" / "rlplug")]
    words = [*SHORT, "env=gymnasium", "env.id=mine_env:Mine-v0"]
    done = subprocess.run([sys.executable, *begin, *words, f"hardware={hardware}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if how == "script":  # of a module, Python sees to it
        safe = subprocess.run([sys.executable, "-P", *begin, "check", *words], capture_output=True, text=True)
        assert safe.returncode == 2
        assert "mine_env" in safe.stderr


def test_the_newest_run_is_named(capsys: pytest.CaptureFixture[str]):
    for seed in (2, 1):
        assert main([*SHORT, f"seed={seed}", f"hydra.run.dir=runs/x/{seed}"]) == 0
    capsys.readouterr()
    for words, said in {
        "resume runs": "runs holds 2 runs: runs/x/1, runs/x/2; name one of them",
        "evaluate latest": "latest does not exist; the newest run here is runs/x/1",
        "estimate last data.path=x": "last does not exist; the newest run here is runs/x/1",
    }.items():
        assert main(words.split()) == 2
        assert capsys.readouterr().err == f"rlplug: {said}\n"


def test_a_setting_may_refer_to_another_one():
    assert main([*SHORT, "algo.lr=[[0,1e-3],['${total_steps}',0]]", "hydra.run.dir=here"]) == 0
    manifest = json.loads(Path("here/manifest.json").read_text())
    assert manifest["command"][-1] == "algo.lr=[[0,1e-3],['${total_steps}',0]]"


def test_a_sweep_returns_the_score_of_every_job():
    assert main(["-m", *SHORT, "seed=1,2", "+hydra.callbacks.scores._target_=tests.cli.scores.Scores"]) == 0
    found = summaries()
    assert [folder.rpartition("/")[2] for folder in sorted(found)] == ["seed=1", "seed=2"]
    assert Scores.seen == [found[folder] for folder in sorted(found)]


def test_check_shows_the_plan_and_the_networks_and_writes_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "algo=ppo", "env=cartpole", "tuned=none"]) == 0
    printed = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert "CartPole-v1" in printed
    assert shown["net"] == "ActorCritic, 9,155"
    assert (shown["torso"], shown["policy"]) == ("MLP, 4,480", "CategoricalHead, 130")
    assert (shown["value_torso"], shown["value"]) == ("MLP, 4,480", "Linear, 65")
    assert list(Path().iterdir()) == []


def test_the_settings_of_a_job_are_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["algo=sac", "algo.gamma=0.5", "--cfg", "job", "--package", "algo"]) == 0
    assert "gamma: 0.5" in capsys.readouterr().out


def test_help_lists_the_options_of_every_group_and_those_of_a_folder_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mlp\n")
    assert main(["--help", f"hydra.searchpath=[file://{tmp_path}]"]) == 0
    text = capsys.readouterr().out
    buffers = "buffer: circular, episodes, her, prioritized, queue, replay, rollout, sequence"
    for part in ("algo: ", buffers, "env: ", "exploration: ", "loop: ", "rlplug plugins", "mine, mlp, mlp256"):
        assert part in text


@pytest.mark.parametrize("verb", ["check", "evaluate", "new", "plugins"])
def test_verbs_explain_themselves(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert f"rlplug {verb}" in capsys.readouterr().out


def test_the_shell_completes_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COMP_LINE", "rlplug algo=s")
    assert main(["-sc", "query=bash"]) == 0
    assert "algo=sac" in capsys.readouterr().out.split()


LOOP = """
from omegaconf import OmegaConf
from rlplug.plugins.loop.alternate import Alternate
class Faulty(Alternate):
    def run(self, run): OmegaConf.create({'a': '${b}'}).a
"""


def test_an_error_inside_a_job_keeps_its_traceback(install: Install):
    files = {
        "rlplug_faulty/__init__.py": manifest(
            ("loop", "faulty", "rlplug_faulty.loop:Faulty"), conf="rlplug_faulty.conf"
        ),
        "rlplug_faulty/loop.py": LOOP,
        "rlplug_faulty/conf/loop/faulty.yaml": "defaults:\n  - alternate\nname: faulty\n",
    }
    install("rlplug-faulty", "rlplug_faulty", files)
    with pytest.raises(InterpolationKeyError):
        main([*SHORT, "loop=faulty"])


LIGHT = """
import sys, rlplug, rlplug.registry, rlplug.config, rlplug.cli.plugins, rlplug.testing.worlds
from rlplug import Component, ConfigError, compose, hookimpl
from rlplug.cli import main
assert "moon" in rlplug.registry.names("env") and "rlplug_moon.env" not in sys.modules
assert main(["plugins"]) == main(["plugins", "algo"]) == 0 and 'torch' not in sys.modules
rlplug.Algorithm
assert 'torch' in sys.modules
"""


def test_neither_importing_rlplug_nor_listing_plugins_imports_torch(tmp_path: Path):
    install_into(
        tmp_path, "rlplug-moon", "rlplug_moon", {"rlplug_moon.py": manifest(("env", "moon", "rlplug_moon.env:Moon"))}
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-c", LIGHT], check=True, env={**os.environ, "PYTHONPATH": path})


def test_every_public_name_exists():
    for name in rlplug.__all__:
        assert getattr(rlplug, name) is not None
        assert name in dir(rlplug)
    with pytest.raises(AttributeError, match="no attribute 'Agent'"):
        rlplug.Agent  # noqa: B018


def test_a_warning_of_ours_is_its_words_and_others_keep_their_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets it for its process
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlplug 0.")
    assert warnings.formatwarning("slow", UserWarning, rlplug.__file__, 1) == "rlplug: slow\n"
    for file in (__file__, str(Path(rlplug.__file__).parent) + "_plugin/env.py"):
        assert warnings.formatwarning("slow", UserWarning, file, 1).startswith(f"{file}:1: UserWarning: slow\n")
