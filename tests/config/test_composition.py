import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlplug import ConfigError, compose
from rlplug.config import composed, default_node, parse, plain


def test_an_algorithm_picks_its_data_plane_and_the_command_line_wins():
    ppo, sac = compose(["algo=ppo", "tuned=none"]), compose(["algo=sac", "tuned=none"])
    assert (ppo.buffer.name, ppo.replay_ratio) == ("rollout", None)
    assert (sac.buffer.name, sac.replay_ratio) == ("replay", 1.0)
    run = compose(
        ["algo=sac", "buffer=rollout", "num_envs=3", "replay_ratio=0.5", "algo.gamma=0.5", "seed=${num_envs}"]
    )
    assert (run.buffer.name, run.num_envs, run.replay_ratio, run.algo.cfg.gamma, run.seed) == (
        "rollout",
        3,
        0.5,
        0.5,
        3,
    )
    assert "hydra" in composed()
    assert "hydra" not in plain(composed())


EXPERIMENT = """# @package _global_
defaults:
  - override /algo: sac
  - override /env: pendulum
  - override /exploration: [gaussian]
  - override /buffer: rollout
seed: 7
algo: {gamma: 0.5}
exploration: {gaussian: {std: 0.3}}
"""


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "tuned.yaml").write_text(EXPERIMENT)
    return [f"hydra.searchpath=[file://{tmp_path}]", "experiment=tuned"]


def test_an_experiment_wins_over_its_algorithm_and_the_command_line_over_it(experiment: list[str]):
    run = compose(experiment)
    assert (run.algo.name, run.buffer.name, run.env.cfg.id, run.seed) == ("sac", "rollout", "Pendulum-v1", 7)
    assert run.algo.cfg.gamma == 0.5
    assert run.exploration["gaussian"].cfg.std == 0.3
    assert run.exploration["gaussian"].key == "exploration.gaussian"
    run = compose([*experiment, "algo.gamma=0.7", "buffer=replay", "exploration=[]", "~exploration.gaussian", "seed=3"])
    assert (run.algo.cfg.gamma, run.buffer.name, run.env.cfg.id, run.seed) == (0.7, "replay", "Pendulum-v1", 3)
    assert run.exploration == {}


def test_several_explorations_and_loggers():
    run = compose(["algo=sac", "exploration=[gaussian,ornstein_uhlenbeck]", "logger.only=[]"])
    assert list(run.exploration) == ["gaussian", "ornstein_uhlenbeck"]
    assert list(run.logger) == ["csv"]
    assert list(compose().logger) == ["csv", "progress", "tensorboard"]


@pytest.mark.parametrize(
    ("words", "names"),
    {
        "logger=wandb": ["csv", "progress", "tensorboard", "wandb"],
        "logger=[wandb] logger.wandb.tags=[a]": ["csv", "progress", "tensorboard", "wandb"],
        "logger=[progress,wandb]": ["csv", "progress", "tensorboard", "wandb"],
        "logger=[]": ["csv", "progress", "tensorboard"],
        "logger.only=wandb": ["csv", "wandb"],
        "logger.only=[wandb] logger.wandb.tags=[a]": ["csv", "wandb"],
        "logger.only=[] logger=[wandb]": ["csv", "wandb"],
        "logger.only=[]": ["csv"],
        "~logger.tensorboard": ["csv", "progress"],
    }.items(),
)
def test_loggers_are_added_to_the_default_ones_or_replace_them(words, names):
    assert list(compose(words.split()).logger) == names


def test_an_empty_slot_holds_the_model():
    run = compose(["model.hidden=[7]"])
    assert run.models["critic_model"] is run.models["model"]
    run = compose(["model.hidden=[7]", "model@critic_model=mlp256", "+model@world_model=mlp"])
    assert run.models["model"].cfg.hidden == [7]
    assert run.models["critic_model"].cfg.hidden == [256, 256]
    assert run.models["critic_model"].key == "critic_model"
    assert set(run.models) == {"model", "critic_model", "world_model"}


def test_raw_gives_the_same_run_in_another_process(tmp_path):
    run = compose(["algo=sac", "exploration=[gaussian]", "algo.actor_lr=[[0,1e-3],[100,1e-4]]"])
    assert parse(run.raw) == run
    assert pickle.loads(pickle.dumps(run)) == run
    (tmp_path / "raw").write_bytes(pickle.dumps((run.raw, repr(run))))
    code = (
        "import pickle, sys; from rlplug.config import parse; "
        "raw, shown = pickle.load(open(sys.argv[1], 'rb')); assert repr(parse(raw)) == shown; "
        "assert 'hydra' not in sys.modules, 'a rank needs no Hydra'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "raw")], check=True)


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        compose(["seed=-1", "algo.gamma=2", "+algo.foo=1", "loop.name=altrnate", "+model@critik_modl=mlp"])
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["seed", "critik_modl", "algo.gamma", "algo.foo", "loop.name"]
    assert "did you mean critic_model?" in lines[1]
    assert "did you mean alternate?" in lines[4]


def test_composing_inside_a_hydra_program_leaves_it_alone():
    from hydra.core.global_hydra import GlobalHydra

    from rlplug.config.origins import session

    with session():
        outer = GlobalHydra.instance().hydra
        composed(["algo=sac"])
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()


def test_a_components_own_yaml_is_free_of_any_algorithm():
    assert default_node("loop", "alternate")["in_flight"] == 1
    assert composed(["algo=ppo", "tuned=none"]).rollout_fragment_length == 128
    assert default_node("model", "custom")["entry_point"] == "???"
    assert default_node("exploration", "gaussian", {"std": 2})["std"] == 2


def test_what_an_experiment_set_of_an_exploration_goes_with_it():
    assert compose(["experiment=ppo_rnd_minigrid"]).exploration["rnd"].cfg.eta == 0.05
    assert compose(["experiment=ppo_rnd_minigrid", "exploration=[]"]).exploration == {}
    assert list(compose(["experiment=ppo_rnd_minigrid", "exploration=[icm]"]).exploration) == ["icm"]
    with pytest.raises(ConfigError, match=r"^exploration.rnd: is not selected; add it: exploration=\[rnd\]"):
        compose(["experiment=ppo_rnd_minigrid", "exploration=[]", "exploration.rnd.eta=1.0"])


def test_experiments_leave_the_environment_to_its_preset():
    """``experiment=x env=y`` plays y."""
    paths = sorted(Path(__file__).parents[2].glob("conf/experiment/*.yaml"))
    assert len(paths) > 5
    for path in paths:
        assert "env" not in yaml.safe_load(path.read_text()), path.name
