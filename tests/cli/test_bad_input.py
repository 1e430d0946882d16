"""Bad command lines: one clear message, exit code 2, no traceback, no run folder."""

import os
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlplug.cli import main
from rlplug.config import compose
from rlplug.run.build import build
from rlplug.types import ConfigError

ACTORS = "hardware.actors.count=2 hardware.actors.num_cpus=0.5"
WANDB = "logger=[wandb]"
SETTINGS = {  # words of single values are in tests/config/test_messages.py, names of other libraries in test_peers.py
    # options
    "exploration=[gausian]": "exploration: unknown option 'gausian'; did you mean gaussian? There are: ",
    "model@critic_model=mpl": "model: unknown option 'mpl'; did you mean mlp? There are: ",
    "hydra/launcher=bsic": "hydra/launcher: unknown option 'bsic'; did you mean basic? There are: ",
    "algo=null": "algo: unknown option 'null'; there are: ",
    "env=atari/pong": "env: unknown option 'atari/pong'; did you mean atari? There are: ",
    "model=[mlp,lstm]": "model: should be exactly one option of attention, ",
    "algo.name=sac": "algo.name: is chosen together with its settings: algo=sac",
    "model@critic_model=mlp critic_model.name=lstm": "critic_model.name: is chosen together with its settings: "
    "model@critic_model=lstm",
    "experiment=ppo_pong algo=sac": "algo: sac cannot replace ppo, whose settings experiment=ppo_pong sets; ",
    "algo=rainbow": "algo: unknown option 'rainbow'; did you mean experiment=rainbow_cartpole or ",
    "algo=icm": "algo: unknown option 'icm'; did you mean exploration=[icm]?",
    "logger=none": "logger: unknown option 'none'; did you mean logger.only=[]?",
    # keys
    "algoo=sac": "algoo: unknown key; did you mean algo? There are: ",
    "algo.gama=0.9": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "+algo.gama=0.9": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "episodes=5": "episodes: unknown key; did you mean eval.episodes or buffer=episodes or loop=episodes?",
    "gama=0.9": "gama: unknown key; did you mean algo.gamma or estimate.gamma?",
    "lerning_rate=0.1": "lerning_rate: unknown key; did you mean algo.lr or algo.critic_lr?",
    "+totl_steps=3": "totl_steps: unknown key; did you mean total_steps? There are: ",
    "foo.bar=1": "foo: unknown key; there are: algo, ",
    "~foo": "foo: unknown key; there are: algo, ",
    "~hardware": "hardware: is missing; choose one with hardware=<name>: 1gpu, 2cpu, ",
    "env.render_mode=human": "env.render_mode: unknown key; an argument of its constructor is written "
    "+env.kwargs.render_mode=<value>; there are: atari, ",
    "env.kwargs.size=5": "env.kwargs.size: unknown key; there are none yet, and a new one is written with +: ",
    "env.kwargs={size:5}": "env.kwargs.size: unknown key; there are none yet, and a new one is written with +: ",
    "eval={evry:3}": "eval.evry: unknown key; did you mean eval.every? There are: ",
    "exploration={icm:{eta:1}}": "exploration.icm: is not selected; add it: exploration=[icm]",
    "algo=dqn +exploration.icm.eta=1": "exploration.icm: is not selected; add it: exploration=[epsilon_greedy,icm]",
    "logger.wandb.project=x": f"logger.wandb: is not selected; add it: {WANDB}",
    "algo=independent env=two_carts algo.policy_of.cart_0=one": "algo.policy_of.cart_0: unknown key: algo.policy_of is "
    "null here; write algo.policy_of={cart_0: ...}",
    "env.workers=2": "env.workers: has no effect with env.vectorization=auto; use subprocess",
    "algo.gamma.x=3": "algo.gamma.x: unknown key: algo.gamma is a single value and has no keys",
    "model@critic=mlp": "model@critic: there is no such group. Did you mean to override one of model, ",
    "hydra.run.dri=x": "hydra.run.dri: unknown key; did you mean hydra.run.dir? There are: dir",
    "+algo=sac": "algo: exists already: write algo=<value>, without +",
    "wandb=true": f"wandb: unknown key; did you mean {WANDB}?",
    "+wandb=true": f"wandb: unknown key; did you mean {WANDB}?",
    "algo=dqn icm=true": "icm: unknown key; did you mean exploration=[epsilon_greedy,icm]?",
    "lstm=true": "lstm: unknown key; did you mean model=lstm?",
    "algo=ppo model=lstm model.torso.hiddn=[3]": "model.torso.hiddn: unknown key; did you mean model.torso.hidden",
    # values
    "hardware.actors.timeout_s=inf": "hardware.actors.timeout_s: inf is out of range: should be a finite number",
    "logger.csv=3": "logger.csv: 3 has the wrong type: should be a mapping with 'name' and settings",
    "critic_model=mlp256": "critic_model: 'mlp256' has the wrong type: should be a mapping with 'name'",
    "eval=false": "eval: false has the wrong type: should be a mapping; did you mean eval.every=0?",
    "~algo.gamma": "algo.gamma: is missing",
    "algo.gamma=${nope}": "algo.gamma: Interpolation key 'nope' not found",
    "algo.gamma=[1": "algo.gamma: cannot read 'algo.gamma=[1': write key=value",
    "=3": "cannot read '=3': write key=value",
    "seed=1,2": "seed: 1,2 is several values: add -m to sweep over them, or write a list [a,b]",
    # spaces and crosses
    f"algo=impala tuned=none num_envs=1 {ACTORS}": "hardware.actors.count: num_envs=1 cannot be shared equally among ",
    f"algo=a3c tuned=none train_batch_size=30 {ACTORS}": "train_batch_size: 30 transitions are not whole rollouts of "
    "10 steps that divide the 4 environments of a process; use 10 or 20 or 40",
    "algo=dqn env=pendulum": "algo: dqn needs one Discrete action, but the environment's are Box(-1.0, 1.0, (1,)",
    "algo=dqn model=lstm": "buffer: replay keeps no recurrent states, which dqn's model needs; use ",
    "algo=dqn buffer=sequence": "buffer: sequence keeps recurrent states, but the model has none; use ",
    "algo=reinforce model=lstm": "model: Reinforce cannot learn with a recurrent model; use another model",
    "algo=ppo env=taxi preprocess.normalize_obs=true": "preprocess.normalize_obs: the observations contain no ",
    "algo=ppo env=pendulum exploration=[boltzmann]": "exploration.boltzmann: ",
    "algo=ppo model=nature_cnn": "model: ",
    "algo=ppo env=pendulum exploration=gaussian": "exploration.gaussian: changes actions, which ppo cannot learn from",
    "algo=bc loop=alternate exploration=[icm]": "exploration.icm: rewards rows that the learner samples, but bc ",
    "algo=sac env=pendulum buffer=rollout": "buffer: rollout gives the last round, but sac learns from windows",
    "algo=ppo buffer=replay": "buffer: replay gives windows of older data, but ppo learns from the last round",
    "algo=dqn model@critic_model=mlp": "critic_model: dqn, as it is set up, builds no network from this slot",
    "algo.vf_share_layers=true model@critic_model=mlp": "critic_model: ppo, as it is set up, builds no network from ",
    "algo=apex_dqn buffer=replay": "buffer: replay has no priorities, but apex_dqn's actors compute them; use "
    "buffer=prioritized",
    "algo=apex_dqn exploration=[parameter_noise]": "exploration.parameter_noise: changes the weights by which "
    "apex_dqn's actors compute initial priorities; leave it out",
    f"algo=impala hardware.actors.num_aggregation_workers=1 {ACTORS}": "hardware.actors.num_aggregation_workers: "
    "applies to rounds of all actors, but this loop receives segments one by one; use 0",
    f"hardware.ray.address=there {ACTORS}": "hardware.ray.address: 'there' is not host:port, as ray start ",
    # sizes
    "train_batch_size=512": "train_batch_size: nothing is sampled; set rollout_fragment_length or loop.episodes",
    "algo=ppo replay_ratio=1": "replay_ratio: 1.0 requests more updates than there are samples, 0.00",
    "algo=impala replay_ratio=1": "replay_ratio: 1.0 requests more updates than there are samples, 0.015625 a step; ",
    "tuned=none total_steps=100": "total_steps: 100 is less than one round of collection, 1024 steps",
    "algo=impala total_steps=500 train_batch_size=2000": "total_steps: 500 steps are too few for an update: "
    "num_steps_sampled_before_learning_starts=0, replay_ratio=null, train_batch_size=2000, rounds of ",
    "algo=impala buffer=circular buffer.num_batches=50 total_steps=3000": "total_steps: 3000 steps are too few for an "
    "update: a first sample of buffer=circular takes 3200 steps; raise it",
    "algo=dqn tuned=none algo.n_step=6000 total_steps=5000": "total_steps: 5000 steps are too few for an update: "
    "a first sample of buffer=replay takes 6000 steps; raise it",
    f"algo=impala tuned=none buffer.capacity=1 {ACTORS}": "buffer.capacity: 1 segments of 4 environments hold 200 ",
    "tuned=none algo.sgd_minibatch_size=2000": "algo.sgd_minibatch_size: 2000 is more than a rollout's 1024 rows",
    "algo=sac env=pendulum buffer.capacity=1e12": "buffer.capacity: the buffer would need ",
    "algo=sac env=pendulum buffer.capacity=1": "buffer.capacity: 1 keeps 1 rows of each of the 1 environments",
    "algo.lr=[]": "algo.lr: ",
    "algo.lr=[[1000,0.1],[0,0.2]]": "algo.lr: ",
    # environments
    "+env.kwargs.nope=1": "env.kwargs: ",
    "env.mask_key=mask": "env.mask_key: neither the observation nor info of CartPole-v1 has 'mask'; use null to run ",
    "env=masked_cartpole env.frame_skip=2": "env.frame_skip: repeats actions that the masks of ",
    "env=masked_cartpole env.sticky_actions=0.3": "env.sticky_actions: repeats actions that the masks of ",
}


