import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from omegaconf.errors import InterpolationKeyError

import rlplug
from rlplug.cli import main
from tests.cli.scores import Scores
from tests.installing import Install

SHORT = ["env=cartpole", "total_steps=1024", "eval.episodes=1", "eval.every=0", "logger=[]", "model.hidden=[8]"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def summaries() -> dict[str, float]:
    """Run folders below the working directory, and their scores."""
    return {str(path.parent): json.loads(path.read_text())["eval/return_mean"] for path in Path().rglob("summary.json")}


def test_train_leaves_one_run_folder():
    assert main(SHORT) == 0
    (folder,) = summaries()
    assert Path(folder).parent == Path("runs/ppo-cartpole")
    assert folder.endswith("-s0")


def test_a_chosen_run_folder():
    assert main(["train", *SHORT, "hydra.run.dir=here"]) == 0
    assert list(summaries()) == ["here"]
    assert [path.name for path in Path().iterdir()] == ["here"]


def test_training_from_python_returns_the_score():
    score = rlplug.train([*SHORT, "seed=3"])
    ((folder, noted),) = summaries().items()
    assert score == noted
    assert folder.endswith("-s3")


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
    [("module", "cpu"), ("script", "2cpu"), pytest.param("module", "2cpu", marks=pytest.mark.slow)],
)
def test_modules_of_the_current_folder_are_found(how: str, hardware: str, tmp_path: Path):
    """Also by ranks of their own, and whichever way rlplug is called."""
    (tmp_path / "mine_env.py").write_text(MINE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rlplug").write_text(SCRIPT)
    begin = ["-m", "rlplug"] if how == "module" else [str(tmp_path / "bin" / "rlplug")]
    words = [*SHORT[1:], "tuned=none", "env=gymnasium", "env.id=mine_env:Mine-v0", f"hardware={hardware}", "num_envs=2"]
    done = subprocess.run([sys.executable, *begin, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    safe = subprocess.run([sys.executable, "-P", *begin, "check", *words[:-2]], capture_output=True, text=True)
    assert safe.returncode == 2
    assert "mine_env" in safe.stderr


def test_the_newest_run_is_named(capsys: pytest.CaptureFixture[str]):
    for seed in (2, 1):
        assert main([*SHORT, f"seed={seed}", f"hydra.run.dir=runs/x/{seed}"]) == 0
    capsys.readouterr()
    for words, said in {
        "resume runs": "runs contains no run; the newest run in it is runs/x/1",
        "evaluate runs/x": "runs/x contains no run; the newest run in it is runs/x/1",
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


def test_check_shows_the_plan_and_writes_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "algo=sac", "env=pendulum"]) == 0
    assert "Pendulum-v1" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_check_shows_the_networks_of_a_policy_and_its_value(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "algo=ppo", "env=cartpole", "tuned=none"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    shown = dict(rows)
    assert shown["net"] == "ActorCritic, 9,155"
    assert (shown["torso"], shown["policy"]) == ("MLP, 4,480", "CategoricalHead, 130")
    assert (shown["value_torso"], shown["value"]) == ("MLP, 4,480", "Linear, 65")


def test_the_settings_of_a_job_are_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["algo=sac", "algo.gamma=0.5", "--cfg", "job", "--package", "algo"]) == 0
    assert "gamma: 0.5" in capsys.readouterr().out


def test_help_lists_the_options_of_every_group(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    buffers = "buffer: circular, episodes, her, prioritized, queue, replay, rollout, sequence"
    for group in ("algo: ", buffers, "env: ", "exploration: ", "loop: ", "rlplug plugins"):
        assert group in text


def test_help_lists_what_a_folder_of_ones_own_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mlp\n")
    assert main(["--help", f"hydra.searchpath=[file://{tmp_path}]"]) == 0
    assert "mine, mlp, mlp256" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["check", "new", "plugins"])
def test_verbs_explain_themselves(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert f"rlplug {verb}" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlplug 0.")


def test_the_shell_completes_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COMP_LINE", "rlplug algo=s")
    assert main(["-sc", "query=bash"]) == 0
    assert "algo=sac" in capsys.readouterr().out.split()


def test_an_error_inside_a_job_keeps_its_traceback(install: Install):
    install(
        "rlplug-faulty",
        "rlplug_faulty",
        {
            "rlplug_faulty/__init__.py": "from rlplug import Component, hookimpl\n"
            "@hookimpl\ndef rlplug_components(): return [Component('loop', 'faulty', 'rlplug_faulty.loop:Faulty')]\n"
            "@hookimpl\ndef rlplug_conf(): return 'rlplug_faulty.conf'\n",
            "rlplug_faulty/loop.py": "from omegaconf import OmegaConf\n"
            "from rlplug.plugins.loop.alternate import Alternate\n"
            "class Faulty(Alternate):\n"
            "    def run(self, run): OmegaConf.create({'a': '${b}'}).a\n",
            "rlplug_faulty/conf/loop/faulty.yaml": "defaults:\n  - alternate\nname: faulty\n",
        },
    )
    with pytest.raises(InterpolationKeyError):
        main([*SHORT, "loop=faulty"])


def test_importing_rlplug_imports_no_torch():
    code = "import sys, rlplug; assert 'torch' not in sys.modules; rlplug.Algorithm; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_environments_of_the_kit_imports_no_torch():
    code = "import sys, rlplug.testing.worlds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    for name in rlplug.__all__:
        assert getattr(rlplug, name) is not None
        assert name in dir(rlplug)
    with pytest.raises(AttributeError, match="no attribute 'Agent'"):
        rlplug.Agent  # noqa: B018


def test_a_warning_of_ours_is_its_words_and_others_keep_their_source(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets it for its process
    assert main(["--version"]) == 0
    assert warnings.formatwarning("slow", UserWarning, rlplug.__file__, 1) == "rlplug: slow\n"
    for file in (__file__, str(Path(rlplug.__file__).parent) + "_plugin/env.py"):
        assert warnings.formatwarning("slow", UserWarning, file, 1).startswith(f"{file}:1: UserWarning: slow\n")
