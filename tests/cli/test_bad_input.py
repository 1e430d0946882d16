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

ACTORS = "hardware.actors.count=2 hardware.actors.num_cpus=0.5"
BAD = {
    # names and options
    "algo=sacc": "algo: unknown option 'sacc'; did you mean sac? There are: ",
    "env=pendulm": "env: unknown option 'pendulm'; did you mean pendulum? There are: ",
    "exploration=[gausian]": "exploration: unknown option 'gausian'; did you mean gaussian? There are: ",
    "model@critic_model=mpl": "model: unknown option 'mpl'; did you mean mlp? There are: ",
    "hydra/launcher=bsic": "hydra/launcher: unknown option 'bsic'; did you mean basic? There are: ",
    "algo=null": "algo: unknown option 'null'; there are: ",
    "algo=3": "algo: unknown option '3'; there are: ",
    "env=atari/pong": "env: unknown option 'atari/pong'; did you mean atari? There are: ",
    "buffer.name=rollut": "buffer.name: unknown buffer 'rollut'; did you mean rollout? There are: ",
    "algo=SAC": "algo: unknown option 'SAC'; did you mean sac? There are: ",
    "hardware=cuda": "hardware: unknown option 'cuda'; did you mean 1gpu? There are: ",
    "model=[mlp,lstm]": "model: should be exactly one option of cnn, ",
    "experiment=[ppo_pong,ppo_doorkey]": "experiment: should be exactly one option of ",
    "algo.name=sac": "algo.name: is chosen together with its settings: algo=sac",
    "model.name=lstm": "model.name: is chosen together with its settings: model=lstm",
    "model@critic_model=mlp critic_model.name=lstm": "critic_model.name: is chosen together with its settings: "
    "model@critic_model=lstm",
    "experiment=ppo_pong algo=sac": "algo: sac cannot replace ppo, whose settings "
    "experiment=ppo_pong holds; leave one of the two out",
    "algo=dqn experiment=ppo_doorkey env=cartpole": "algo: dqn cannot replace ppo, ",
    # groups and keys
    "algoo=sac": "algoo: unknown key; did you mean algo? There are: ",
    "algo.gama=0.9": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "+algo.gama=0.9": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "gamma=0.9": "gamma: unknown key; did you mean algo.gamma or estimate.gamma?",
    "gama=0.9": "gama: unknown key; did you mean algo.gamma or estimate.gamma?",
    "lerning_rate=0.1": "lerning_rate: unknown key; did you mean algo.lr?",
    "eval.episode=3": "eval.episode: unknown key; did you mean eval.episodes? There are: episodes, every",
    "+totl_steps=3": "totl_steps: unknown key; did you mean total_steps? There are: ",
    "hardware.device=2": "hardware.device: unknown key; did you mean hardware.devices? There are: ",
    "foo.bar=1": "foo: unknown key; there are: algo, ",
    "~foo": "foo: unknown key; there are: algo, ",
    "~hardware": "hardware: is missing; choose one with hardware=<name>: 1gpu, 2cpu, ",
    "env.render_mode=human": "env.render_mode: unknown key; an argument of its constructor is written "
    "+env.kwargs.render_mode=<value>; there are: atari, ",
    "+env.render_mode=human": "env.render_mode: unknown key; an argument of its constructor is written ",
    "env.kwargs={size:5}": "env.kwargs.size: unknown key; there are none yet, and a new one is written with +: ",
    "eval={evry:3}": "eval.evry: unknown key; did you mean eval.every? There are: ",
    "logger.csv={x:1}": "logger.csv.x: unknown key; there are: name",
    "eval={every:3,x:{y:3}}": "eval.x: unknown key; there are: episodes, every",
    "algo={gama:0.9}": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "exploration={icm:{eta:1}}": "exploration.icm: is not selected; add it: exploration=[icm]",
    "env.kwargs.size=5": "env.kwargs.size: unknown key; there are none yet, and a new one is written with +: ",
    "algo.n_steps=5": "algo.n_steps: unknown key; did you mean rollout_fragment_length?",
    "logger.wandb.project=x": "logger.wandb: is not selected; add it: logger=[progress,tensorboard,wandb]",
    "exploration.icm.eta=1": "exploration.icm: is not selected; add it: exploration=[icm]",
    "algo=dqn +exploration.icm.eta=1": "exploration.icm: is not selected; add it: exploration=[epsilon_greedy,icm]",
    "algo.gamma.x=3": "algo.gamma.x: unknown key: algo.gamma is a single value and has no keys",
    "model@critic=mlp": "model@critic: there is no such group. Did you mean to override one of model, ",
    "hydra.run.dri=x": "hydra.run.dri: unknown key; did you mean hydra.run.dir? There are: dir",
    "+algo=sac": "algo: exists already: write algo=<value>, without +",
    "+seed=1": "seed: exists already: write seed=<value>, without +",
    # types and ranges
    "algo.gamma=1.5": "algo.gamma: 1.5 is out of range: should be less than or equal to 1",
    "algo.gamma=high": "algo.gamma: 'high' has the wrong type: should be a valid number",
    "algo.gamma=": "algo.gamma: '' has the wrong type: should be a valid number",
    "seed=-1": "seed: -1 is out of range: should be greater than or equal to 0",
    "seed=1.5": "seed: 1.5 has the wrong type: should be a valid integer",
    "algo=impala env=cartpole total_steps=-5": "total_steps: -5 is out of range: should be greater than 0",
    "algo=td3 env=pendulum exploration=[parameter_noise] exploration.parameter_noise.adaptation=0.5": "exploration."
    "parameter_noise.adaptation: 0.5 is out of range: should be greater than or equal to 1",
    f"algo=impala tuned=none num_envs=1 {ACTORS}": "hardware.actors.count: num_envs=1 cannot be shared equally among ",
    f"algo=a3c tuned=none train_batch_size=30 {ACTORS}": "train_batch_size: 30 transitions are not whole rollouts of "
    "10 steps that divide the 4 environments of a process; use 10 or 20 or 40",
    "total_steps=0": "total_steps: 0 is out of range: should be greater than 0",
    "num_envs=true": "num_envs: true has the wrong type: should be a number",
    "compile=maybe": "compile: 'maybe' is none of the options: should be 'off', 'auto' or 'max'",
    "eval=3": "eval: 3 has the wrong type: should be a mapping",
    "model.hidden=64": "model.hidden: 64 has the wrong type: should be a valid list",
    "model.hidden=[64,0]": "model.hidden[1]: 0 is out of range: should be greater than 0",
    "model.activation=rellu": "model.activation: 'rellu' is none of the options: should be 'tanh'",
    "algo.lr=-1": "algo.lr: -1 is out of range: should be greater than or equal to 0",
    "algo.lr=inf": "algo.lr: inf is out of range: should be a finite number",
    "algo.lr=nan": "algo.lr: nan is out of range: should be a finite number",
    "algo.lr=[[0,1e-3],[9,inf]]": "algo.lr[1][1]: inf is out of range: should be a finite number",
    "hardware.actors.timeout_s=inf": "hardware.actors.timeout_s: inf is out of range: should be a finite number",
    "algo.lr=[[0,1e-3],[9]]": "algo.lr[1][1]: is missing",
    "logger.csv=3": "logger.csv: 3 has the wrong type: should be a mapping with 'name' and settings",
    "critic_model=mlp256": "critic_model: 'mlp256' has the wrong type: should be a mapping with 'name'",
    # what is missing
    "~algo": "algo: ",
    "~algo.gamma": "algo.gamma: is missing",
    "env=gymnasium": "env.id: must be given: env.id=<value>",
    "algo.gamma=${nope}": "algo.gamma: Interpolation key 'nope' not found",
    # syntax
    "algo.gamma=[1": "algo.gamma: cannot read 'algo.gamma=[1': should be key=value",
    "algo=sac train": "cannot read 'train': should be key=value",
    "=3": "cannot read '=3': should be key=value",
    "seed=1,2": "seed: 1,2 is several values: add -m to sweep over them, or write a list [a,b]",
    "seed=range(3)": "seed: range(3) is several values: add -m to sweep over them",
    "algo=[ppo,sac]": "algo: should be exactly one option of ",
    # verbs and flags
    "trian algo=sac": "unknown verb 'trian'; did you mean train? There are: check, data, estimate, evaluate, "
    "new, plugins, profile, resume, train",
    "--bogus": "there is no flag --bogus; see --help",
    "algo=ppo -m seed=1,2": "unrecognized arguments: seed=1,2; flags such as -m come before the settings; see --help",
    "--cfg jobs": "argument --cfg/-c: invalid choice: 'jobs'",
    "--config-dir /no/such/folder": "Additional config directory '/no/such/folder' not found",
    "data data.path=runs/x": "data takes paths and no settings: runs/x, not data.path=runs/x",
    "check --bogus": "there is no flag --bogus; settings are written key=value",
    "check algo=sacc": "algo: unknown option 'sacc'; did you mean sac? There are: ",
    "plugins algoo": "unknown kind 'algoo'; did you mean algo? There are: ",
    "plugins algo sacc": "algo.name: unknown algo 'sacc'; did you mean sac? There are: ",
    "plugins a b c": "plugins takes at most a kind and a name",
    # spaces and crosses
    "algo=dqn env=pendulum": "algo: dqn needs one Discrete action, but the environment's are Box(-1.0, 1.0, (1,)",
    "algo=dqn model=lstm": "buffer: replay keeps no recurrent states, which dqn's model needs; use ",
    "algo=dqn buffer=sequence": "buffer: sequence keeps recurrent states, but the model has none; use ",
    "algo=reinforce model=lstm": "model: Reinforce cannot learn with a recurrent model; use another model",
    "algo=ppo env=taxi preprocess.normalize_obs=true": "preprocess.normalize_obs: the observations contain no ",
    "algo=ppo env=cartpole env.frame_stack=4": "env.frame_stack: ",
    "algo=ppo env=pendulum exploration=[boltzmann]": "exploration.boltzmann: ",
    "algo=ppo model=lstm model.torso.hiddn=[3]": "model.torso.hiddn: unknown key; did you mean model.torso.hidden",
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
    "train_batch_size=512": "train_batch_size: applies to buffers that are sampled, but a rollout is used whole",
    "algo=ppo replay_ratio=1": "replay_ratio: 1.0 requests more updates than there are samples, 0.00",
    "algo=impala replay_ratio=1": "replay_ratio: 1.0 requests more updates than there are samples, 0.015625 a step; ",
    "++train_batch_size=512": "train_batch_size: applies to buffers that are sampled, but a rollout is used whole",
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
    # the machine
    "hydra.run.dir=/proc/nope": "hydra.run.dir: /proc/nope cannot be made: ",
    "-m seed=1,2 hydra.sweep.dir=/proc/nope": "hydra.sweep.dir: /proc/nope cannot be made: ",
    f"--config-name {'x' * 300}": f"{files('hydra.conf') / ('x' * 300)}.yaml cannot be read: File name too long",
    "hardware=1gpu": "hardware: needs a CUDA device, but none was found; use hardware=cpu",
    "'logger=[wandb]' logger.wandb.mode=online": "logger.wandb.mode: ",
    # environments
    "env=gymnasium env.id=Cartpole-v1": "env.id: ",
    "env=gymnasium env.id=CartPole-v7": "env.id: ",
    "+env.kwargs.nope=1": "env.kwargs: ",
    "env.mask_key=mask": "env.mask_key: neither the observation nor info of CartPole-v1 has 'mask'; use null to run ",
    "env=masked_cartpole env.frame_skip=2": "env.frame_skip: repeats actions that the masks of ",
    "env=masked_cartpole env.sticky_actions=0.3": "env.sticky_actions: repeats actions that the masks of ",
    # sweeps, refused before their first job
    "-m algo=ppo,sacc": "algo: unknown option 'sacc'; did you mean sac? There are: ",
    "-m algo=ppo seed=1,x": "seed: 'x' has the wrong type: should be a valid integer",
    "-m algo=ppo,sac algo.gama=1,2": "algo.gama: unknown key; did you mean algo.gamma? There are: ",
    "-m seed=range(3": "seed: cannot read 'seed=range(3'",
}


CHECK = "check shows what would run, without training: check algo=ppo env=cartpole"
PLAYS = "evaluate runs episodes: evaluate <run folder>"
WANDB = "logger=[progress,tensorboard,wandb]"
BAD |= {  # what is right in another program, or said in another way
    # flags
    "--dry-run": f"there is no flag --dry-run: {CHECK}",
    "algo=ppo --dry-run": f"there is no flag --dry-run: {CHECK}",
    "check --dry-run": f"there is no flag --dry-run: {CHECK}",
    "-v": "there is no flag -v: --version prints the version; a run prints more lines with logger.progress.every=1",
    "--list": "there is no flag --list: plugins lists what is installed: plugins [kind [name]]",
    "--seed 3": "there is no flag --seed: settings are written seed=<value>",
    "--env=CartPole-v1": "there is no flag --env: settings are written env=CartPole-v1",
    "--total-timesteps 9": "there is no flag --total-timesteps: settings are written total_steps=<value>",
    "--learning-rate=1e-3": "there is no flag --learning-rate: settings are written algo.lr=1e-3",
    "--track": f"there is no flag --track: settings are written {WANDB}",
    "--experimental-rerun job.pickle": "--experimental-rerun is not supported; use resume",
    "-sc query=bash": "--shell-completion query= is for the shell only; see install=",
    # verbs
    "play": f"unknown verb 'play'; {PLAYS}",
    "test runs/x": f"unknown verb 'test'; {PLAYS}",
    "plot": "unknown verb 'plot'; the numbers of a run are in its metrics.csv, and "
    "tensorboard --logdir runs draws them",
    "list": "unknown verb 'list'; plugins lists what is installed",
    # a member of another group
    "algo=rainbow": "algo: unknown option 'rainbow'; did you mean experiment=rainbow_cartpole or ",
    "algo=her": "algo: unknown option 'her'; did you mean buffer=her?",
    "algo=icm": "algo: unknown option 'icm'; did you mean exploration=[icm]?",
    "model=prioritized": "model: unknown option 'prioritized'; did you mean buffer=prioritized?",
    "env=wandb": "env: unknown option 'wandb'; did you mean logger=[wandb]?",
    "wandb=true": f"wandb: unknown key; did you mean {WANDB}?",
    "+wandb=true": f"wandb: unknown key; did you mean {WANDB}?",
    "track=true": f"track: unknown key; did you mean {WANDB}?",
    "icm=true": "icm: unknown key; did you mean exploration=[icm]?",
    "algo=dqn icm=true": "icm: unknown key; did you mean exploration=[epsilon_greedy,icm]?",
    "lstm=true": "lstm: unknown key; did you mean model=lstm?",
    "rainbow=true": "rainbow: unknown key; did you mean experiment=rainbow_cartpole or ",
    # values
    "algo.lr=linear": "algo.lr: 'linear' has the wrong type: should be a valid number, or a schedule such as "
    "[[0, 0.001], [100_000, 0]]",
    "total_steps=100k": "total_steps: '100k' has the wrong type: should be a valid integer, as in 100_000",
    "total_steps=1.5M": "total_steps: '1.5M' has the wrong type: should be a valid integer, as in 1_500_000",
    "total_steps=1e30": "total_steps: 1e+30 is out of range: should be less than or equal to 9223372036854775807",
    f"total_steps={2**63}": f"total_steps: {2**63} is out of range: should be less than or equal to {2**63 - 1}",
    f"algo=impala loop.broadcast_interval={10**20}": f"loop.broadcast_interval: {10**20} is out of range: should be ",
    "eval=false": "eval: false has the wrong type: should be a mapping; did you mean eval.every=0?",
    "checkpoint=false": "checkpoint: false has the wrong type: should be a mapping; did you mean checkpoint.every=0?",
    "logger=none": "logger: unknown option 'none'; did you mean logger=[]?",
    "exploration=false": "exploration: unknown option 'false'; did you mean exploration=[]?",
    "tuned=false": "tuned: unknown option 'false'; did you mean none? There are: ",
    "env=frozenlake env.kwargs={is_slippery:false}": "env.kwargs.is_slippery: unknown key; there are none yet, and a "
    "new one is written with +: +env.kwargs.is_slippery=<value>",
    "--hydra-help seed=3": "seed: cannot be set here",
    # folders
    "hydra.run.dir=": "hydra.run.dir: '' is not a folder; name one, or leave it out",
    "hydra.run.dir=null": "hydra.run.dir: field 'hydra.run.dir' is not Optional",
    "check hydra.run.dir=": "hydra.run.dir: '' is not a folder; name one, or leave it out",
    "-m seed=1,2 hydra.sweep.dir=": "hydra.sweep.dir: '' is not a folder; name one, or leave it out",
    "-m seed=1,2 hydra.sweep.subdir=": "hydra.sweep.subdir: '' is not a folder; name one, or leave it out",
    "hydra.searchpath=[file:///nowhere]": "hydra.searchpath: /nowhere does not exist",
    "-m seed=1,2 hydra.searchpath=[/nowhere]": "hydra.searchpath: /nowhere does not exist",
    "resume nowhere": "nowhere does not exist",
    # sweeps without an end
    "-m seed=range(1e9)": "seed: range(1e9) has more values than a sweep supports, 100,000; range(1,4) is ",
    "-m seed=shuffle(range(1000000000))": "seed: shuffle(range(1000000000)) has more values than a sweep supports",
    "-m algo.gamma=range(0,1,1e-30)": "algo.gamma: range(0,1,1e-30) has more values than a sweep supports",
    "-m seed=range(1,9,0)": "seed: range(1,9,0) has more values than a sweep supports",
    "-m seed=range(0,9000) num_envs=range(1,99)": "seed: the sweep would have 882,000 jobs; the maximum is 100,000",
}


@pytest.mark.parametrize("line", BAD)
def test_one_message_and_nothing_else(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (message,) = printed.err.splitlines()
    assert message.startswith("rlplug: " + BAD[line])
    assert list(tmp_path.iterdir()) == []


def test_several_mistakes_are_told_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["env=cartpole", "algo=impala", "total_steps=-5", "num_envs=-5"]) == 2
    told = [line.partition(" is out")[0] for line in capsys.readouterr().err.splitlines()]
    assert sorted(told) == ["rlplug: num_envs: -5", "rlplug: total_steps: -5"]
    assert main(["seed=x", "algo.gamma=2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rlplug: seed: 'x' has the wrong type: should be a valid integer",
        "rlplug: algo.gamma: 2 is out of range: should be less than or equal to 1",
    ]


def test_a_chosen_run_folder_is_not_left_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.chdir(tmp_path)
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
def test_an_environment_that_fails(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """At its first reset there is nothing yet to keep; later the way back stands on a line of its own."""
    monkeypatch.chdir(tmp_path)
    assert main(["env=gymnasium", "env.id=Broken-v0", f"+env.kwargs.where={where}", "logger=[]"]) == 1
    *_, error, last = capsys.readouterr().err.splitlines()
    if where == "reset":
        assert last == "rlplug: OSError: no field to play on"
        assert list(tmp_path.iterdir()) == []
    else:
        assert error == "rlplug: OSError: nothing moves"
        assert last.startswith("rlplug: there is no checkpoint yet; begin again with: python -m rlplug resume ")


@pytest.mark.parametrize("line", ["algo=sacc", "-m algo.gamma=2,3"])
def test_the_process_ends_with_code_2(line: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "rlplug", *line.split()], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