@pytest.mark.parametrize("line", SETTINGS)
def test_one_message(line: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        build(compose(shlex.split(line)), tmp_path)
    assert str(refused.value).startswith(SETTINGS[line])
    assert "\n" not in str(refused.value)


CHECK = "check shows what would run, without training: check algo=ppo env=cartpole"
PLAYS = "evaluate runs episodes: evaluate <run folder>"
NO_FOLDER = "'' is not a folder; name one, or leave it out"
BAD = {
    "algo=sacc": "algo: unknown option 'sacc'; did you mean sac? There are: ",
    "algo.gamma=1.5": "algo.gamma: 1.5 is out of range: should be less than or equal to 1",
    "~algo": "algo: ",
    "algo=ppo env=cartpole env.frame_stack=4": "env.frame_stack: ",
    # the machine and its folders
    "hydra.run.dir=/proc/nope": "hydra.run.dir: /proc/nope cannot be made: ",
    "-m seed=1,2 hydra.sweep.dir=/proc/nope": "hydra.sweep.dir: /proc/nope cannot be made: ",
    f"--config-name {'x' * 300}": f"{files('hydra.conf') / ('x' * 300)}.yaml cannot be read: File name too long",
    "hardware=1gpu": "hardware: needs a CUDA device, but none was found; use hardware=cpu",
    "'logger=[wandb]' logger.wandb.mode=online": "logger.wandb.mode: ",
    "hydra.run.dir=": f"hydra.run.dir: {NO_FOLDER}",
    "hydra.run.dir=null": "hydra.run.dir: field 'hydra.run.dir' is not Optional",
    "check hydra.run.dir=": f"hydra.run.dir: {NO_FOLDER}",
    "-m seed=1,2 hydra.sweep.dir=": f"hydra.sweep.dir: {NO_FOLDER}",
    "-m seed=1,2 hydra.sweep.subdir=": f"hydra.sweep.subdir: {NO_FOLDER}",
    "hydra.searchpath=[file:///nowhere]": "hydra.searchpath: /nowhere does not exist",
    "-m seed=1,2 hydra.searchpath=[/nowhere]": "hydra.searchpath: /nowhere does not exist",
    "resume nowhere": "nowhere does not exist",
    # sweeps, refused before their first job
    "-m algo=ppo,sacc": "algo: unknown option 'sacc'; did you mean sac? There are: ",
    "-m algo=ppo seed=1,x": "seed: 'x' has the wrong type: should be a valid integer",
    "-m algo=ppo,sac algo.gama=1,2": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "-m seed=range(3": "seed: cannot read 'seed=range(3'",
    "-m seed=range(1,1)": "seed: range(1,1) has no values; range(1,4) is 1, 2 and 3",
    "-m seed=range(1e9)": "seed: range(1e9) has more values than a sweep supports, 100,000; range(1,4) is ",
    "-m seed=shuffle(range(1000000000))": "seed: shuffle(range(1000000000)) has more values than a sweep supports",
    "-m algo.gamma=range(0,1,1e-30)": "algo.gamma: range(0,1,1e-30) has more values than a sweep supports",
    "-m seed=range(1,9,0)": "seed: range(1,9,0) has more values than a sweep supports",
    "-m seed=range(0,9000) num_envs=range(1,99)": "seed: the sweep would have 882,000 jobs; the maximum is 100,000",
    # verbs and flags
    "algo=sac train": "cannot read 'train': write key=value",
    "trian algo=sac": "unknown verb 'trian'; did you mean train? There are: check, data, diff, estimate, ",
    "eval": f"unknown verb 'eval'; {PLAYS}",
    "enjoy": "unknown verb 'enjoy'; play shows a run in a window: play <run folder>",
    "test runs/x": f"unknown verb 'test'; {PLAYS}",
    "ls": "unknown verb 'ls'; runs lists runs: runs [filters]",
    "compare runs/a runs/b": "unknown verb 'compare'; diff compares two runs, and report any number of them",
    "list": "unknown verb 'list'; plugins lists what is installed",
    "--bogus": "there is no flag --bogus; see --help",
    "algo=ppo -m seed=1,2": "unrecognized arguments: seed=1,2; flags such as -m come before the settings; see --help",
    "--cfg jobs": "argument --cfg/-c: invalid choice: 'jobs'",
    "--config-dir /no/such/folder": "Additional config directory '/no/such/folder' not found",
    "data data.path=runs/x": "data takes paths and no settings: runs/x, not data.path=runs/x",
    "check --bogus": "there is no flag --bogus; settings are written key=value",
    "plugins algoo": "unknown kind 'algoo'; did you mean algo? There are: ",
    "plugins algo sacc": "algo.name: unknown algo 'sacc'; did you mean sac? There are: ",
    "plugins a b c": "plugins takes at most a kind and a name",
    "--dry-run": f"there is no flag --dry-run: {CHECK}",
    "algo=ppo --dry-run": f"there is no flag --dry-run: {CHECK}",
    "check --dry-run": f"there is no flag --dry-run: {CHECK}",
    "-vv": "there is no flag -vv: -v prints every row of metrics and every checkpoint",
    "--quiet": "there is no flag --quiet: log.level=warning prints only problems",
    "check -v": "there is no flag -v; settings are written key=value",
    "--list": "there is no flag --list: plugins lists what is installed: plugins [kind [name]]",
    "--seed 3": "there is no flag --seed: settings are written seed=<value>",
    "--env=CartPole-v1": "there is no flag --env: settings are written env=CartPole-v1",
    "--learning-rate=1e-3": "there is no flag --learning-rate: settings are written algo.lr=1e-3",
    "--track": f"there is no flag --track: settings are written {WANDB}",
    "--experimental-rerun job.pickle": "--experimental-rerun is not supported; use resume",
    "-sc query=bash": "--shell-completion query= is for the shell only; see install=",
    "--hydra-help seed=3": "seed: cannot be set here",
}


@pytest.mark.parametrize("line", BAD)
def test_one_message_and_nothing_else(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (message,) = printed.err.splitlines()
    assert message.startswith("rlplug: " + BAD[line])
    assert list(tmp_path.iterdir()) == []


def test_several_mistakes_are_told_together(tmp_path: Path, capsys):
    assert main(["seed=x", "algo.gamma=2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rlplug: seed: 'x' has the wrong type: should be a valid integer",
        "rlplug: algo.gamma: 2 is out of range: should be less than or equal to 1",
    ]


def test_a_chosen_run_folder_is_not_left_either(tmp_path: Path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert main(["seed=x", "hydra.run.dir=mine/deep/run"]) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


class Broken(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def __init__(self, where):
        self.where = where

    def reset(self, *, seed=None, options=None):
        if self.where == "reset":
            raise OSError("no field to play on")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        raise OSError("nothing moves")


gymnasium.register("Broken-v0", Broken)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_fails(where: str, tmp_path: Path, capsys):
    """At its first reset there is nothing yet to keep; later the way back stands on a line of its own."""
    assert main(["env=gymnasium", "env.id=Broken-v0", f"+env.kwargs.where={where}", "logger.only=[]"]) == 1
    *_, error, last = capsys.readouterr().err.splitlines()
    if where == "reset":
        assert last == "rlplug: OSError: no field to play on"
        assert list(tmp_path.iterdir()) == []
    else:
        assert error == "rlplug: OSError: nothing moves"
        assert last.startswith("rlplug: there is no checkpoint yet; begin again with: python -m rlplug resume ")


def test_the_process_ends_with_code_2(tmp_path: Path):
    line = [sys.executable, "-m", "rlplug", "algo=sacc"]
    done = subprocess.run(line, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []
